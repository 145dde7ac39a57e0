"""What belongs to single pairs, in the memory of other ranks: index lists and weights out, one scalar per pair back.

Both directions compute their offsets from pairs_SQ, which all ranks know. A destination rank receives pairs by source
rank, and a source rank lists its pairs by destination rank.

Example: 2 ranks, pairs_SQ [[1, 2], [3, 1]].

    rank 0 lists    [to 0 | to 1, to 1]                    rank 0 receives [from 0 | from 1, from 1, from 1]
    rank 1 lists    [to 0, to 0, to 0 | to 1]              rank 1 receives [from 0, from 0 | from 1]

`push_lists` on rank 0 writes its entries 1 and 2 to entries 0 and 1 of rank 1. `push_scalars` on rank 1 writes the
scalars of its received pairs 0 and 1 to entries 1 and 2 of rank 0.

Legend: S ranks of the EP group, Q destination ranks, N pairs this rank sends, V pairs this rank receives.
"""

import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.combine.gather_sum.triton import accumulator_of
from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.dispatch.symmetric.signal_pad import SignalPad, Stage
from sonic_ep.kernels.dispatch.symmetric.signals import is_empty_step, signal_done_and_wait, wait_peers_ready

_BLOCK = 512
_SCALARS, _PARTS = 256, 4096  # at most, that a program adds at a time; as values_of_pairs does, for the same bits
PAIR_PROGRAMS = 64  # at least; every peer gets the same number


@triton.jit
def _pairs_before(pairs_ptr, source, dst, S: tl.constexpr, RANKS: tl.constexpr, OF_DST: tl.constexpr):
    """Returns the number of pairs before those from `source` to `dst`.

    OF_DST: in the list that dst receives. Otherwise in the list of source.
    """
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
    timeout: tl.int64,
    rank,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes token ids and weights of this rank's pairs for a peer into that peer's lists.

    A program handles every (num_programs / S)-th block of BLOCK pairs for peer program_id % S. It reads tokens (N,)
    int32, weights (N,) and pairs (S * S,). It writes dst_rows (int32) and dst_weights on the peer, after the entries of
    lower ranks. Returns at once in an empty step. Grid: (S * cdiv(PAIR_PROGRAMS, S),). Example: see the module.
    """
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
    parts_ptr,
    slot_ptr,
    pairs_ptr,
    dst_scalars_ptr,
    signals_ptr,
    state_ptr,
    host_status_ptr,
    timeout: tl.int64,
    rank,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    RANKS: tl.constexpr,
    Z: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Writes the scalars of the pairs received from a source into that source's buffer: the way back of `_push_lists`.

    A program handles every (num_programs / S)-th block of BLOCK pairs from source program_id % S. It reads slot (V,)
    and adds the Z numbers parts[slot]. It writes dst_scalars on the source, in the order of the source's list. It waits
    in an empty step too. COLUMNS: a power of two >= Z. Grid: (S * cdiv(PAIR_PROGRAMS, S),). Example: see the module.
    """
    timed_out = wait_peers_ready(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)
    source = tl.program_id(0) % S
    num_pairs = tl.where(timed_out == 0, tl.load(pairs_ptr + source * S + rank), 0)
    first = _pairs_before(pairs_ptr, source, rank, S, RANKS, True)
    dst_first = _pairs_before(pairs_ptr, source, rank, S, RANKS, False)
    dst_scalars = tl.load(dst_scalars_ptr + source).to(tl.pointer_type(parts_ptr.dtype.element_ty)) + dst_first
    column = tl.arange(0, COLUMNS)[None, :]
    offset = tl.program_id(0) // S * BLOCK
    while offset < num_pairs:
        index = offset + tl.arange(0, BLOCK)
        real = index < num_pairs
        slot = tl.load(slot_ptr + first + index, mask=real, other=0).to(tl.int64)
        parts = tl.load(parts_ptr + slot[:, None] * Z + column, mask=real[:, None] & (column < Z), other=0.0)
        values = tl.sum(parts.to(ACCUMULATOR), axis=1)
        tl.store(dst_scalars + index, values.to(parts_ptr.dtype.element_ty), mask=real)
        offset += tl.num_programs(0) // S * BLOCK
    signal_done_and_wait(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)


@fast_launch
@triton.jit(do_not_specialize=["rank", "N"])
def _collect_scalars(
    buffer_ptr, pairs_ptr, out_ptr, rank, N, S: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies the scalars of this rank's pairs out of its buffer, with zeros after the last pair.

    A program copies BLOCK scalars to out (N,). Grid: (cdiv(N, BLOCK),). Example: rank 0 of the module's example sends 3
    pairs. With N = 4, buffer [.1, .2, .3, ?] becomes [.1, .2, .3, 0].
    """
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
    """Writes the token id and weight of every pair to its destination rank, in this rank's part of the lists there.

    The token id is the number of the token's row in this rank's region of the row buffers, see rows.py.

    Shapes: token_ids_N (N,) int32. weights_N (N,). pairs_SQ (S * Q,) int32, pairs from each rank to each destination
            rank. rows_S and weights_S (S,) int64: on each rank, the 16-byte aligned addresses of its int32 rows and of
            its weights in the dtype of weights_N.
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
    """Returns the scalars that came back, (num_listed,) in the order in which this rank lists its pairs.

    Entries after the last pair that was sent are zero.
    """
    values_N = buffer.new_empty(num_listed)
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


def push_scalars(pad: SignalPad, parts_PZ: Tensor, slot_V: Tensor, pairs_SQ: Tensor, buffers_S: Tensor) -> None:
    """Writes the scalar of every received pair to its source rank, in the order in which that rank lists its pairs.

    Shapes: parts_PZ (P, Z), partial sums of each scalar, which are added. slot_V (V,) int32, the row of each received
            pair in parts_PZ. pairs_SQ as in `push_lists`. buffers_S (S,) int64 addresses of each rank's buffer, in the
            dtype of parts_PZ.
    """
    Z = parts_PZ.shape[1]
    columns = next_power_of_2(Z)
    _push_scalars[(pad.size * cdiv(PAIR_PROGRAMS, pad.size),)](
        parts_PZ.contiguous(),
        slot_V,
        pairs_SQ,
        buffers_S,
        *pad.arguments,
        STAGE=Stage.COMBINE_SCALARS.value,
        S=pad.size,
        RANKS=next_power_of_2(pad.size),
        Z=Z,
        COLUMNS=columns,
        BLOCK=max(1, min(_SCALARS, _PARTS // columns)),
        ACCUMULATOR=accumulator_of(parts_PZ),
        num_warps=4,
    )
