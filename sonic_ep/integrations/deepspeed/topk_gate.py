"""`TopKGate`: DeepSpeed's TopKGate with drop_tokens=False, by our router. Same experts, weights, counts and loss.

The probabilities are a softmax over all experts in fp32. k = 1: the weight is the probability itself. k > 1: the k
probabilities are divided by their sum. k = 2: the second expert is the second best, or with
top2_2nd_expert_sampling the one with the largest logit plus Gumbel noise. The loss is, over this rank's tokens before
rounding,

    l_aux = E * sum_e mean_t(probability of e) * (share of the tokens' experts that are e)

where for k = 2 only the first expert of each token counts, otherwise all k. With the policy RSample and k = 1, training
takes the expert with the largest logit plus Gumbel noise; the weight stays the probability without noise. Source:
top1gating, top2gating, topkgating in deepspeed 0.19.8, moe/sharded_moe.py.

Legend: T tokens on this rank, H hidden size, E experts, K experts per token, N pairs this rank sends. k is DeepSpeed's
name of K.
"""

import math
from dataclasses import replace
from typing import final

import torch
from deepspeed.moe.sharded_moe import gumbel_rsample
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing all of Dynamo

from sonic_ep.config import MoEConfig, RoundingConfig, RouterConfig
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.routers.route import RoutingContext
from sonic_ep.routers.router import Routed, Router, route
from sonic_ep.routers.topk import TopK, compute_topk
from sonic_ep.routing import Routing

_JITTER = 1e-2
_OFF = RoundingConfig(mode="off")
Results = tuple[Tensor, Routing, Tensor, Tensor]  # of the gate


@final
class TopKGate(nn.Module):
    """The parameter is wg.weight (E, H). policy: DeepSpeed's noisy_gate_policy. samples_second: its
    top2_2nd_expert_sampling. rounding: None for none.
    """

    def __init__(
        self,
        hidden_size: int,
        E: int,
        k: int,
        *,
        policy: str | None,
        samples_second: bool,
        rounding: RoundingConfig | None,
    ) -> None:
        super().__init__()
        self.k = k
        self.samples = (policy == "RSample" and k == 1) or (samples_second and k == 2)
        router = RouterConfig(
            renormalize=k > 1,
            balance="none" if k == 2 else "batch",
            balance_coef=0.0 if k == 2 else 1.0,
            jitter=_JITTER if policy == "Jitter" else 0.0,
        )
        # No decision depends on the experts' width n.
        self.wg = Router(MoEConfig(d=hidden_size, n=1, E=E, K=k, router=router, rounding=rounding or _OFF))
        nn.init.kaiming_uniform_(self.wg.weight, a=math.sqrt(5))  # as nn.Linear, which DeepSpeed uses

    def forward(
        self,
        x_TH: Tensor,
        used_T: Tensor | None = None,
        *,
        group: EPGroup,
        problem: str | None = None,
        exchange: Exchange | None = None,
    ) -> Results:
        """Returns the rows for the experts, their routing, l_aux (), unweighted, and exp_counts_E. A collective.

        exp_counts_E is (E,) int64: tokens of this rank per expert, before rounding. The rows are for the experts and
        for nothing else, see Routed.
        used_T: (T,) bool, for k = 1. An unused token is in no count and gets no expert's output. Its expert computes it
        with weight zero, so that the host need not know the number of unused tokens.
        problem, exchange: see `Router.forward`, also for errors.
        """
        compiles = torch.compiler.is_dynamo_compiling()
        if compiles and not self._samples_now and not self._has_own_loss(used_T):
            T = x_TH.shape[0]
            routed = self.wg(x_TH, group=group, sequence_length=T, problem=problem, exchange=exchange)
            return self._results(routed, used_T)
        route = self._outside_graphs if compiles else self._route
        return route(x_TH, used_T, group, problem, exchange)

    def _route(
        self, x_TH: Tensor, used_T: Tensor | None, group: EPGroup, problem: str | None, exchange: Exchange | None
    ) -> Results:
        logits_TE, x_TH = self.wg.logits(x_TH)
        context = RoutingContext(
            config=self.wg.config,
            group=group,
            dtype=x_TH.dtype,
            training=self.training,
            problem=problem,
            exchange=exchange,
        )
        topk = self._sampled(logits_TE) if self._samples_now else None
        routed = route(self.wg, x_TH, logits_TE, None, context, sequence_length=x_TH.shape[0], topk=topk)
        return self._results(routed, used_T)

    # The router's operation in a graph chooses by the logits alone, and has no gradient of the scores.
    _outside_graphs = _disable_dynamo(_route)

    def _results(self, routed: Routed, used_T: Tensor | None) -> Results:
        routing, l_aux, counts_E = routed.routing, routed.aux_loss, routed.topk.counts_E()
        if used_T is not None:
            routing = _of_used(routing, used_T)
            counts_E = _first_experts(routed, used_T)
        if self._has_own_loss(used_T):
            l_aux = _loss(routed, _first_experts(routed, used_T))
        return routed.x_TH, routing, l_aux, counts_E

    def _has_own_loss(self, used_T: Tensor | None) -> bool:
        """Returns True if l_aux is `_loss`, of the first experts of used tokens, in place of the router's own."""
        return used_T is not None or self.k == 2

    @property
    def _samples_now(self) -> bool:
        return self.samples and (self.training or self.k == 2)

    def _sampled(self, logits_TE: Tensor) -> TopK:
        """Returns each token's experts, the last one sampled. The noise is DeepSpeed's, from the device's generator."""
        noisy_TE = logits_TE.detach() + gumbel_rsample(logits_TE.shape, logits_TE.device)
        topk = compute_topk(logits_TE, None, self.k, self.wg.config.router)
        best_TK = topk.topk_ids_TK[:, :-1]
        sampled_TK = noisy_TE.scatter(1, best_TK.long(), -math.inf).argmax(1, keepdim=True)
        return topk.with_ids(torch.cat([best_TK, sampled_TK.to(best_TK.dtype)], 1))


def _of_used(routing: Routing, used_T: Tensor) -> Routing:
    tokens_N = routing.token_ids_N.long().clamp(min=0)  # a spare entry has token -1
    return replace(routing, weights_N=routing.weights_N * used_T.index_select(0, tokens_N))


def _first_experts(routed: Routed, used_T: Tensor | None) -> Tensor:
    """Returns (E,) int64: how many (used) tokens have each expert as their first."""
    E, ids_T = routed.topk.scores_TE.shape[1], routed.topk.topk_ids_TK[:, 0]
    ones_T = torch.ones_like(ids_T) if used_T is None else used_T.long()
    return torch.zeros(E, dtype=torch.int64, device=ids_T.device).scatter_add_(0, ids_T, ones_T)


def _loss(routed: Routed, counts_E: Tensor) -> Tensor:
    scores_TE = routed.topk.scores_TE
    T, E = scores_TE.shape
    return (scores_TE.sum(0) * counts_E).sum() * (E / max(T, 1) ** 2)
