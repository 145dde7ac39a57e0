"""Rows in the memory of other ranks: dispatch, and combine with the sum over local experts.

Every rank's buffer has a region of `stride` rows for each source rank. In it, row t is the row of token t. So no kernel
numbers or counts the rows that are sent, and rows that the destination rank does not need are gaps. The way back has
the same numbering: the sum for token t of source s goes to the region of this rank in s's buffer, row t.

`push_rows` reads a token's row once and writes it to every rank that needs it. `combine_push` sums as gather_sum does,
in the same order, but writes each sum to its source rank. `combine_reduce` sums over destination ranks.

Example: 2 ranks, stride 2, and rank 0 has tokens 0 and 1. Token 0 needs both ranks, token 1 rank 1 alone.

    push_rows on rank 0       x[0] to row 0 of ranks 0 and 1, x[1] to row 1 of rank 1 (region 0 is rows 0 and 1)
    combine_push on rank 1    the sums of its rows 0 and 1 to rows 2 and 3 of rank 0 (region 1)
    combine_reduce on rank 0  y[0] = row 0 + row 2, y[1] = row 3

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

# tokens * columns * ranks of a tile. A kernel that saturates NVLink ends when its last tile does, so tiles are as small
# as they can be with the links saturated.
_PUSHED = 32768
_MAX_COLUMNS = 2048
_PUSH_WARPS = 16
_PUSH_REGISTERS = 128  # per thread. Without this limit ptxas spills one, to let programs share an SM; they never do
_BLOCKS = 2  # of columns, per work item of combine_push
PUSH_PROGRAMS = 64  # more do not help, and these leave SMs to concurrent kernels
SUM_PROGRAMS = 16 * 132  # of one warp, 16 on each SM of an H100; few enough that all are resident at once


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
    timeout: tl.int64,
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
    """Writes each row of x to every rank that needs it, into this rank's region there.

    A work item is a tile of TOKENS rows and COLUMNS columns. A program reads x (T, H) and is_token_in_rank (S * T,),
    and writes row rank * stride + t of every peer that needs token t. Returns at once in an empty step.
    Grid: (min(PUSH_PROGRAMS, SMs / 2),). Example: see the module.
    """
    if is_empty_step(pairs_ptr, S, RANKS):
        return
    timed_out = wait_peers_ready(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)
    blocks = tl.cdiv(H, COLUMNS)
    tiles = tl.where(timed_out == 0, tl.cdiv(T, TOKENS) * blocks, 0)
    tile = tl.program_id(0)
    while tile < tiles:
        token = tile // blocks * TOKENS + tl.arange(0, TOKENS)
        columns = tile % blocks * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        in_T = token < T
        inside = in_T[:, None] & (columns < H)
        x = tl.load(x_ptr + token.to(tl.int64)[:, None] * H + columns, mask=inside, other=0)
        offset = (rank * stride + token).to(tl.int64)
        for dst in tl.static_range(S):
            in_rank = tl.load(is_token_in_rank_ptr + dst * T + token, mask=in_T, other=0) > 0
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
    timeout: tl.int64,
    rank,
    tokens_stride,
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
    """Sums the pairs of each received row, and writes the sum to the row's source rank. Rows without pairs are skipped.

    A work item is BLOCKS * BLOCK columns of row r = s * stride + t, the row of token t of source s. A program reads
    items starts[r] to starts[r + 1], values[item] and weights[item], and sums in that order. It writes row rank *
    stride + t of rank s. Returns at once in an empty step. Grid: (SUM_PROGRAMS,). Example: see the module.
    """
    if is_empty_step(pairs_ptr, S, RANKS):
        return
    timed_out = wait_peers_ready(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)
    parts = tl.cdiv(H, BLOCK * BLOCKS)
    max_tokens = tl.load(tokens_ptr)
    for other in tl.static_range(1, S):
        max_tokens = tl.maximum(max_tokens, tl.load(tokens_ptr + other * tokens_stride))
    # Consecutive work items have different sources, so that all links are busy.
    pieces = tl.where(timed_out == 0, max_tokens.to(tl.int64) * (S * parts), 0)
    piece = tl.program_id(0).to(tl.int64)
    while piece < pieces:
        first_block = (piece % parts * BLOCKS).to(tl.int32)
        source = piece // parts % S
        index = piece // parts // S
        if index < tl.load(tokens_ptr + source * tokens_stride):
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
    """Sums BLOCK columns of the rows that came back for one token, in the order of destination ranks.

    A program reads row dst * stride + t for every rank dst that token t needs: of `own` for this rank, of `buffer` for
    the others. It writes out (T, H), NaN if a peer is lost. Grid: (T * cdiv(H, BLOCK),). Example: see the module.
    """
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
        total += float("nan")  # the buffer may hold rows of an earlier step
    tl.store(out_ptr + token.to(tl.int64) * H + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def _push_programs(device: torch.device) -> int:
    """Returns the number of programs of `push_rows`: at most half of the SMs.

    It may run concurrently with `push_lists`. If it occupied every SM, `push_lists` might find none, and the peers that
    wait for the lists would not finish.
    """
    return min(PUSH_PROGRAMS, _multiprocessors(device) // 2) if device.type == "cuda" else PUSH_PROGRAMS


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def push_rows(
    pad: SignalPad, x_TH: Tensor, is_token_in_rank: Tensor, pairs_SQ: Tensor, buffers_S: Tensor, stride: int
) -> None:
    """Writes each row of x to every rank that needs it, into this rank's region there.

    Shapes: x_TH (T, H) contiguous. is_token_in_rank (S * T,) of `is_token_in_rank` (send_index/reference.py). pairs_SQ
            as in push_lists (pairs.py). buffers_S (S,) int64 addresses of the ranks' buffers, (S * stride, H) in the
            dtype of x, with stride >= T of every rank.
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
    """Sums the pairs of received rows as `gather_sum` does, and writes each sum to the row's source rank.

    See kernels/combine/gather_sum/reference.py. Rows without items are not written.

    Shapes: values_PH (P, H). items (V,) and starts (S * stride + 1,) int32. weights_P (P,) or None. tokens_S (S,)
            int64 or int32, T of each rank, may be strided. pairs_SQ, buffers_S and stride as in `push_rows`.
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
        tokens_S.stride(0),
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
    """Returns (T, H): for each token the sum over destination ranks of what they sent back, T = num_tokens.

    Summed in fp32 at least, rounded once. NaN everywhere if a peer is lost.

    Shapes: buffer (S * stride, H), this rank's. own (S * stride, H), which holds this rank's own sums in its own
            region; it may be `buffer`. is_token_in_rank as in `push_rows`.
    """
    H = buffer.shape[1]
    out_TH = buffer.new_empty(num_tokens, H)
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
