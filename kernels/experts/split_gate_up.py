"""Gate and up weights that lie apart in memory as one GEMM operand whose rows are gate and up in turn, without a copy.

DeepSpeed's AutoEP holds the two in tensors of their own, (e, I, H) each. The rows of the interleaved (e, J, H) operand
then lie at addresses that two strides describe: H from one gate row to the next, and the distance of the two tensors
from a gate row to its up row. To TMA that is a stride like any other, so all that is missing is a tensor that says so:
`interleaved_view` makes it, and a kernel of an `split_gate_up_mod` knows how to read it. quack has the same for halves
of one tensor, where the distance follows from the shape (`concat_layout`).

Legend: e local experts, I expert width, J pre-activation columns (2I if gated else I), H hidden size.
"""

import functools
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Int64, const_expr
from torch import Tensor

from sonic_ep.kernels.experts.quack_compat import EpiMod, OverriddenEpiMod

_STRIDE_UNIT, _STRIDE_LIMIT = 16, 1 << 40  # bytes: TMA's strides are multiples of the one and below the other


def interleaved_view(gate_eIH: Tensor, up_eIH: Tensor) -> Tensor | None:
    """The operand of the kernels of an `split_gate_up_mod`: what two contiguous tensors, of one shape and dtype, make
    together.

    Its shape is (e, J, H) and the stride of its second dimension the distance of the two; it is of no use to anything
    else. It holds neither of them. None where TMA cannot read them so: up before gate, or one of the two not at a
    multiple of 16 bytes.
    """
    e, I, H = gate_eIH.shape  # noqa: E741
    start, distance = gate_eIH.data_ptr(), up_eIH.data_ptr() - gate_eIH.data_ptr()
    if gate_eIH.is_meta:  # nothing will be read
        distance = _STRIDE_UNIT
    if not 0 < distance < _STRIDE_LIMIT or start % _STRIDE_UNIT or distance % _STRIDE_UNIT:
        return None
    strides = I * H, distance // gate_eIH.element_size(), 1
    if gate_eIH.is_meta:
        return torch.empty_strided((e, 2 * I, H), strides, dtype=gate_eIH.dtype, device="meta")
    return torch.as_tensor(_Memory(gate_eIH, (e, 2 * I, H), strides), device=gate_eIH.device).view(gate_eIH.dtype)


class _Memory:
    """Memory behind a tensor in other shape and strides, of values of 16 bits, for torch to take as it is."""

    def __init__(self, tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        assert tensor.element_size() == 2
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "<i2",
            "data": (tensor.data_ptr(), False),
            "shape": shape,
            "strides": tuple(2 * stride for stride in strides),
        }


@functools.cache
def split_gate_up_mod(mod: EpiMod) -> EpiMod:
    """A quack epilogue whose kernels take a B that `interleaved_view` made."""
    return OverriddenEpiMod(mod, _ReadsSplitGateUp, "gate and up apart")


class _ReadsSplitGateUp:
    """What a kernel class does differently: the layout of its B."""

    def rotate_batch_last(self, mA: Any, mB: Any, *others: Any, **options: Any) -> tuple[Any, ...]:
        mA, mB, *others = super().rotate_batch_last(mA, mB, *others, **options)  # type: ignore[misc]  # pyright: ignore
        rows = const_expr(1 - mB.leading_dim)
        width = cute.assume(Int64(mB.shape[mB.leading_dim]), divby=_STRIDE_UNIT * 8 // mB.element_type.width)
        shape, stride = list(mB.shape), list(mB.stride)
        shape[rows], stride[rows] = (2, cute.size(mB, mode=[rows]) // 2), (mB.stride[rows], width)
        return mA, cute.make_tensor(mB.iterator, cute.make_layout(tuple(shape), stride=tuple(stride))), *others
