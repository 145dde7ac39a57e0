"""Token rounding for transformers' models: the model's router chooses experts, then rounding removes and adds pairs.

Rounding needs the scores of all experts, which router_outputs.py finds. Auxiliary losses are the model's own, of plain
top-K. A top-K pair that remains has the weight that the router gave it; a pair that rounding added has one that the
router would have made of its score.

Legend: T tokens on this rank, E experts, K experts per token.
"""

from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn

from sonic_ep.config import RoundingConfig
from sonic_ep.groups import Exchange
from sonic_ep.integrations.rounded_routing import rounded_routing
from sonic_ep.integrations.topk_routing import config_of
from sonic_ep.integrations.transformers.experts import TOKEN_ROUNDING, registered_experts
from sonic_ep.integrations.transformers.router_outputs import RouterOutputs, router_next_to
from sonic_ep.routers.topk_pairs import GivenTopK, RouterCall
from sonic_ep.routing import Routing
from sonic_ep.steps.experts_step import RunsAs
from sonic_ep.transports import GroupTransport


def round_tokens(model: nn.Module, rounding: RoundingConfig) -> list[str]:
    """Rounds the routing of all experts of a model, in training mode. Returns the names of the experts' modules.

    Call it once the model is built, on every rank, before or after PEFT adapts it; again to change the rounding, with
    mode="off" to end it. Its capacity_factor takes the place of the one of `register`.

    Example: model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="sonic_ep")
             round_tokens(model, RoundingConfig())

    Raises:  ValueError, with value, limit and fix, if there are no experts that sonic_ep could compute, for dispatch by
             transformers itself (ep_implementation="all_reduce" and the like), for a router that limits each token to
             groups of experts, and for mode="off" with a capacity_factor. In the first
             training steps, on every rank, for weights of a router that are proportional neither to softmax nor to
             sigmoid of its logits, and for static buffers without a capacity_factor.
    """
    if rounding.mode == "off" and rounding.capacity_factor is not None:
        raise ValueError(
            f"rounding has mode='off' and capacity_factor={rounding.capacity_factor}, but mode='off' ends rounding; "
            "set another mode, or give it to register as SonicEPOptions(rounding=...)"
        )
    found = registered_experts(model, "there is nothing to round", "round_tokens")
    routers = {} if rounding.mode == "off" else {name: _router_of(model, name) for name in found}
    for name, experts in found.items():
        before: TokenRounding | None = getattr(experts, TOKEN_ROUNDING, None)
        if before is not None:
            before.outputs.remove()
        setattr(experts, TOKEN_ROUNDING, TokenRounding(routers[name], rounding) if routers else None)
    return list(found)


def _router_of(model: nn.Module, experts: str) -> nn.Module:
    router: Any = router_next_to(model, experts)
    groups = getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1
    if groups > 1:
        raise ValueError(
            f"the router of {experts} limits each token to some of {groups} groups of experts, and rounding would add "
            "experts of other groups; set n_group and topk_group to 1 in the model's config, or train it without "
            "round_tokens"
        )
    return router


@final
class TokenRounding:
    """The rounding of one module of experts."""

    def __init__(self, router: nn.Module, rounding: RoundingConfig) -> None:
        self.config = rounding
        self.outputs = RouterOutputs(router, "round_tokens", training_only=True)

    def routing(
        self,
        experts: nn.Module,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        logits_TE: Tensor | None = None,
        *,
        E: int,
        call: RouterCall,
        runs_as: RunsAs | None = None,
    ) -> Routing:
        """Returns the rounded routing. A collective of the EP group, with the same errors on every rank.

        Differentiable in topk_weights_TK and, for added pairs, in the logits. experts: their module, for replay under
        activation checkpointing. E: of all ranks.
        """
        (T, K), ids_TK = topk_ids_TK.shape, topk_ids_TK.long()
        rule, problem = self.outputs.rule_of(logits_TE, ids_TK, topk_weights_TK, E)
        call = replace(call, problem=self._problem_with_buffers(call.exchange) or problem)
        if logits_TE is None or logits_TE.shape[0] != T:
            logits_TE = topk_weights_TK.new_zeros(T, E)
        scores_TE = rule.scores(logits_TE)
        given, config = GivenTopK(ids_TK, topk_weights_TK, scores_TE, None), config_of(E, K, rule.config, self.config)
        return rounded_routing(experts, given, config, call, scale=rule.scale, runs_as=runs_as)

    def _problem_with_buffers(self, exchange: Exchange) -> str | None:
        try:
            if isinstance(exchange, GroupTransport):
                exchange.config.check_rounding(self.config)
        except ValueError as error:
            return str(error)
        return None
