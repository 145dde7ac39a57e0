"""Gate and up weights in two tensors, in a recording.

Kernels read up at its distance from gate, which is a number in their launches (kernels/experts/split_gate_up.py). So a
recording reads the two where they lie. Its input is a stand-in for both, a tensor without memory, and the gradient of
the stand-in is that of both.

Legend: e local experts, I expert width, J pre-activation columns (2I if gated else I), H hidden size.
"""

import functools
from typing import Any

import torch
from torch import Tensor


def stand_in(gate_eIH: Tensor, up_eIH: Tensor) -> Tensor:
    """Returns a tensor (e, J, H) without memory. Halves of its gradient along J are the gradients of gate and up."""
    e, I, H = gate_eIH.shape  # noqa: E741
    return _StandIn.apply(gate_eIH, up_eIH, _without_memory((e, 2 * I, H), gate_eIH.dtype, gate_eIH.device))


def where_they_lie(stand_in_eJH: Tensor, gate_eIH: Tensor, up_eIH: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gate and up. Their gradients go to the stand-in."""
    return _WhereTheyLie.apply(stand_in_eJH, gate_eIH.detach(), up_eIH.detach())


def distance_in_shape(gate_eIH: Tensor, up_eIH: Tensor) -> Tensor:
    """Returns an empty tensor with the distance from gate to up in its shape: (0, bytes).

    No kernel reads up at a distance below zero.
    """
    return gate_eIH.new_empty(0, max(up_eIH.data_ptr() - gate_eIH.data_ptr(), 0))


@functools.cache
def _without_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_eIH: Tensor, up_eIH: Tensor, without_memory: Tensor) -> Tensor:
        return without_memory.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *grad_outputs[0].chunk(2, 1), None


class _WhereTheyLie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in_eJH: Tensor, gate_eIH: Tensor, up_eIH: Tensor) -> tuple[Tensor, Tensor]:
        return gate_eIH.view_as(gate_eIH), up_eIH.view_as(up_eIH)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _as_one(*grad_outputs), None, None


def _as_one(dgate_eIH: Tensor, dup_eIH: Tensor) -> Tensor:
    """Returns (e, J, H) of two halves. Those that `moe` computes are views of that tensor already."""
    e, I, H = dgate_eIH.shape  # noqa: E741
    strides, offset = (2 * I * H, H, 1), dgate_eIH.storage_offset()
    is_one = dgate_eIH.untyped_storage().data_ptr() == dup_eIH.untyped_storage().data_ptr()
    if is_one and dgate_eIH.stride() == dup_eIH.stride() == strides and dup_eIH.storage_offset() == offset + I * H:
        return dgate_eIH.as_strided((e, 2 * I, H), strides, offset)
    return torch.cat((dgate_eIH, dup_eIH), 1)
