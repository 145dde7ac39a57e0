"""Token rounding behind Megatron's router: the router chooses top-K, the group's decision changes which pairs are kept.

Auxiliary losses, z-loss and the counts that move the expert bias are the router's, of the plain top-K. A kept pair
weighs what the router gave it; an added one its own softmax probability, or its sigmoid score over the token's top-K
sum. Source: SonicMoE, arXiv 2512.14080, section 5; docs/token_rounding.md.

Legend: T tokens on this rank, E experts, K experts per token, N pairs, g expert groups.
"""

from typing import Any, final

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from sonic_ep.config import MoEConfig, RoundingConfig
from sonic_ep.groups import EPGroup
from sonic_ep.integrations.megatron.routing_map import topk_ids
from sonic_ep.routers.decision import Situation, decide_selection
from sonic_ep.routers.selection import choice_mask
from sonic_ep.routers.topk import Choice
from sonic_ep.routing import Routing


@final
class RoundedRouter:
    """Rounds what `router`, a TopKRouter, returns. It reads the logits that the router passes to its own `routing`."""

    def __init__(self, router: Any, config: TransformerConfig, rounding: RoundingConfig, group: EPGroup) -> None:
        E, n = config.num_moe_experts, config.moe_ffn_hidden_size
        assert E is not None
        assert n is not None
        self.router, self.config, self.group = router, config, group
        self.moe_config = MoEConfig(d=config.hidden_size, n=n, E=E, K=config.moe_router_topk, rounding=rounding)
        self._logits: Tensor | None = None
        routing = router.routing

        def routing_with_logits(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            if router.training:
                self._logits = logits
            return routing(logits, *args, **kwargs)

        router.routing = routing_with_logits

    def routing(self, probs_TE: Tensor, routing_map_TE: Tensor, dtype: torch.dtype) -> Routing:
        """The rounded routing of the router's last (probs, routing_map). A collective of the EP group; for training.

        Differentiable in probs and, for added pairs, in the logits. dtype: of the experts' input.
        """
        logits, self._logits = self._logits, None
        assert logits is not None
        (T, E), K = routing_map_TE.shape, self.config.moe_router_topk
        ids_TK = topk_ids(routing_map_TE, K)
        scores_TE = self._scores(logits.reshape(T, E))
        ranking_TE = scores_TE.detach()
        if self.router.expert_bias is not None:
            ranking_TE = ranking_TE + self.router.expert_bias
        choice = Choice(scores_TE, ranking_TE, self._allowed(ranking_TE), ids_TK, routing_map_TE.sum(0))
        situation = Situation(config=self.moe_config, group=self.group, dtype=dtype, training=True)
        unread_E = torch.zeros(E, dtype=torch.int64, device=ids_TK.device)  # Megatron's router counts by itself
        selection = decide_selection(self.router, choice, unread_E, situation)
        # A spare entry has token -1; its weight is never used.
        pairs_N = (selection.token_ids_N.long() * E + selection.expert_ids_N).clamp(min=0)
        # The router's probability is 0 where it did not choose.
        gates_N = probs_TE.reshape(-1).index_select(0, pairs_N).float()
        added_N = self._weights(scores_TE, ids_TK).reshape(-1).index_select(0, pairs_N)
        gates_N = gates_N + torch.where(selection.chosen_N, 0, added_N)
        return Routing(gates_N, selection.token_ids_N, selection.counts, T, selection.most_rows)

    def _scores(self, logits_TE: Tensor) -> Tensor:
        logits_TE = logits_TE.float()
        return logits_TE.softmax(1) if self.config.moe_router_score_function == "softmax" else logits_TE.sigmoid()

    def _weights(self, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """What every pair weighs if it is added."""
        if self.config.moe_router_score_function == "sigmoid" and ids_TK.shape[1] > 1:
            scores_TE = scores_TE / (scores_TE.gather(1, ids_TK).sum(1, keepdim=True) + 1e-20)
        return scores_TE * (self.config.moe_router_topk_scaling_factor or 1)

    def _allowed(self, ranking_TE: Tensor) -> Tensor | None:
        """(T, E) bool: the experts of each token's best groups, by the rule of Megatron's group_limited_topk."""
        groups, kept = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        if not groups or not kept:
            return None
        scores_Tg = ranking_TE.unflatten(1, (groups, -1)).topk(self.config.moe_router_topk // kept, dim=2)[0].sum(2)
        return choice_mask(scores_Tg.topk(kept, dim=1).indices, groups).repeat_interleave(
            ranking_TE.shape[1] // groups, dim=1
        )
