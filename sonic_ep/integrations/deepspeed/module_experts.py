"""`ModuleExperts`: experts of any template, computed one after another on the rows that each of them receives.

The path for templates that no kernel computes. Routing, dispatch and combine are the same as in all layers. Between
dispatch and combine each expert's module is called on its rows, in plain autograd:

    forward    x_PH = dispatch(x)[rows of the pairs]     y_PH = modules(x_PH)     out = combine(s * y_PH)
    backward   dO = dispatch(dout), dS = <dO, y>         dy_PH = s * dO           dx = combine(gradient of x_PH)

The host reads the number of rows of each expert. x_PH and what the modules save stay in memory until backward.

Legend: T tokens on this rank, H hidden size, N pairs this rank sends, P rows of the pair buffer, e local experts, Z
partial sums of one value. Lists of the pair buffer may have spare capacity; x_PH and y_PH have none.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from deepspeed.moe.experts import Experts as StockExperts
from torch import Tensor, nn

from sonic_ep.dispatch.plan import plan_for
from sonic_ep.dispatch.protocol import DispatchHandle, Transport
from sonic_ep.first_order import Context, first_order
from sonic_ep.groups import EPGroup
from sonic_ep.integrations.framework_experts import FrameworkExperts
from sonic_ep.routing import Routing


def mark_experts(experts: nn.Module, group_name: str) -> None:
    """Gives parameters the attributes by which DeepSpeed's optimizers sort, reduce and divide experts' gradients."""
    for parameter in experts.parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
        parameter.group_name = group_name  # type: ignore[attr-defined]


@final
class ModuleExperts(StockExperts):
    """DeepSpeed's Experts: `deepspeed_experts`, a copy of the template for each local expert, with its marks and keys.

    hidden_size: H. group_name: DeepSpeed's name of the expert-parallel group.
    """

    def __init__(self, expert: nn.Module, hidden_size: int, num_local_experts: int, group_name: str) -> None:
        super().__init__(expert, num_local_experts, group_name)
        self.hidden_size, self._group_name = hidden_size, group_name

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        mark_experts(self, self._group_name)  # `to_empty` makes new parameters
        return self

    def describe(self) -> str:
        """Returns text that is equal on two ranks if their modules and weights are, by type and shape."""
        expert = self.deepspeed_experts[0]
        kinds = [(name, type(module).__name__) for name, module in expert.named_modules()]
        return f"{kinds}, {[(name, tuple(value.shape)) for name, value in expert.state_dict().items()]}"

    def dtypes(self) -> list[torch.dtype]:
        """Returns the dtypes of the template's parameters; rows must have one of them. Empty if it has none."""
        return list(dict.fromkeys(each.dtype for each in self.parameters() if each.is_floating_point()))

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_TH: Tensor, routing: Routing, computes: FrameworkExperts, _: None
    ) -> Tensor:
        """Returns each token's weighted sum over its experts, (T, H) in the dtype of x. A collective.

        computes: tells transport and group. Raises ValueError if a module returns another shape than (rows, H).
        """
        transport, group = computes.transport, computes.group
        weights_N = routing.weights_N.to(torch.promote_types(routing.weights_N.dtype, torch.float32))
        step = _Step.prepare(x_TH, replace(routing, weights_N=weights_N.detach()), transport, group)
        y_PH = self._outputs(_ToExperts.apply(x_TH, step), step)
        return _FromExperts.apply(y_PH, weights_N, step)

    def _outputs(self, x_PH: Tensor, step: "_Step") -> Tensor:
        outputs = []
        for rows, expert in zip(x_PH.split(step.rows_e), self.deepspeed_experts, strict=True):
            out = expert(rows)
            out = out[0] if isinstance(out, tuple) else out  # as DeepSpeed does
            if not isinstance(out, Tensor) or out.shape != rows.shape:
                got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
                raise ValueError(
                    f"expert={type(expert).__name__} returned {got} for rows of shape {tuple(rows.shape)}, wanted the "
                    f"same shape: an expert maps each row of hidden_size={self.hidden_size} to one of that size"
                )
            outputs.append(out.to(rows.dtype))
        return torch.cat(outputs)


@dataclass(frozen=True, slots=True)
class _Step:
    """Shared by forward and backward of one call.

    weights_P: combine weights of the pair buffer. rows_e: the number of rows of each expert, padding rows included.
    """

    transport: Transport
    handle: DispatchHandle
    weights_P: Tensor
    rows_e: list[int]

    @classmethod
    def prepare(cls, x_TH: Tensor, routing: Routing, transport: Transport, group: EPGroup) -> Self:
        """Sends the lists of this routing. Raises the errors of `Routing.check`, on every rank."""
        with torch.no_grad(), torch.autocast(x_TH.device.type, enabled=False):
            with routing.status_first():
                prepared = transport.prepare(routing, plan_for(routing.counts, group.rank))
            routing.check()
        rows_e = prepared.handle.expert_starts_e.diff().tolist()
        return cls(transport, prepared.handle, prepared.weights_P, rows_e)

    @property
    def num_rows(self) -> int:
        return sum(self.rows_e)

    def dispatched(self, x_TH: Tensor) -> Tensor:
        """Returns the row of each pair-buffer row, (P, H)."""
        received_RH = self.transport.dispatch(x_TH.contiguous(), self.handle).result()
        return received_RH.index_select(0, self.handle.row_of_pair_P[: self.num_rows])

    def padded(self, values: Tensor) -> Tensor:
        """Returns values (P, ...) with as many entries as the lists, zero in the spare ones."""
        spare = self.weights_P.shape[0] - values.shape[0]
        values = values.contiguous()
        return values if spare == 0 else torch.cat((values, values.new_zeros(spare, *values.shape[1:])))


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context[_Step], x_TH: Tensor, step: _Step) -> Tensor:
        ctx.call = step
        with torch.autocast(x_TH.device.type, enabled=False):
            return step.dispatched(x_TH)

    @staticmethod
    @first_order
    def backward(ctx: Context[_Step], *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        step = ctx.call
        with torch.autocast(grad_outputs[0].device.type, enabled=False):
            return step.transport.combine(step.padded(grad_outputs[0]), None, step.handle).result(), None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context[_Step], y_PH: Tensor, weights_N: Tensor, step: _Step) -> Tensor:
        ctx.call = step
        ctx.save_for_backward(y_PH)
        with torch.autocast(y_PH.device.type, enabled=False):
            return step.transport.combine(step.padded(y_PH), step.weights_P, step.handle).result()

    @staticmethod
    @first_order
    def backward(ctx: Context[_Step], *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        step = ctx.call
        (y_PH,) = ctx.saved_tensors
        with torch.autocast(y_PH.device.type, enabled=False):
            do_PH = step.dispatched(grad_outputs[0]).to(step.weights_P.dtype)
            ds_PZ = (do_PH * y_PH).sum(1, keepdim=True)
            dweights_N = step.transport.combine_scalars(step.padded(ds_PZ), step.handle).result()
            return (do_PH * step.weights_P[: step.num_rows, None]).to(y_PH.dtype), dweights_N, None
