"""The results of a router of a transformers model: its logits, and how it makes weights of them.

transformers' registries pass the experts that a router chose and their weights alone. So a hook on the router notes its
logits. By the values of the weights the host finds how they follow from the logits.

Legend: T tokens on this rank, E experts, K experts per token.
"""

from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.config import RouterConfig

_ROUTERS = ("gate", "router")  # what the module next to the experts is called
_TOLERANCE = 1e-3  # of the largest weight, where weights and logits are in fp32


def router_next_to(model: nn.Module, experts: str) -> nn.Module:
    """Returns the router next to the experts, either of which PEFT may have wrapped. Raises ValueError."""
    parts = experts.split(".")
    around = [model.get_submodule(".".join(parts[:length])) for length in reversed(range(len(parts)))]
    candidates = [getattr(block, name, None) for block in around for name in _ROUTERS]
    router: Any = next((each for each in candidates if isinstance(each, nn.Module)), None)
    if router is None:
        raise ValueError(
            f"there is no module called {' or '.join(_ROUTERS)} next to {experts} or around it, which would give "
            "the logits that round_tokens and replay_routing need"
        )
    if hasattr(router, "get_base_layer"):  # LoRA of its weight: what is in PEFT's wrapper stays when that is removed
        router = router.get_base_layer()
    return router


class Rule(NamedTuple):
    """How a router makes weights of scores: divided by their sum over K if `config.renormalize`, and times scale."""

    config: RouterConfig
    scale: float

    def weights(self, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """Returns (T, K) weights without the scale."""
        chosen_TK = self.scores(logits_TE).gather(1, ids_TK)
        return chosen_TK / (chosen_TK.sum(1, keepdim=True) + 1e-20) if self.config.renormalize else chosen_TK

    def weights_in_place_of(
        self, logits_TE: Tensor, own_ids_TK: Tensor, own_weights_TK: Tensor, ids_TK: Tensor
    ) -> Tensor:
        """Returns (T, K) weights of other experts than the router's own, in the dtype of its weights. Differentiable.

        A token that has the router's experts, in any order, has exactly the router's weights.
        """
        is_same_TKK = ids_TK[:, :, None] == own_ids_TK[:, None, :]
        own_TK = (is_same_TKK * own_weights_TK[:, None, :]).sum(2)
        others_TK = self.scale * self.weights(logits_TE, ids_TK)
        return own_TK.where(is_same_TKK.any(2).all(1, keepdim=True), others_TK.to(own_TK.dtype))

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Returns (T, E) scores in fp32 or fp64."""
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        return logits_TE.softmax(1) if self.config.score == "softmax" else logits_TE.sigmoid()


def _rules(K: int) -> list[Rule]:
    """Returns the rules that are tried. Renormalized, the only weight of a token is 1 and explains no scores."""
    return [
        Rule(RouterConfig(score=score, renormalize=renormalize), 1.0)
        for renormalize in ((True, False) if K > 1 else (False,))
        for score in ("softmax", "sigmoid")
    ]


@final
class RouterOutputs:
    """The results, in this step, of the router next to one module of experts.

    needed_by: the function of ours that needs it, for messages. training_only: whether evaluation is of no interest.
    """

    def __init__(self, router: nn.Module, needed_by: str, *, training_only: bool) -> None:
        self._needed_by, self._training_only = needed_by, training_only
        self._outputs: tuple[Any, ...] = ()
        self._rule: Rule | None = None
        self._hook = router.register_forward_hook(self._note)

    def remove(self) -> None:
        """Ends it."""
        self._hook.remove()

    def _note(self, router: nn.Module, _: Any, output: Any) -> None:
        if router.training or not self._training_only:
            self._outputs = output if isinstance(output, tuple) else (output,)

    def pop_logits(self, E: int) -> Tensor | None:
        """Returns the (T, E) logits of the router's last call, and forgets them. None if it returned no such tensor."""
        outputs, self._outputs = self._outputs, ()
        if not outputs:
            raise ValueError(
                f"the model's router was not called before its experts in this step, so {self._needed_by} has no "
                f"logits; call the whole block, and {self._needed_by} again if either is a copy made since, as for "
                "PEFT's modules_to_save"
            )
        tensors = [each for each in outputs if isinstance(each, Tensor) and each.is_floating_point()]
        return next((each.reshape(-1, E) for each in tensors if each.dim() > 1 and each.shape[-1] == E), None)

    def rule_of(self, logits_TE: Tensor | None, ids_TK: Tensor, weights_TK: Tensor, E: int) -> tuple[Rule, str | None]:
        """Returns the rule that makes the router's weights of its logits, or another and the problem."""
        T, K = ids_TK.shape
        rule = self._rule or _rules(K)[0]
        if logits_TE is None or logits_TE.shape[0] != T:
            return rule, (
                f"the router returned no tensor with the logits of {T} tokens and {E} experts; train this model "
                f"without {self._needed_by}"
            )
        return self._found_rule(logits_TE, ids_TK, weights_TK) if self._rule is None and T else (rule, None)

    @torch.no_grad()
    def _found_rule(self, logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> tuple[Rule, str | None]:
        """Returns the rule that explains the router's weights, or the problem that none does. The host waits.

        The rule is kept once no rule with other scores explains them as well. At the start of training, logits of zero
        allow several.
        """
        rules = _rules(ids_TK.shape[1])
        if not host_may_wait(logits_TE):
            return rules[
                0
            ], f"{self._needed_by} reads the router's weights in its first steps; run eager ones before a capture"
        largest = float(weights_TK.abs().max())
        errors: dict[Rule, float] = {}
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
                f"logits, by more than {tolerance:.1%}, so the weights of other experts are not known; train this "
                f"model without {self._needed_by}"
            )
        close = [rule for rule in errors if errors[rule] <= tolerance]
        if {rule.config.score for rule in close} == {best.config.score}:
            self._rule = best
        return best, None
