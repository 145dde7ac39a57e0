"""The local experts of a layer: stacked as the kernels read them, with DeepSpeed's names in every state dict.

DeepSpeed has one module per local expert and writes one file per global expert. Its engine and files identify experts
by keys of a state dict, `deepspeed_experts.{local}.<name in the template>`. Our module saves and loads these keys. The
parameters that the optimizer updates are stacked, so that no step copies them.

Legend: T tokens on this rank, e local experts, H hidden size, I expert width, J pre-activation columns (2I if gated
else I).
"""

from collections.abc import Callable, Mapping
from typing import Self, final

import torch
from torch import Tensor, nn

from sonic_ep.integrations.deepspeed.template import Template
from sonic_ep.integrations.framework_experts import FrameworkExperts
from sonic_ep.routing import Routing
from sonic_ep.steps.experts_step import RunsAs

# Our names -> the template's, in the order of an MLP of two layers.
NAMES = {"w1": "w1", "bias1": "b1", "w2": "w2", "bias2": "b2"}


def _mark_experts(experts: nn.Module, group_name: str) -> None:
    """Gives parameters the attributes by which DeepSpeed's optimizers sort, reduce and divide experts' gradients."""
    for parameter in experts.parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
        parameter.group_name = group_name  # type: ignore[attr-defined]


@final
class StackedExperts(nn.Module):
    """The parameters of this rank's experts.

    w1: (e, J, H), interleaved gate and up rows if gated. w2: (e, H, I). bias1: (e * J,), bias2: (e * H,), if the
    template has biases; by that name and single dimension trainers exclude them from weight decay.

    All experts start with the template's values, as in DeepSpeed. A layer that is frozen there is frozen here.
    """

    w1: nn.Parameter
    w2: nn.Parameter
    bias1: nn.Parameter | None
    bias2: nn.Parameter | None

    def __init__(self, expert: nn.Module, template: Template, num_local_experts: int, group_name: str) -> None:
        super().__init__()
        self.template, self.num_local_experts, self._group_name = template, num_local_experts, group_name
        with torch.enable_grad():  # so that a value requires a gradient if the template's parameters do
            values = template.values(expert)
        for name, its in NAMES.items():
            parameter = None
            if its in values:
                value, trained = values[its].detach(), values[its].requires_grad
                stacked = value.expand(num_local_experts, *value.shape).clone().contiguous()
                parameter = nn.Parameter(stacked if value.dim() > 1 else stacked.flatten(), trained)
            self.register_parameter(name, parameter)
        _mark_experts(self, group_name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        _mark_experts(self, self._group_name)  # `to_empty` makes new parameters
        return self

    def forward(self, x_TH: Tensor, routing: Routing, computes: FrameworkExperts, runs_as: RunsAs | None) -> Tensor:
        """Returns each token's weighted sum over its experts, (T, H) like x. A collective.

        The weights are cast to the dtype of x. computes: them, of the layer.
        """
        values = {name: value.to(x_TH.dtype) for name, value in self.stacked().items()}
        weights = values["w1"], values["w2"], values.get("b1"), values.get("b2")
        return computes(x_TH, routing, weights, runs_as, activation=self.template.activation)

    def stacked(self) -> dict[str, Tensor]:
        """Returns the parameters by the template's names, with experts along dim 0."""
        count = self.num_local_experts
        return {NAMES[name]: each if each.dim() > 1 else each.view(count, -1) for name, each in self.named_parameters()}

    def _entries(self, keep_vars: bool = False) -> dict[str, Tensor]:
        """Returns views of the parameters under the keys of DeepSpeed's Experts."""
        stacked = {name: value if keep_vars else value.detach() for name, value in self.stacked().items()}
        return {
            f"deepspeed_experts.{local}.{name}": value
            for local in range(self.num_local_experts)
            for name, value in self.template.entries({key: all_[local] for key, all_ in stacked.items()}).items()
        }

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        for key, value in self._entries(keep_vars).items():
            destination[prefix + key] = value

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, object],
        prefix: str,
        local_metadata: Mapping[str, object],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        entries = self._entries()
        if self.w1.is_meta:
            error_msgs.append(f"the experts of {prefix} have no memory yet: call to_empty(device=...) before loading")
        for key, own in entries.items():
            value = state_dict.get(prefix + key)
            if value is None:
                missing_keys.append(prefix + key)
            elif not isinstance(value, Tensor) or value.shape != own.shape:
                given = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
                error_msgs.append(
                    f"size mismatch for {prefix}{key}: {given} in the checkpoint, {tuple(own.shape)} here"
                )
            else:
                own.copy_(value)
        if strict:
            unexpected_keys += [
                key for key in state_dict if key.startswith(prefix) and key.removeprefix(prefix) not in entries
            ]
