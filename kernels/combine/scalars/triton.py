"""`values_of_pairs` as one Triton kernel: adds the partial sums of each pair's scalar and writes them in arrival order.

Legend: V pairs this rank receives, P rows of the pair buffer, Z partial sums of one value.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from sonic_ep.kernels.combine.gather_sum.triton import accumulator_of
from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.pdl import pdl_last_program_waits, supports_pdl
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2

_BLOCK = 256
_PARTS = 4096  # partial sums per program


@fast_launch
@triton.jit(do_not_specialize=["capacity"])
def _values_of_pairs(
    parts_ptr,
    slot_ptr,
    num_pairs_ptr,
    out_ptr,
    capacity,
    Z: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PDL_OVERLAP: tl.constexpr,
):
    """Adds the Z partial sums of each of BLOCK pairs.

    A program reads num_pairs (1,), slot (V,) and parts (P, Z), and writes out (capacity,), zero from num_pairs on.
    PDL_OVERLAP: see pdl.py. Grid: (cdiv(capacity, BLOCK),). Example: see reference.py.
    """
    if PDL_OVERLAP:
        gdc_launch_dependents()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = index < tl.load(num_pairs_ptr)
    slot = tl.load(slot_ptr + index, mask=real, other=0).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    parts = tl.load(parts_ptr + slot[:, None] * Z + column, mask=real[:, None] & (column < Z), other=0.0)
    values = tl.sum(parts.to(ACCUMULATOR), axis=1)
    tl.store(out_ptr + index, values.to(out_ptr.dtype.element_ty), mask=index < capacity)
    if PDL_OVERLAP:
        pdl_last_program_waits()


def values_of_pairs(
    parts_PZ: Tensor,
    slot_V: Tensor,
    num_pairs: Tensor,
    capacity: int,
    *,
    into: Tensor | None = None,
    overlap_previous: bool = False,
) -> Tensor:
    """See kernels/combine/scalars/reference.py."""
    values = parts_PZ.new_empty(capacity) if into is None else into
    Z = parts_PZ.shape[1]
    columns = next_power_of_2(Z)
    block = max(1, min(_BLOCK, _PARTS // columns))
    overlap_previous = overlap_previous and supports_pdl(parts_PZ.device)
    if capacity:
        _values_of_pairs[(cdiv(capacity, block),)](
            parts_PZ.contiguous(),
            slot_V.contiguous(),
            num_pairs,
            values,
            capacity,
            Z=Z,
            COLUMNS=columns,
            BLOCK=block,
            ACCUMULATOR=accumulator_of(parts_PZ),
            PDL_OVERLAP=overlap_previous,
            num_warps=4,
            launch_pdl=overlap_previous,
        )
    return values
