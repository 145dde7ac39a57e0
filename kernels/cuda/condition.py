"""`void_unless` of kernels/condition.py as a Triton program.

Legend: see there.
"""

import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.cuda.sizes import next_power_of_2

_BLOCK = 1024


@triton.jit(do_not_specialize=["healthy"])
def _void_unless(
    counts_ptr,
    conditions_ptr,
    counts_stride,
    conditions_stride,
    healthy,
    S,
    E,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rank = tl.arange(0, RANKS)
    conditions = tl.load(conditions_ptr + rank * conditions_stride, mask=rank < S, other=healthy)
    if tl.max((conditions != healthy).to(tl.int32), axis=0) == 0:
        return
    index = tl.arange(0, BLOCK)
    while tl.min(index, axis=0) < S * E:
        tl.store(counts_ptr + index // E * counts_stride + index % E, 0, mask=index < S * E)
        index += BLOCK


def void_unless(counts_SE: Tensor, conditions_S: Tensor, healthy: int) -> None:
    """See kernels/condition.py."""
    S, E = counts_SE.shape
    assert counts_SE.stride(1) == 1
    _void_unless[(1,)](
        counts_SE,
        conditions_S,
        counts_SE.stride(0),
        conditions_S.stride(0),
        healthy,
        S,
        E,
        RANKS=next_power_of_2(S),
        BLOCK=_BLOCK,
        num_warps=4,
    )
