"""Split gate/up weights as one interleaved GEMM operand, without a copy.

DeepSpeed's AutoEP holds gate and up in two tensors, (e, I, H) each. Models of transformers hold them in one, where the
rows of an expert are [gate; up]. Two strides then describe the addresses of the rows of the interleaved (e, J, H)
operand: H elements from one gate row to the next, and the distance of up from gate from a gate row to its up row. TMA
can load with any such strides. `interleaved_view` makes a tensor that carries them, and the kernels of a
`split_gate_up_mod` read it. quack's `concat_layout` does the same for one tensor, where the distance follows from the
shape.

Legend: e local experts, I expert width, J pre-activation columns (2I if gated else I), H hidden size.
"""

import functools
import logging

import cutlass.cute as cute
import torch
from cutlass import Int64, const_expr
from torch import Tensor

from sonic_ep.kernels.experts.quack_compat import CuteTensor, EpiMod, OverriddenEpiMod
from sonic_ep.kernels.program.trace import Slot

_LOG = logging.getLogger("sonic_ep.kernels")
_STRIDE_UNIT, _STRIDE_LIMIT = 16, 1 << 40  # bytes: TMA strides are multiples of 16 and below 2^40


def interleaved_view(gate_eIH: Tensor, up_eIH: Tensor) -> Tensor | None:
    """Returns two tensors of one shape, strides and 16-bit dtype as one (e, J, H) operand, or None.

    Only kernels of a `split_gate_up_mod` can read it: the stride of its second dimension is the distance from gate to
    up. The rows of each expert are contiguous. It keeps neither tensor alive. None if TMA cannot load it: up is not
    behind gate in memory or 2^40 bytes or more behind it, or the address of either is not a multiple of 16 bytes.
    """
    e, I, H = gate_eIH.shape  # noqa: E741
    if gate_eIH.is_meta:  # compiled only, never read
        strides = gate_eIH.stride(0), _STRIDE_UNIT // gate_eIH.element_size(), 1
        return torch.empty_strided((e, 2 * I, H), strides, dtype=gate_eIH.dtype, device="meta")
    distance = _distance(gate_eIH, up_eIH)
    if distance is None:
        return None
    strides = gate_eIH.stride(0), distance // gate_eIH.element_size(), 1
    return torch.as_tensor(_Memory(gate_eIH, (e, 2 * I, H), strides), device=gate_eIH.device).view(gate_eIH.dtype)


def view_of_slots(gate_eIH: Slot, up_eIH: Slot) -> Slot:
    """Returns the same of a traced pass, whose inputs such a view can describe. up: a view of gate's buffer."""
    e, I, H = gate_eIH.shape  # noqa: E741
    strides = gate_eIH.stride(0), up_eIH.offset - gate_eIH.offset, 1
    return gate_eIH.as_strided((e, 2 * I, H), strides, gate_eIH.offset)


def readable(gate_eIH: Tensor, up_eIH: Tensor) -> tuple[Tensor, Tensor]:
    """Returns both, copied to one memory if TMA cannot load them as one operand where they are."""
    if isinstance(gate_eIH, Slot) or gate_eIH.is_meta or _distance(gate_eIH, up_eIH) is not None:
        return gate_eIH, up_eIH
    _say_that_weights_are_copied()
    gate_eIH, up_eIH = torch.stack((gate_eIH, up_eIH))
    return gate_eIH, up_eIH


@functools.cache
def _say_that_weights_are_copied() -> None:
    _LOG.info("gate and up weights are copied, some layers in some passes: up does not lie behind gate")


def _distance(gate_eIH: Tensor, up_eIH: Tensor) -> int | None:
    """Returns how many bytes up is behind gate, or None if TMA cannot load both as one operand."""
    start, distance = gate_eIH.data_ptr(), up_eIH.data_ptr() - gate_eIH.data_ptr()
    usable = 0 < distance < _STRIDE_LIMIT and distance % _STRIDE_UNIT == 0 and start % _STRIDE_UNIT == 0
    return distance if usable else None


class _Memory:
    """A tensor's memory as 16-bit values of another shape and strides, which torch.as_tensor takes without a copy."""

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
    """Returns a quack epilogue whose kernels read a B that `interleaved_view` made."""
    return OverriddenEpiMod(mod, _ReadsSplitGateUp, "gate and up apart")


class _ReadsSplitGateUp:
    """Overrides the layout of B in a quack kernel class: rows become (gate or up, row), with a stride each."""

    def rotate_batch_last(
        self, mA: CuteTensor, mB: CuteTensor, *others: object, **options: object
    ) -> tuple[object, ...]:
        mA, mB, *others = super().rotate_batch_last(mA, mB, *others, **options)  # type: ignore[misc]  # pyright: ignore
        rows = const_expr(1 - mB.leading_dim)
        width = cute.assume(Int64(mB.shape[mB.leading_dim]), divby=_STRIDE_UNIT * 8 // mB.element_type.width)
        shape, stride = list(mB.shape), list(mB.stride)
        shape[rows], stride[rows] = (2, cute.size(mB, mode=[rows]) // 2), (mB.stride[rows], width)
        return mA, cute.make_tensor(mB.iterator, cute.make_layout(tuple(shape), stride=tuple(stride))), *others
