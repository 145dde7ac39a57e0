"""`first_order`: for the backward of a torch.autograd.Function that cannot be differentiated."""

import functools
from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]
Call = TypeVar("Call")


class Context(Protocol[Call]):
    """The ctx of a torch.autograd.Function. call: what forward leaves for backward besides tensors."""

    call: Call
    saved_tensors: tuple[Tensor, ...]  # None where forward has saved None
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def maybe_clear_saved_tensors(self) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


def first_order(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorates a backward: its gradients raise RuntimeError where they are differentiated.

    torch's once_differentiable does so too, but not in torch.autograd.grad(gradients, inputs), which then returns
    gradients without the second derivatives of this function, or zero.
    """

    @functools.wraps(backward)
    def run(ctx: Context[None], *grad_outputs: Tensor | None) -> Gradients:
        if not torch.is_grad_enabled():  # without create_graph
            return backward(ctx, *grad_outputs)
        # The returned gradients depend on these for autograd: a derivative by any of them reaches _NotDifferentiable.
        causes = [t for t in (*grad_outputs, *ctx.saved_tensors) if t is not None and t.requires_grad]
        with torch.no_grad():
            gradients = backward(ctx, *grad_outputs)
        given = [gradient for gradient in gradients if gradient is not None]
        if not causes or not given:
            return gradients
        marked = iter(_NotDifferentiable.apply(len(given), *given, *causes))
        return tuple(None if gradient is None else next(marked) for gradient in gradients)

    return run


def refuse_second_order(*_: object) -> NoReturn:
    """Raises RuntimeError, as the backward of a backward."""
    raise RuntimeError(
        "an MoE layer has no second derivatives: its gradients cannot be differentiated; leave it out of what needs "
        "create_graph=True"
    )


class _NotDifferentiable(torch.autograd.Function):
    """Returns its first `number` tensors, which depend on the others too for autograd. Its backward raises."""

    @staticmethod
    def forward(ctx: Context[None], number: int, *tensors: Tensor) -> Gradients:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:number])

    @staticmethod
    def backward(ctx: Context[None], *grad_outputs: Tensor) -> Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_order()
