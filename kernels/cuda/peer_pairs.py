"""Numbers of pairs into the memory of other ranks: index lists and weights out, one value a pair back.

Where a source's pairs stand in an owner's lists, and their values in the source's, follows from how many pairs each
rank sends to each owner, which all ranks know.

Legend: S source ranks, Q owner ranks, N pairs that this rank sends, V that it receives.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.cuda.launch import launched
from sonic_ep.kernels.cuda.peers import begin, finish, nobody_sends
from sonic_ep.kernels.cuda.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.peers import Meeting, Stage

_BLOCK = 512
PAIR_PROGRAMS = 64  # at least; as many for each rank


@triton.jit
def _before(pairs_ptr, source, owner, S: tl.constexpr, RANKS: tl.constexpr, OF_OWNER: tl.constexpr):
    """How many pairs stand before those of (source, owner): among the owner's, or among the source's."""
    other = tl.arange(0, RANKS)
    if OF_OWNER:
        return tl.sum(tl.load(pairs_ptr + other * S + owner, mask=other < source, other=0), axis=0)
    return tl.sum(tl.load(pairs_ptr + source * S + other, mask=other < owner, other=0), axis=0)


@launched
@triton.jit(do_not_specialize=["patience", "rank"])
def _push_lists(
    tokens_ptr,
    gates_ptr,
    pairs_ptr,
    rows_ptr,
    weights_ptr,
    flags_ptr,
    state_ptr,
    report_ptr,
    patience,
    rank,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if nobody_sends(pairs_ptr, S, RANKS):
        return
    given_up = begin(flags_ptr, state_ptr, report_ptr, patience, rank, STAGE, S)
    owner = tl.program_id(0) % S
    num_pairs = tl.where(given_up == 0, tl.load(pairs_ptr + rank * S + owner), 0)
    first = _before(pairs_ptr, rank, owner, S, RANKS, False)
    place = _before(pairs_ptr, rank, owner, S, RANKS, True)
    rows_there = tl.load(rows_ptr + owner).to(tl.pointer_type(tl.int32)) + place
    weights_there = tl.load(weights_ptr + owner).to(tl.pointer_type(gates_ptr.dtype.element_ty)) + place
    offset = tl.program_id(0) // S * BLOCK
    while offset < num_pairs:
        index = offset + tl.arange(0, BLOCK)
        real = index < num_pairs
        tl.store(rows_there + index, tl.load(tokens_ptr + first + index, mask=real), mask=real)
        tl.store(weights_there + index, tl.load(gates_ptr + first + index, mask=real), mask=real)
        offset += tl.num_programs(0) // S * BLOCK
    finish(flags_ptr, state_ptr, report_ptr, patience, rank, STAGE, S)


@launched
@triton.jit(do_not_specialize=["patience", "rank"])
def _push_values(
    values_ptr,
    slot_ptr,
    pairs_ptr,
    buffers_ptr,
    flags_ptr,
    state_ptr,
    report_ptr,
    patience,
    rank,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    given_up = begin(flags_ptr, state_ptr, report_ptr, patience, rank, STAGE, S)
    source = tl.program_id(0) % S
    num_pairs = tl.where(given_up == 0, tl.load(pairs_ptr + source * S + rank), 0)
    first = _before(pairs_ptr, source, rank, S, RANKS, True)
    place = _before(pairs_ptr, source, rank, S, RANKS, False)
    there = tl.load(buffers_ptr + source).to(tl.pointer_type(values_ptr.dtype.element_ty)) + place
    offset = tl.program_id(0) // S * BLOCK
    while offset < num_pairs:
        index = offset + tl.arange(0, BLOCK)
        real = index < num_pairs
        slot = tl.load(slot_ptr + first + index, mask=real, other=0)
        tl.store(there + index, tl.load(values_ptr + slot, mask=real), mask=real)
        offset += tl.num_programs(0) // S * BLOCK
    finish(flags_ptr, state_ptr, report_ptr, patience, rank, STAGE, S)


@launched
@triton.jit(do_not_specialize=["rank", "N"])
def _take_values(buffer_ptr, pairs_ptr, out_ptr, rank, N, S: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    sent = _before(pairs_ptr, rank, S, S, RANKS, False)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(buffer_ptr + index, mask=index < sent, other=0)
    tl.store(out_ptr + index, values, mask=index < N)


def push_lists(
    meeting: Meeting,
    token_ids_N: Tensor,
    gates_N: Tensor,
    pairs_SQ: Tensor,
    rows_S: Tensor,
    weights_S: Tensor,
) -> None:
    """Tell every owner the token and the weight of each of its pairs.

    pairs_SQ: (S * Q,) int32 pairs that each rank sends to each owner. rows_S, weights_S: (S,) int64 addresses, 16-byte
    aligned, of each rank's int32 rows and weights in the dtype of gates_N.
    """
    _push_lists[(meeting.size * cdiv(PAIR_PROGRAMS, meeting.size),)](
        token_ids_N,
        gates_N,
        pairs_SQ,
        rows_S,
        weights_S,
        *meeting.arguments,
        STAGE=Stage.LISTS.value,
        S=meeting.size,
        RANKS=next_power_of_2(meeting.size),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def take_values(meeting: Meeting, buffer: Tensor, pairs_SQ: Tensor, num_listed: int) -> Tensor:
    """(N,) what the owners sent, from this rank's buffer; zero behind its pairs."""
    values_N = torch.empty(num_listed, dtype=buffer.dtype, device=buffer.device)
    if num_listed:
        _take_values[(cdiv(num_listed, _BLOCK),)](
            buffer,
            pairs_SQ,
            values_N,
            meeting.rank,
            num_listed,
            S=meeting.size,
            RANKS=next_power_of_2(meeting.size),
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return values_N


def push_values(meeting: Meeting, values_P: Tensor, slot_V: Tensor, pairs_SQ: Tensor, buffers_S: Tensor) -> None:
    """Send the value of each received pair to its token's rank, into the order in which that rank lists its pairs.

    slot_V: (V,) int32, the place of each received pair in values_P. buffers_S: (S,) int64 addresses of each
    rank's values.
    """
    _push_values[(meeting.size * cdiv(PAIR_PROGRAMS, meeting.size),)](
        values_P,
        slot_V,
        pairs_SQ,
        buffers_S,
        *meeting.arguments,
        STAGE=Stage.RETURN_PAIRS.value,
        S=meeting.size,
        RANKS=next_power_of_2(meeting.size),
        BLOCK=_BLOCK,
        num_warps=4,
    )
