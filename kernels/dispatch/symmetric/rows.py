"""Rows into the memory of other ranks and back: dispatch, and combine with its sum on the experts' rank.

A source has a region of `stride` rows in every owner's buffer, in which the row of token t is t, so nobody numbers the
rows that are sent, or asks how many they are; rows that an owner does not need are gaps. The way back has the same
numbering: the row of token t of source s goes to row t of this rank's region at s.

`push_rows` reads a token's row once and writes it to every rank that needs it. `combine_push` sums as gather_sum does,
in the same order, and writes the sum where it belongs instead of here. `combine_reduce` is the last sum, over owners.

Legend: S ranks of the EP group, T tokens on this rank, H hidden size.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.combine.gather_sum.triton import UNROLL, accumulator_of, block_of, row_sum
from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.dispatch.symmetric.signal_pad import SignalPad, Stage
from sonic_ep.kernels.dispatch.symmetric.signals import (
    is_empty_step,
    next_work_item,
    signal_done_and_wait,
    wait_peers_ready,
)

# Values of a tile of tokens and columns, times the ranks that may need them. A kernel that fills its links ends with
# its last tile, so tiles are as small as keeps the links full.
_PUSHED = 32768
_MAX_COLUMNS = 2048
_PUSH_WARPS = 16
_PUSH_REGISTERS = 128  # of a thread at most. Left alone, ptxas spills one, for programs that never share an SM
_BLOCKS = 2  # of columns, that a program sums before it takes another piece
PUSH_PROGRAMS = 64  # more do not help, and other kernels find room beside them
SUM_PROGRAMS = 16 * 132  # of one warp; fewer than there is room for at once, so that all of them run together


@fast_launch
@triton.jit(do_not_specialize=["timeout", "rank", "T", "stride"])
def _push_rows(
    x_ptr,
    is_token_in_rank_ptr,
    pairs_ptr,
    buffers_ptr,
    signals_ptr,
    state_ptr,
    host_status_ptr,
    timeout,
    rank,
    T,
    stride,
    H,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    RANKS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if is_empty_step(pairs_ptr, S, RANKS):
        return
    timed_out = wait_peers_ready(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)
    blocks = tl.cdiv(H, COLUMNS)
    tiles = tl.where(timed_out == 0, tl.cdiv(T, TOKENS) * blocks, 0)
    tile = tl.program_id(0)
    while tile < tiles:
        token = tile // blocks * TOKENS + tl.arange(0, TOKENS)
        columns = tile % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        there = token < T
        inside = there[:, None] & (columns < H)
        x = tl.load(x_ptr + token.to(tl.int64)[:, None] * H + columns, mask=inside, other=0)
        offset = (rank * stride + token).to(tl.int64)
        for dst in tl.static_range(S):
            in_rank = tl.load(is_token_in_rank_ptr + dst * T + token, mask=there, other=0) > 0
            buffer_ptr = tl.load(buffers_ptr + dst).to(tl.pointer_type(x_ptr.dtype.element_ty))
            buffer_ptr = tl.multiple_of(buffer_ptr, 16)
            tl.store(buffer_ptr + offset[:, None] * H + columns, x, mask=inside & in_rank[:, None])
        tile = next_work_item(state_ptr, STAGE).to(tl.int32)
    signal_done_and_wait(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)


@fast_launch
@triton.jit(do_not_specialize=["timeout", "rank", "stride"])
def _combine_push(
    values_ptr,
    items_ptr,
    starts_ptr,
    weights_ptr,
    tokens_ptr,
    pairs_ptr,
    buffers_ptr,
    signals_ptr,
    state_ptr,
    host_status_ptr,
    timeout,
    rank,
    stride,
    H,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    RANKS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNROLL: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    if is_empty_step(pairs_ptr, S, RANKS):
        return
    timed_out = wait_peers_ready(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)
    parts = tl.cdiv(H, BLOCK * BLOCKS)
    max_tokens = tl.load(tokens_ptr)
    for other in tl.static_range(1, S):
        max_tokens = tl.maximum(max_tokens, tl.load(tokens_ptr + other))
    # The sources take turns, so that all links are busy.
    pieces = tl.where(timed_out == 0, max_tokens.to(tl.int64) * (S * parts), 0)
    piece = tl.program_id(0).to(tl.int64)
    while piece < pieces:
        first_block = (piece % parts * BLOCKS).to(tl.int32)
        source = piece // parts % S
        index = piece // parts // S
        if index < tl.load(tokens_ptr + source):
            row = source * stride + index
            start, stop = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
            if start < stop:
                buffer_ptr = tl.load(buffers_ptr + source).to(tl.pointer_type(values_ptr.dtype.element_ty))
                buffer_ptr = tl.multiple_of(buffer_ptr, 16)
                offset = rank.to(tl.int64) * stride + index
                for block in range(BLOCKS):
                    columns = (first_block + block) * BLOCK + tl.arange(0, BLOCK)
                    inside = columns < H
                    total = row_sum(
                        values_ptr,
                        items_ptr,
                        weights_ptr,
                        start,
                        stop,
                        H,
                        columns,
                        inside,
                        HAS_WEIGHTS,
                        BLOCK,
                        UNROLL,
                        ACCUMULATOR,
                    )
                    tl.store(buffer_ptr + offset * H + columns, total.to(values_ptr.dtype.element_ty), mask=inside)
        piece = next_work_item(state_ptr, STAGE)
    signal_done_and_wait(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)


@fast_launch
@triton.jit(do_not_specialize=["rank", "T", "stride"])
def _combine_reduce(
    buffer_ptr,
    own_ptr,
    is_token_in_rank_ptr,
    timed_out_ptr,
    out_ptr,
    rank,
    T,
    stride,
    H,
    S: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    blocks = tl.cdiv(H, BLOCK)
    token = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    total = tl.zeros([BLOCK], dtype=ACCUMULATOR)
    for dst in tl.static_range(S):
        in_rank = tl.load(is_token_in_rank_ptr + dst * T + token) > 0
        offset = (dst * stride + token).to(tl.int64)
        sent_ptr = buffer_ptr
        if dst == rank:
            sent_ptr = own_ptr
        value = tl.load(
            sent_ptr + offset * H + columns, mask=inside & in_rank, other=0.0, eviction_policy="evict_first"
        )
        total += value.to(ACCUMULATOR)
    if tl.load(timed_out_ptr) != 0:
        total += float("nan")  # nothing that a rank did not send may pass for a sum
    tl.store(out_ptr + token.to(tl.int64) * H + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def _push_programs(device: torch.device) -> int:
    """On half of the SMs at most: where one ran on each, lists might not get one, for which the others wait."""
    return min(PUSH_PROGRAMS, _multiprocessors(device) // 2) if device.type == "cuda" else PUSH_PROGRAMS


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def push_rows(
    pad: SignalPad, x_TH: Tensor, is_token_in_rank: Tensor, pairs_SQ: Tensor, buffers_S: Tensor, stride: int
) -> None:
    """Write each row of x to every rank that needs it, into this rank's region there.

    Shapes:  x_TH (T, H) contiguous; needed of `is_token_in_rank`, kernels/dispatch/send_index/reference.py; pairs_SQ as
             in push_lists, pairs.py; buffers_S (S,) int64 addresses of the ranks' buffers (S * stride, H) in the dtype
             of x; stride >= T of any rank.
    """
    T, H = x_TH.shape
    columns = min(_MAX_COLUMNS, next_power_of_2(H))
    _push_rows[(_push_programs(x_TH.device),)](
        x_TH,
        is_token_in_rank,
        pairs_SQ,
        buffers_S,
        *pad.arguments,
        T,
        stride,
        H,
        STAGE=Stage.DISPATCH.value,
        S=pad.size,
        RANKS=next_power_of_2(pad.size),
        TOKENS=max(1, _PUSHED // (columns * next_power_of_2(pad.size))),
        COLUMNS=columns,
        num_warps=_PUSH_WARPS,
        maxnreg=_PUSH_REGISTERS,
    )


def combine_push(
    pad: SignalPad,
    values_PH: Tensor,
    items: Tensor,
    starts: Tensor,
    weights_P: Tensor | None,
    tokens_S: Tensor,
    pairs_SQ: Tensor,
    buffers_S: Tensor,
    stride: int,
) -> None:
    """gather_sum (kernels/experts/reference.py), each sum written to the rank its row came from.

    Rows without an item are left out. tokens_S: (S,) int32, T of each rank. starts: (S * stride + 1,). pairs_SQ,
    buffers_S, stride: as in push_rows.
    """
    H = values_PH.shape[1]
    _combine_push[(SUM_PROGRAMS,)](
        values_PH.contiguous(),
        items,
        starts,
        weights_P if weights_P is not None else values_PH,
        tokens_S,
        pairs_SQ,
        buffers_S,
        *pad.arguments,
        stride,
        H,
        STAGE=Stage.COMBINE.value,
        S=pad.size,
        RANKS=next_power_of_2(pad.size),
        HAS_WEIGHTS=weights_P is not None,
        BLOCK=block_of(H),
        BLOCKS=min(_BLOCKS, cdiv(H, block_of(H))),
        UNROLL=UNROLL,
        ACCUMULATOR=accumulator_of(values_PH, weights_P),
        num_warps=1,
    )


def combine_reduce(
    pad: SignalPad, buffer: Tensor, own: Tensor, is_token_in_rank: Tensor, num_tokens: int, stride: int
) -> Tensor:
    """(T, H) the sum over owners of what they sent back for each token, in fp32 at least, rounded once.

    buffer: (S * stride, H) of this rank. own: the same, where it has its own rows. needed: as in push_rows. NaN
    everywhere if a rank was waited for in vain.
    """
    H = buffer.shape[1]
    out_TH = torch.empty(num_tokens, H, dtype=buffer.dtype, device=buffer.device)
    block = block_of(H)
    if out_TH.numel():
        _combine_reduce[(num_tokens * cdiv(H, block),)](
            buffer,
            own,
            is_token_in_rank,
            pad.state[-1:],
            out_TH,
            pad.rank,
            num_tokens,
            stride,
            H,
            S=pad.size,
            BLOCK=block,
            ACCUMULATOR=accumulator_of(buffer),
            num_warps=1,
        )
    return out_TH
