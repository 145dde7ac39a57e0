"""The destination rank's index lists in Triton: three kernels for `pair_lists`, one for `row_starts`.

`_fill` writes what depends only on a pair's index in its chunk. It also records the experts of each received row as a
bit set. `_starts` counts the bits of each row and adds the counts up. A pair's rank among the pairs of its row is the
number of bits below its own expert's, so `_group` needs no sort. Atomics only act on integers and their results do not
depend on the order, so everything is deterministic.

The programs of a chunk divide blocks of its rows among themselves by a loop. So the host need not know how long a chunk
is, nor, if the lists have spare capacity, how many rows there are.

Legend: S ranks of the EP group, e local experts, C chunks (source rank, local expert), F fields of a table, V pairs
this rank receives, P rows of the pair buffer, R rows this rank receives, W 32-bit words of a bit set.
"""

import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.bitset import bit_count
from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.pdl import pdl_wait_and_trigger, supports_pdl
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.dispatch.recv_index.reference import Chunks, PairBuffer
from sonic_ep.routing import INDEX_DTYPE

_BLOCK = 256
_MIN_PROGRAMS = 64  # that `_starts` is compiled for: few variants, as the number of rows changes
_TILE = 2048  # chunks per step of `_row_starts`


@triton.jit
def _slots(index, table_ptr, chunk, C):
    """Returns the pair-buffer rows of the rows `index` of a chunk."""
    head_rows = tl.load(table_ptr + 2 * C + chunk)
    head_start = tl.load(table_ptr + 3 * C + chunk)
    tail_start = tl.load(table_ptr + 4 * C + chunk)
    return index + tl.where(index < head_rows, head_start, tail_start - head_rows)


@triton.jit
def _zero_from(values_ptr, end, capacity, BLOCK: tl.constexpr):
    """Zeros values from `end` to `capacity`, with all programs of a two-dimensional grid."""
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    first = end + program * BLOCK
    while first < capacity:
        index = first + tl.arange(0, BLOCK)
        tl.store(values_ptr + index, tl.zeros([BLOCK], tl.int32).to(values_ptr.dtype.element_ty), mask=index < capacity)
        first += tl.num_programs(0) * tl.num_programs(1) * BLOCK


@fast_launch
@triton.jit(do_not_specialize=["capacity", "pair_capacity"])
def _fill(
    table_ptr,
    C,
    experts,
    row_in_source_ptr,
    weights_ptr,
    row_starts_ptr,
    row_of_pair_ptr,
    weights_out_ptr,
    slot_ptr,
    bits_ptr,
    capacity,
    pair_capacity,
    HAS_STARTS: tl.constexpr,
    ZEROED: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL_WAIT: tl.constexpr,
):
    """Writes row_of_pair (P,), weights_out (P,) and slot (V,), and sets the bit of a pair's expert in bits (R, WORDS).

    A program handles every num_programs(1)-th block of BLOCK rows of chunk program_id(0). It reads table (6, C),
    row_in_source (V,), weights (V,) and, if HAS_STARTS, row_starts (S + 1,). ZEROED: all programs zero the spare
    capacity of the three lists. bits start as zeros. Grid: (C, programs per chunk). Example: see reference.py.
    """
    if PDL_WAIT:
        pdl_wait_and_trigger()
    if ZEROED:
        last = C - 1
        end = _slots(tl.load(table_ptr + last), table_ptr, last, C)
        _zero_from(row_of_pair_ptr, end, capacity, BLOCK)
        _zero_from(weights_out_ptr, end, capacity, BLOCK)
        end_of_pairs = tl.load(table_ptr + 5 * C + last) + tl.load(table_ptr + C + last)
        _zero_from(slot_ptr, end_of_pairs, pair_capacity, BLOCK)
    chunk = tl.program_id(0)
    num_rows, num_pairs = tl.load(table_ptr + chunk), tl.load(table_ptr + C + chunk)
    source, expert = chunk // experts, chunk % experts
    first_row = 0
    if HAS_STARTS:
        first_row = tl.load(row_starts_ptr + source)
    first = tl.program_id(1) * BLOCK
    while first < num_rows:
        index = first + tl.arange(0, BLOCK)
        inside, real = index < num_rows, index < num_pairs
        slot = _slots(index, table_ptr, chunk, C)
        # A padding row repeats its chunk's last real pair, so it reads a row that its own source has sent.
        pair = tl.load(table_ptr + 5 * C + chunk) + tl.minimum(index, num_pairs - 1)
        row = first_row + tl.load(row_in_source_ptr + pair, mask=inside, other=0)
        if HAS_STARTS:  # a lost peer has sent nothing, and the list holds older values
            row = tl.minimum(row, tl.load(row_starts_ptr + source + 1) - 1)
        tl.store(row_of_pair_ptr + slot, row, mask=inside)
        tl.store(weights_out_ptr + slot, tl.load(weights_ptr + pair, mask=real, other=0.0), mask=inside)
        tl.store(slot_ptr + pair, slot, mask=real)
        word = row.to(tl.int64) * WORDS + expert // 32
        tl.atomic_or(bits_ptr + word, 1 << (expert % 32), mask=real, sem="relaxed")
        first += tl.num_programs(1) * BLOCK


