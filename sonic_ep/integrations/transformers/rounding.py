"""Token rounding for transformers' models: the model's router chooses experts, then rounding removes and adds pairs.

Rounding needs the scores of all experts, and transformers' registries pass those chosen alone. So a hook on the router
notes its logits. Auxiliary losses are the model's own, of plain top-K. A top-K pair that remains has the weight that
the router gave it; a pair that rounding added has one that the router would have made of its score.

Legend: T tokens on this rank, E experts, K experts per token.
"""

from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.config import RoundingConfig, RouterConfig
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.integrations.rounded_routing import rounded_routing
from sonic_ep.integrations.topk_routing import config_of
from sonic_ep.integrations.transformers.experts import TOKEN_ROUNDING, registered_experts
from sonic_ep.routers.route import RoutingContext, decide_pairs
from sonic_ep.routers.topk import TopK
from sonic_ep.routing import Routing
from sonic_ep.transports import GroupTransport

_ROUTERS = ("gate", "router")  # what the module next to the experts is called
_TOLERANCE = 1e-3  # of the largest weight, where weights and logits are in fp32


def round_tokens(model: nn.Module, rounding: RoundingConfig) -> list[str]:
    """Rounds the routing of all experts of a model, in training mode. Returns the names of the experts' modules.

    Call it once the model is built, on every rank, before or after PEFT adapts it; again to change the rounding, with
    mode="off" to end it. Its capacity_factor takes the place of the one of `register`.

    Example: model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="sonic_ep")
             round_tokens(model, RoundingConfig())

    Raises:  ValueError, with value, limit and fix, if there are no experts that sonic_ep could compute, for a router
             that limits each token to groups of experts, and for mode="off" with a capacity_factor. In the first
             training steps, on every rank, for weights of a router that are proportional neither to softmax nor to
             sigmoid of its logits, and for static buffers without a capacity_factor.
    """
    if rounding.mode == "off" and rounding.capacity_factor is not None:
        raise ValueError(
            f"rounding has mode='off' and capacity_factor={rounding.capacity_factor}, but mode='off' ends rounding; "
            "set another mode, or give it to register as SonicEPOptions(rounding=...)"
        )
    found = registered_experts(model, "there is nothing to round")
    routers = {} if rounding.mode == "off" else {name: _router_of(model, name) for name in found}
    for name, experts in found.items():
        before: TokenRounding | None = getattr(experts, TOKEN_ROUNDING, None)
        if before is not None:
            before.remove()
        setattr(experts, TOKEN_ROUNDING, TokenRounding(routers[name], rounding) if routers else None)
    return list(found)


def _router_of(model: nn.Module, experts: str) -> nn.Module:
    """Returns the router next to the experts, either of which PEFT may have wrapped, several times."""
    parts = experts.split(".")
    around = [model.get_submodule(".".join(parts[:length])) for length in reversed(range(len(parts)))]
    candidates = [getattr(block, name, None) for block in around for name in _ROUTERS]
    router: Any = next((each for each in candidates if isinstance(each, nn.Module)), None)
    if router is None:
        raise ValueError(
            f"there is no module called {' or '.join(_ROUTERS)} next to {experts} or around it, which would give the "
            "logits that rounding needs; train this model without round_tokens"
        )
    if hasattr(router, "get_base_layer"):  # LoRA of its weight: what is in PEFT's wrapper stays when that is removed
        router = router.get_base_layer()
    groups = getattr(router, "num_group", None) or getattr(router, "n_group", None) or 1
    if groups > 1:
        raise ValueError(
            f"the router of {experts} limits each token to some of {groups} groups of experts, and rounding would add "
            "experts of other groups; set n_group and topk_group to 1 in the model's config, or train it without "
            "round_tokens"
        )
    return router


