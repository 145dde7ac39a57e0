"""Numbers of pairs into the memory of other ranks: index lists and weights out, one value a pair back.

Where a source's pairs stand in an owner's lists, and their values in the source's, follows from how many pairs each
rank sends to each owner, which all ranks know.

Legend: S ranks of the EP group, Q destination ranks, N pairs this rank sends, V pairs this rank receives.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.dispatch.symmetric.signal_pad import SignalPad, Stage
from sonic_ep.kernels.dispatch.symmetric.signals import is_empty_step, signal_done_and_wait, wait_peers_ready

_BLOCK = 512
PAIR_PROGRAMS = 64  # at least; as many for each rank


@triton.jit
def _pairs_before(pairs_ptr, source, dst, S: tl.constexpr, RANKS: tl.constexpr, OF_DST: tl.constexpr):
    """How many pairs stand before those of (source, owner): among the owner's, or among the source's."""
    other = tl.arange(0, RANKS)
    if OF_DST:
        return tl.sum(tl.load(pairs_ptr + other * S + dst, mask=other < source, other=0), axis=0)
    return tl.sum(tl.load(pairs_ptr + source * S + other, mask=other < dst, other=0), axis=0)


@fast_launch
@triton.jit(do_not_specialize=["timeout", "rank"])
def _push_lists(
    tokens_ptr,
    weights_ptr,
    pairs_ptr,
    dst_rows_ptr,
    dst_weights_ptr,
    signals_ptr,
    state_ptr,
    host_status_ptr,
    timeout,
    rank,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if is_empty_step(pairs_ptr, S, RANKS):
        return
    timed_out = wait_peers_ready(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)
    dst = tl.program_id(0) % S
    num_pairs = tl.where(timed_out == 0, tl.load(pairs_ptr + rank * S + dst), 0)
    first = _pairs_before(pairs_ptr, rank, dst, S, RANKS, False)
    dst_first = _pairs_before(pairs_ptr, rank, dst, S, RANKS, True)
    dst_rows = tl.load(dst_rows_ptr + dst).to(tl.pointer_type(tl.int32)) + dst_first
    dst_weights = tl.load(dst_weights_ptr + dst).to(tl.pointer_type(weights_ptr.dtype.element_ty)) + dst_first
    offset = tl.program_id(0) // S * BLOCK
    while offset < num_pairs:
        index = offset + tl.arange(0, BLOCK)
        real = index < num_pairs
        tl.store(dst_rows + index, tl.load(tokens_ptr + first + index, mask=real), mask=real)
        tl.store(dst_weights + index, tl.load(weights_ptr + first + index, mask=real), mask=real)
        offset += tl.num_programs(0) // S * BLOCK
    signal_done_and_wait(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)


@fast_launch
@triton.jit(do_not_specialize=["timeout", "rank"])
def _push_scalars(
    values_ptr,
    slot_ptr,
    pairs_ptr,
    dst_scalars_ptr,
    signals_ptr,
    state_ptr,
    host_status_ptr,
    timeout,
    rank,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    timed_out = wait_peers_ready(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)
    source = tl.program_id(0) % S
    num_pairs = tl.where(timed_out == 0, tl.load(pairs_ptr + source * S + rank), 0)
    first = _pairs_before(pairs_ptr, source, rank, S, RANKS, True)
    dst_first = _pairs_before(pairs_ptr, source, rank, S, RANKS, False)
    dst_scalars = tl.load(dst_scalars_ptr + source).to(tl.pointer_type(values_ptr.dtype.element_ty)) + dst_first
    offset = tl.program_id(0) // S * BLOCK
    while offset < num_pairs:
        index = offset + tl.arange(0, BLOCK)
        real = index < num_pairs
        slot = tl.load(slot_ptr + first + index, mask=real, other=0)
        tl.store(dst_scalars + index, tl.load(values_ptr + slot, mask=real), mask=real)
        offset += tl.num_programs(0) // S * BLOCK
    signal_done_and_wait(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)


@fast_launch
@triton.jit(do_not_specialize=["rank", "N"])
def _collect_scalars(
    buffer_ptr, pairs_ptr, out_ptr, rank, N, S: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    sent = _pairs_before(pairs_ptr, rank, S, S, RANKS, False)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(buffer_ptr + index, mask=index < sent, other=0)
    tl.store(out_ptr + index, values, mask=index < N)


def push_lists(
    pad: SignalPad,
    token_ids_N: Tensor,
    weights_N: Tensor,
    pairs_SQ: Tensor,
    rows_S: Tensor,
    weights_S: Tensor,
) -> None:
    """Tell every owner the token and the weight of each of its pairs.

    pairs_SQ: (S * Q,) int32 pairs that each rank sends to each owner. rows_S, weights_S: (S,) int64 addresses, 16-byte
    aligned, of each rank's int32 rows and weights in the dtype of weights_N.
    """
    _push_lists[(pad.size * cdiv(PAIR_PROGRAMS, pad.size),)](
        token_ids_N,
        weights_N,
        pairs_SQ,
        rows_S,
        weights_S,
        *pad.arguments,
        STAGE=Stage.LISTS.value,
        S=pad.size,
        RANKS=next_power_of_2(pad.size),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def collect_scalars(pad: SignalPad, buffer: Tensor, pairs_SQ: Tensor, num_listed: int) -> Tensor:
    """(N,) what the owners sent, from this rank's buffer; zero behind its pairs."""
    values_N = torch.empty(num_listed, dtype=buffer.dtype, device=buffer.device)
    if num_listed:
        _collect_scalars[(cdiv(num_listed, _BLOCK),)](
            buffer,
            pairs_SQ,
            values_N,
            pad.rank,
            num_listed,
            S=pad.size,
            RANKS=next_power_of_2(pad.size),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return values_N


def push_scalars(pad: SignalPad, values_P: Tensor, slot_V: Tensor, pairs_SQ: Tensor, buffers_S: Tensor) -> None:
    """Send the value of each received pair to its token's rank, into the order in which that rank lists its pairs.

    slot_V: (V,) int32, the place of each received pair in values_P. buffers_S: (S,) int64 addresses of each
    rank's values.
    """
    _push_scalars[(pad.size * cdiv(PAIR_PROGRAMS, pad.size),)](
        values_P,
        slot_V,
        pairs_SQ,
        buffers_S,
        *pad.arguments,
        STAGE=Stage.COMBINE_SCALARS.value,
        S=pad.size,
        RANKS=next_power_of_2(pad.size),
        BLOCK=_BLOCK,
        num_warps=4,
    )