@fast_launch
@triton.jit(do_not_specialize=["num_rows"])
def _starts(
    bits_ptr,
    pair_starts_ptr,
    num_rows,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL_WAIT: tl.constexpr,
):
    """Writes pair_starts (R + 1,), the exclusive prefix sums of the number of bits per row.

    A program handles BLOCK rows of bits (R, WORDS). Behind the bits are the sums, one per program, which start as
    zeros. A program publishes its sum before it waits for the sums of lower-numbered programs, so no program waits for
    a later one.
    Grid: (cdiv(R, BLOCK),), at least one. Example: see reference.py.
    """
    if PDL_WAIT:
        pdl_wait_and_trigger()
    program = tl.program_id(0)
    sums_ptr = bits_ptr + num_rows.to(tl.int64) * WORDS
    row = program * BLOCK + tl.arange(0, BLOCK)
    word = row.to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    bits = tl.load(bits_ptr + word, mask=(row < num_rows)[:, None], other=0).to(tl.uint32, bitcast=True)
    counts = tl.sum(bit_count(bits), axis=1)
    tl.atomic_xchg(sums_ptr + program, tl.sum(counts, axis=0) + 1, sem="relaxed", scope="gpu")  # 0: not published
    other = tl.arange(0, PROGRAMS)
    sums = tl.zeros([PROGRAMS], tl.int32)
    missing = 1
    while missing > 0:
        sums = tl.load(sums_ptr + other, mask=other < program, other=1, volatile=True)
        missing = tl.sum((sums == 0).to(tl.int32), axis=0)
    ends = tl.sum(sums - 1, axis=0) + tl.cumsum(counts, axis=0)
    tl.store(pair_starts_ptr + 1 + row, ends, mask=row < num_rows)
    if program == 0:
        tl.store(pair_starts_ptr, 0)


@fast_launch
@triton.jit
def _group(
    table_ptr,
    C,
    experts,
    row_of_pair_ptr,
    bits_ptr,
    pair_starts_ptr,
    pairs_by_row_ptr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL_WAIT: tl.constexpr,
):
    """Writes pairs_by_row (V,): a pair comes after the pairs of its row with smaller experts.

    A program handles every num_programs(1)-th block of BLOCK pairs of chunk program_id(0). It reads table (6, C),
    row_of_pair (P,), bits (R, WORDS) and pair_starts (R + 1,). Grid: (C, programs per chunk). Example: see
    reference.py.
    """
    if PDL_WAIT:
        pdl_wait_and_trigger()
    chunk = tl.program_id(0)
    num_pairs = tl.load(table_ptr + C + chunk)
    words = tl.arange(0, WORDS)[None, :]
    word, bit = chunk % experts // 32, chunk % experts % 32
    first = tl.program_id(1) * BLOCK
    while first < num_pairs:
        index = first + tl.arange(0, BLOCK)
        real = index < num_pairs
        slot = _slots(index, table_ptr, chunk, C)
        row = tl.load(row_of_pair_ptr + slot, mask=real, other=0)
        bits = tl.load(bits_ptr + row.to(tl.int64)[:, None] * WORDS + words, mask=real[:, None], other=0)
        bits = bits.to(tl.uint32, bitcast=True)
        # Two shifts, because a shift by 32 bits is undefined.
        below = tl.where(words == word, (bits << (31 - bit)) << 1, tl.where(words < word, bits, 0))
        rank = tl.sum(bit_count(below), axis=1)
        position = tl.load(pair_starts_ptr + row, mask=real, other=0) + rank
        tl.store(pairs_by_row_ptr + position, slot, mask=real)
        first += tl.num_programs(1) * BLOCK


