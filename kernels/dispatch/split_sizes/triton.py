"""`pack_split_sizes` of kernels/dispatch/split_sizes/reference.py as one Triton kernel.

Legend: S ranks of the EP group, Q destination ranks, E experts, e local experts, F fields of a table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import next_power_of_2


@fast_launch
@triton.jit
def _pack_split_sizes(
    tokens_ptr,
    rows_ptr,
    pairs_ptr,
    statuses_ptr,
    sizes_ptr,
    tokens_stride,
    statuses_stride,
    S,
    e,
    F,
    SOURCES: tl.constexpr,
    EXPERTS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Packs the sizes of one rank.

    A program handles rank program_id. It copies the rank's tokens and status (F,), and sums the rows and pairs (S, e)
    that each source sends to the rank's experts. It writes sizes (S + 2 * S * S + S * F,). Grid: (S,). Example: see
    reference.py.
    """
    rank = tl.program_id(0)
    source, expert, field = tl.arange(0, SOURCES), tl.arange(0, EXPERTS), tl.arange(0, FIELDS)
    arriving = source[:, None] * (S * e) + rank * e + expert[None, :]
    inside = (source < S)[:, None] & (expert < e)[None, :]
    rows_S = tl.sum(tl.load(rows_ptr + arriving, mask=inside, other=0), axis=1)
    pairs_S = tl.sum(tl.load(pairs_ptr + arriving, mask=inside, other=0), axis=1)
    tl.store(sizes_ptr + rank, tl.load(tokens_ptr + rank * tokens_stride))
    sizes_ptr += S
    tl.store(sizes_ptr + source * S + rank, rows_S, mask=source < S)
    sizes_ptr += S * S
    tl.store(sizes_ptr + source * S + rank, pairs_S, mask=source < S)
    sizes_ptr += S * S
    status = tl.load(statuses_ptr + rank * statuses_stride + field, mask=field < F, other=0)
    tl.store(sizes_ptr + rank * F + field, status, mask=field < F)


def pack_split_sizes(tokens_S: Tensor, rows_SE: Tensor, pairs_SE: Tensor, status_SF: Tensor | None) -> Tensor:
    """See kernels/dispatch/split_sizes/reference.py."""
    S, E = rows_SE.shape
    statuses = tokens_S[:, None][:, :0] if status_SF is None else status_SF
    F = statuses.shape[1]
    assert statuses.stride(1) == 1
    sizes = rows_SE.new_empty(S * (1 + 2 * S + F), dtype=torch.int64)
    _pack_split_sizes[(S,)](
        tokens_S,
        rows_SE.contiguous(),
        pairs_SE.contiguous(),
        statuses,
        sizes,
        tokens_S.stride(0),
        statuses.stride(0),
        S,
        E // S,
        F,
        SOURCES=next_power_of_2(S),
        EXPERTS=next_power_of_2(E // S),
        FIELDS=next_power_of_2(max(F, 1)),
        num_warps=4,
    )
    return sizes
