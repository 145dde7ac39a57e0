"""`gather_rows` as one Triton kernel. It can be part of a program, which a function of torch would cut.

A program of one warp copies 512 columns of one row.

Legend: U rows this rank sends, H hidden size.
"""

import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.combine.gather_sum.triton import block_of
from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv


@fast_launch
@triton.jit
def _gather_rows(values_ptr, rows_ptr, out_ptr, H, BLOCK: tl.constexpr):
    """Copies BLOCK columns of one row of values (rows, H), which rows (U,) lists, to out (U, H).

    Grid: (U * cdiv(H, BLOCK),). Example: see reference.py.
    """
    blocks = tl.cdiv(H, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    source = tl.load(rows_ptr + row).to(tl.int64)
    tl.store(out_ptr + row * H + columns, tl.load(values_ptr + source * H + columns, mask=inside), mask=inside)


def gather_rows(values: Tensor, rows_U: Tensor) -> Tensor:
    """See kernels/dispatch/gather_rows/reference.py."""
    U, H = rows_U.shape[0], values.shape[1]
    out_UH = values.new_empty(U, H)
    if out_UH.numel():
        block = block_of(H)
        _gather_rows[(U * cdiv(H, block),)](values.contiguous(), rows_U, out_UH, H, BLOCK=block, num_warps=1)
    return out_UH