def pair_lists(
    chunks: Chunks, row_in_source_V: Tensor, weights_V: Tensor, row_starts_S: Tensor | None, num_rows: int
) -> PairBuffer:
    """See kernels/dispatch/recv_index/reference.py."""
    table_FC, e = chunks.table_FC, chunks.num_experts
    C = table_FC.shape[1]
    W = next_power_of_2(cdiv(e, 32))

    row_of_pair_P = weights_V.new_empty(chunks.num_rows, dtype=INDEX_DTYPE)
    slot_V = row_of_pair_P.new_empty(chunks.num_pairs)
    pairs_by_row_V = slot_V.new_empty(chunks.num_pairs)
    pair_starts_R = slot_V.new_empty(num_rows + 1)
    weights_P = weights_V.new_empty(chunks.num_rows)
    blocks = cdiv(num_rows, _BLOCK) or 1
    bits_RW = slot_V.new_zeros(num_rows * W + blocks)  # and sums of `_starts`
    pdl_wait = supports_pdl(weights_V.device)
    common: dict[str, int] = {"WORDS": W, "BLOCK": _BLOCK, "PDL_WAIT": pdl_wait, "num_warps": 4, "launch_pdl": pdl_wait}
    # Twice as many programs per chunk as chunks of equal size would need.
    grid = (C, cdiv(2 * chunks.num_rows, C * _BLOCK) or 1)
    _fill[grid](
        table_FC,
        C,
        e,
        row_in_source_V.contiguous(),
        weights_V.contiguous(),
        row_starts_S if row_starts_S is not None else table_FC,
        row_of_pair_P,
        weights_P,
        slot_V,
        bits_RW,
        chunks.num_rows,
        chunks.num_pairs,
        HAS_STARTS=row_starts_S is not None,
        ZEROED=chunks.zeroed,
        **common,
    )
    programs = max(_MIN_PROGRAMS, next_power_of_2(blocks))
    _starts[(blocks,)](bits_RW, pair_starts_R, num_rows, PROGRAMS=programs, **common)
    _group[grid](table_FC, C, e, row_of_pair_P, bits_RW, pair_starts_R, pairs_by_row_V, **common)
    return PairBuffer(row_of_pair_P, weights_P, slot_V, pairs_by_row_V, pair_starts_R)


@fast_launch
@triton.jit
def _row_starts(
    table_ptr,
    row_in_source_ptr,
    row_starts_ptr,
    S,
    C,
    EXPERTS: tl.constexpr,
    SOURCES_BLOCK: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
):
    """Writes row_starts (S + 1,): the prefix sums of the rows of each source.

    One program reads table (6, C) and the row of each chunk's last pair in row_in_source (V,), which is the largest of
    the chunk. Grid: (1,). Example: see reference.py.
    """
    source = tl.arange(0, SOURCES_BLOCK)
    rows = tl.zeros([SOURCES_BLOCK], dtype=tl.int32)
    for first in range(0, EXPERTS, EXPERTS_BLOCK):
        expert = first + tl.arange(0, EXPERTS_BLOCK)[None, :]
        chunk = source[:, None] * EXPERTS + expert
        inside = (source[:, None] < S) & (expert < EXPERTS)
        num_pairs = tl.load(table_ptr + C + chunk, mask=inside, other=0)
        end = tl.load(table_ptr + 5 * C + chunk, mask=inside, other=0) + num_pairs
        last_row = tl.load(row_in_source_ptr + end - 1, mask=num_pairs > 0, other=-1)
        rows = tl.maximum(rows, tl.max(last_row, axis=1) + 1)
    tl.store(row_starts_ptr, 0)
    tl.store(row_starts_ptr + 1 + source, tl.cumsum(rows, axis=0), mask=source < S)


def row_starts(chunks: Chunks, row_in_source_V: Tensor) -> Tensor:
    """See kernels/dispatch/recv_index/reference.py."""
    S, e = chunks.num_sources, chunks.num_experts
    row_starts_S = row_in_source_V.new_empty(S + 1)
    sources = next_power_of_2(S)
    _row_starts[(1,)](
        chunks.table_FC,
        row_in_source_V.contiguous(),
        row_starts_S,
        S,
        S * e,
        EXPERTS=e,
        SOURCES_BLOCK=sources,
        EXPERTS_BLOCK=min(next_power_of_2(e), max(1, _TILE // sources)),
        num_warps=4,
    )
    return row_starts_S
