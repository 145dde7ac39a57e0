"""`gather_sum` as one Triton kernel: the rows of a CSR list, with or without weights, summed in fp32 and rounded once.

A program of one warp sums 512 columns of one output row over its items. It reads every value once, in 16-byte loads, of
which the loads of four or eight items are in flight. No intermediate row is written. Row offsets are 64-bit. float64
operands accumulate in float64. `overlap_previous` overlaps the previous kernel, see pdl.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.pdl import pdl_last_program_waits, pdl_wait_and_trigger, supports_pdl
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2

_MAX_BLOCK = 512
UNROLL = 4
# An overlapped kernel runs on few SMs, so each needs more loads in flight.
_UNROLL_OVERLAPPED = 8
# With PDL each program waits some 2 us for the previous kernel. From this many items per row on, the loads of other
# programs hide that. With 1.5 items per row, as on one of 8 ranks, the sums took 214 us with PDL and 126 us without.
_MIN_ITEMS_PER_ROW_FOR_PDL = 5


@triton.jit
def row_sum(
    values_ptr,
    items_ptr,
    weights_ptr,
    position,
    last,
    H,
    columns,
    inside,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Returns (BLOCK,): the sum of these columns over the items from `position` to `last`, in that order."""
    total = tl.zeros([BLOCK], dtype=ACCUMULATOR)
    while position < last:  # not a range: Triton's interpreter rejects loaded bounds
        for step in tl.static_range(UNROLL):
            real = position + step < last
            item = tl.load(items_ptr + position + step, mask=real, other=0).to(tl.int64)
            value = tl.load(values_ptr + item * H + columns, mask=inside & real, other=0.0).to(ACCUMULATOR)
            if HAS_WEIGHTS:
                value = value * tl.load(weights_ptr + item, mask=real, other=0.0).to(ACCUMULATOR)
            total += value
        position += UNROLL
    return total


@fast_launch
@triton.jit
def _gather_sum(
    values_ptr,
    items_ptr,
    starts_ptr,
    weights_ptr,
    out_ptr,
    H,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PDL_WAIT: tl.constexpr,
    PDL_OVERLAP: tl.constexpr,
):
    """Sums BLOCK columns of one output row.

    A program reads starts[row] and starts[row + 1], then values (P, H) and, if HAS_WEIGHTS, weights (P,) of the items
    between. It writes out (rows, H). PDL_WAIT: it waits for the previous kernel first. PDL_OVERLAP: the last program
    waits for it at its end. Grid: (rows * cdiv(H, BLOCK),). Example: see reference.py.
    """
    if PDL_WAIT:
        pdl_wait_and_trigger()
    blocks = tl.cdiv(H, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    first, last = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    total = row_sum(
        values_ptr,
        items_ptr,
        weights_ptr,
        first,
        last,
        H,
        columns,
        inside,
        HAS_WEIGHTS,
        BLOCK,
        UNROLL,
        ACCUMULATOR,
    )
    tl.store(out_ptr + row * H + columns, total.to(out_ptr.dtype.element_ty), mask=inside)
    if PDL_OVERLAP:
        pdl_last_program_waits()


def block_of(H: int) -> int:
    """Returns the number of columns that one program sums."""
    return min(_MAX_BLOCK, next_power_of_2(H))


def accumulator_of(values: Tensor, weights: Tensor | None = None) -> tl.dtype:
    """Returns float64 if values or weights are float64, else float32."""
    exact = values.dtype == torch.float64 or (weights is not None and weights.dtype == torch.float64)
    return tl.float64 if exact else tl.float32


def gather_sum(
    values_PH: Tensor,
    items: Tensor,
    starts: Tensor,
    weights_P: Tensor | None = None,
    *,
    into: Tensor | None = None,
    overlap_previous: bool = False,
) -> Tensor:
    """See kernels/combine/gather_sum/reference.py."""
    rows, H = starts.shape[0] - 1, values_PH.shape[1]
    out = values_PH.new_empty(rows, H) if into is None else into
    if out.numel() == 0:
        return out
    values_PH = values_PH.contiguous()
    block = block_of(H)
    pdl = supports_pdl(values_PH.device)
    overlap_previous = overlap_previous and pdl
    pdl_wait = pdl and not overlap_previous and items.shape[0] >= _MIN_ITEMS_PER_ROW_FOR_PDL * rows
    _gather_sum[(rows * cdiv(H, block),)](
        values_PH,
        items,
        starts,
        weights_P if weights_P is not None else values_PH,
        out,
        H,
        HAS_WEIGHTS=weights_P is not None,
        BLOCK=block,
        UNROLL=_UNROLL_OVERLAPPED if overlap_previous else UNROLL,
        ACCUMULATOR=accumulator_of(values_PH, weights_P),
        PDL_WAIT=pdl_wait,
        PDL_OVERLAP=overlap_previous,
        num_warps=1,
        launch_pdl=pdl_wait or overlap_previous,
    )
    return out