class _Rule(NamedTuple):
    """How a router makes weights of scores: divided by their sum over K if `config.renormalize`, and times scale."""

    config: RouterConfig
    scale: float

    def weights(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Returns (T, K) weights without the scale."""
        chosen_TK = self.scores(logits_TE).gather(1, ids_TK)
        return chosen_TK / (chosen_TK.sum(1, keepdim=True) + 1e-20) if self.config.renormalize else chosen_TK

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Returns (T, E) scores in fp32 or fp64."""
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        return logits_TE.softmax(1) if self.config.score == "softmax" else logits_TE.sigmoid()


def _rules(K: int) -> list[_Rule]:
    """Returns the rules that are tried. Renormalized, the only weight of a token is 1 and explains no scores."""
    return [
        _Rule(RouterConfig(score=score, renormalize=renormalize), 1.0)
        for renormalize in ((True, False) if K > 1 else (False,))
        for score in ("softmax", "sigmoid")
    ]


@final
class TokenRounding:
    """The rounding of one module of experts."""

    def __init__(self, router: nn.Module, rounding: RoundingConfig) -> None:
        self.config = rounding
        self._outputs: tuple[Any, ...] = ()  # of the router in this step
        self._rule: _Rule | None = None
        self._hook = router.register_forward_hook(self._note)

    def remove(self) -> None:
        """Ends it."""
        self._hook.remove()

    def _note(self, router: nn.Module, _: Any, output: Any) -> None:
        if router.training:
            self._outputs = output if isinstance(output, tuple) else (output,)

    def pop_logits(self, E: int) -> Tensor | None:
        """Returns the (T, E) logits of the router's last call, and forgets them. None if it returned no such tensor."""
        outputs, self._outputs = self._outputs, ()
        if not outputs:
            raise ValueError(
                "the model's router was not called before its experts in this step, so there are no logits to round; "
                "call the whole block, and round_tokens again if either is a copy made since, as for PEFT's "
                "modules_to_save"
            )
        tensors = [each for each in outputs if isinstance(each, Tensor) and each.is_floating_point()]
        return next((each.reshape(-1, E) for each in tensors if each.dim() > 1 and each.shape[-1] == E), None)

    def routing(
        self,
        experts: nn.Module,
        topk_ids_TK: Tensor,
        topk_weights_TK: Tensor,
        logits_TE: Tensor | None = None,
        *,
        E: int,
        group: EPGroup,
        exchange: Exchange,
        dtype: torch.dtype,
    ) -> Routing:
        """Returns the rounded routing. A collective of the EP group, with the same errors on every rank.

        Differentiable in topk_weights_TK and, for added pairs, in the logits. experts: their module, for replay under
        activation checkpointing. E: of all ranks. dtype: of the experts' input.
        """
        (T, K), ids_TK, problem = topk_ids_TK.shape, topk_ids_TK.long(), self._problem_with_buffers(exchange)
        rule = self._rule or _rules(K)[0]
        if logits_TE is None or logits_TE.shape[0] != T:
            problem = (
                f"the router returned no tensor with the logits of {T} tokens and {E} experts; train this model "
                "without round_tokens"
            )
            logits_TE = topk_weights_TK.new_zeros(T, E)
        if problem is None and self._rule is None and T:
            rule, problem = self._found_rule(logits_TE, ids_TK, topk_weights_TK)
        scores_TE = rule.scores(logits_TE)
        config = config_of(E, K, rule.config, self.config)
        context = RoutingContext(
            config=config, group=group, dtype=dtype, training=True, exchange=exchange, problem=problem
        )
        routed_pairs = decide_pairs(experts, TopK(scores_TE, scores_TE.detach(), None, ids_TK), None, context)
        given_TE = torch.zeros_like(scores_TE).scatter(1, ids_TK, topk_weights_TK.to(scores_TE.dtype))
        return rounded_routing(routed_pairs, given_TE, scores_TE, rule.config, rule.scale)

    def _problem_with_buffers(self, exchange: Exchange) -> str | None:
        try:
            if isinstance(exchange, GroupTransport):
                exchange.config.check_bound(self.config)
        except ValueError as error:
            return str(error)
        return None

    @torch.no_grad()
    def _found_rule(self, logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[_Rule, str | None]:
        """Returns the rule that explains the router's weights, or the problem that none does. The host waits.

        The rule is kept once no rule with other scores explains them as well. At the start of training, logits of zero
        allow several.
        """
        rules = _rules(ids_TK.shape[1])
        if not host_may_wait(logits_TE):
            return rules[0], "rounding reads the router's weights in its first steps; run eager ones before a capture"
        largest = float(weights_TK.abs().max())
        errors: dict[_Rule, float] = {}
        for rule in rules:
            expected_TK = rule.weights(logits_TE, ids_TK)
            scale = float((weights_TK.to(expected_TK.dtype) * expected_TK).sum() / (expected_TK**2).sum())
            error = float((weights_TK - scale * expected_TK).abs().max()) / max(largest, 1e-20)
            errors[rule._replace(scale=scale)] = error
        tolerance = max(_TOLERANCE, 4 * max(torch.finfo(each.dtype).eps for each in (logits_TE, weights_TK)))
        best = min(errors, key=lambda rule: errors[rule])
        if not errors[best] <= tolerance:
            return best, (
                f"the router's weights differ by {errors[best]:.1%} from scaled {best.config.score} scores of its "
                f"logits, by more than {tolerance:.1%}, so the weights of added pairs are not known; train this model "
                "without round_tokens"
            )
        close = [rule for rule in errors if errors[rule] <= tolerance]
        if {rule.config.score for rule in close} == {best.config.score}:
            self._rule = best
        return best, None
