"""The operations of kernels/route/status/reference.py in Triton, one launch each.

Legend: S ranks of the EP group, E experts, F fields of a table.
"""

import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.route.status.reference import BAD_LOGIT, HEADER, LAYER, ORDER, SEED, STATUS, TOKENS

_BLOCK = 1024
_TOKENS, _STATUS, _SEED, _ORDER = (tl.constexpr(place) for place in (TOKENS, STATUS, SEED, ORDER))
_HEADER, _BAD_LOGIT, _LAYER = tl.constexpr(HEADER), tl.constexpr(BAD_LOGIT), tl.constexpr(LAYER)


@fast_launch
@triton.jit(do_not_specialize=["num_tokens", "status", "order"])
def _pack_rank_status(
    counts_ptr,
    bad_logits_ptr,
    seed_ptr,
    packed_ptr,
    num_tokens,
    status: tl.int64,
    order: tl.int64,
    E,
    HAS_BAD_LOGITS: tl.constexpr,
    HAS_SEED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Packs one rank's status header and counts.

    A program copies BLOCK of the E counts behind the header. Program 0 also writes the four header fields. order: by
    value, because a program takes it as it takes sizes (dispatch/bounded_steps.py).
    Grid: (cdiv(E, BLOCK),). Example: see reference.py.
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(packed_ptr + _HEADER + index, tl.load(counts_ptr + index, mask=index < E, other=0), mask=index < E)
    if tl.program_id(0) == 0:
        status_word = tl.load(bad_logits_ptr) * _BAD_LOGIT + status if HAS_BAD_LOGITS else status
        tl.store(packed_ptr + _TOKENS, num_tokens)
        tl.store(packed_ptr + _STATUS, status_word)
        tl.store(packed_ptr + _SEED, tl.load(seed_ptr) if HAS_SEED else 0)
        tl.store(packed_ptr + _ORDER, order)


@fast_launch
@triton.jit(do_not_specialize=["healthy"])
def _zero_counts_on_error(
    counts_ptr,
    header_ptr,
    out_ptr,
    counts_stride,
    header_stride,
    healthy: tl.int64,
    S,
    E,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads S headers and copies the (S, E) counts to out, or writes zeros unless all status words equal `healthy`, the
    layer aside, and all layers with a number are the same, and all orders.

    A program copies BLOCK counts. RANKS: a power of two >= S. Rows of the counts may be strided, rows of out are not.
    Grid: (cdiv(S * E, BLOCK),). Example: see reference.py.
    """
    rank = tl.arange(0, RANKS)
    header_ptrs = header_ptr + tl.where(rank < S, rank, 0) * header_stride
    statuses = tl.load(header_ptrs + _STATUS)
    orders = tl.load(header_ptrs + _ORDER)
    layers = statuses // _LAYER
    is_other = (statuses % _LAYER != healthy) | ((layers != 0) & (layers != tl.max(layers, axis=0)))
    is_other |= orders != tl.max(orders, axis=0)
    is_healthy = tl.max(is_other.to(tl.int32), axis=0) == 0
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count_ptrs = counts_ptr + index // E * counts_stride + index % E
    tl.store(out_ptr + index, tl.load(count_ptrs, mask=(index < S * E) & is_healthy, other=0), mask=index < S * E)


def pack_rank_status(
    counts_E: Tensor,
    num_tokens: int,
    status: int,
    order: int,
    *,
    bad_logits: Tensor | None = None,
    seed: Tensor | None = None,
    width: int = 0,
) -> Tensor:
    """See kernels/route/status/reference.py."""
    E = counts_E.shape[0]
    packed = counts_E.new_empty(max(HEADER + E, width))
    _pack_rank_status[(cdiv(E, _BLOCK),)](
        counts_E.contiguous(),
        counts_E if bad_logits is None else bad_logits,
        counts_E if seed is None else seed,
        packed,
        num_tokens,
        status,
        order,
        E,
        HAS_BAD_LOGITS=bad_logits is not None,
        HAS_SEED=seed is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return packed


def zero_counts_on_error(counts_SE: Tensor, header_SF: Tensor, healthy: int) -> Tensor:
    """See kernels/route/status/reference.py."""
    S, E = counts_SE.shape
    assert counts_SE.stride(1) == header_SF.stride(1) == 1
    out_SE = counts_SE.new_empty(S, E)
    _zero_counts_on_error[(cdiv(S * E, _BLOCK),)](
        counts_SE,
        header_SF,
        out_SE,
        counts_SE.stride(0),
        header_SF.stride(0),
        healthy,
        S,
        E,
        RANKS=next_power_of_2(S),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out_SE
