"""Selects the tokens of each expert, in two Triton kernels: no sort of T x E, no host sync, deterministic order.

The first kernel transposes the (T, E) tables. For each expert it writes a bit set of the tokens that have it in their
top-K (32 tokens per word), and, if tokens are to be selected by score, the scores as keys. In the second kernel each
program handles one expert. It selects the best keys (bitset_topk.py), of equal keys the smaller tokens. Then it finds
the token of each slot of the expert's list by a binary search in prefix sums of the selected bits.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends, W 32-bit words of a bit set.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.bitset import bit_count, first_bits, load_words, position_of_bit, store_columns
from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.route.select.bitset_topk import keys_of, select

TILE_WORDS = 4  # words of tokens per program of the first kernel, for 32 experts
# Step sizes of the second kernel: words of tokens per step where it only counts bits, words per step where it reads
# keys, and slots of an expert's list per step.
_COUNT_WORDS = 512
_STEP_WORDS = 128
_SLOTS = 1024
# Warps per program of the second kernel. Fewer for many experts, so that several programs can share an SM.
_WARPS, _NARROW_WARPS, _NARROW_FROM_EXPERTS = 8, 4, 256


@fast_launch
@triton.jit(do_not_specialize=["T", "words"])
def _transpose(
    ids_ptr,
    scores_ptr,
    allowed_ptr,
    chosen_ptr,
    eligible_ptr,
    keys_ptr,
    T,
    E,
    words,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Transposes tables of tokens into rows of experts.

    A program handles WORDS * 32 tokens and 32 experts. It reads the tokens' top-K ids, and writes the bits of tokens
    that have each expert in their top-K. HAS_SCORES: it also reads scores and writes int32 keys (E, 32 * words).
    HAS_ALLOWED: it also writes the bits of tokens that are allowed but not in the top-K (`eligible`).
    Grid: (words / WORDS, cdiv(E, 32)). Example: see reference.py.
    """
    tokens = tl.program_id(0) * (WORDS * 32) + tl.arange(0, WORDS * 32)
    first_expert = tl.program_id(1) * 32
    slots = tl.arange(0, BLOCK_K)
    rows = tokens.to(tl.int64)[:, None]
    real = (tokens < T)[:, None]
    ids = tl.load(ids_ptr + rows * K + slots[None, :], mask=real & (slots < K)[None, :], other=-1)
    ids = ids.to(tl.int32) - first_expert
    # Bit j is set if the token has expert first_expert + j in its top-K. The K experts are distinct, so the sum of bits
    # is their union.
    chosen_word = tl.sum(tl.where((ids >= 0) & (ids < 32), 1 << (ids & 31), 0), axis=1)
    chosen = (chosen_word[:, None] >> tl.arange(0, 32)[None, :]) & 1
    store_columns(chosen_ptr, chosen, tokens, first_expert, E, words, WORDS)
    if HAS_SCORES:
        experts = first_expert + tl.arange(0, 32)
        inside = real & (experts < E)[None, :]
        keys = keys_of(tl.load(scores_ptr + rows * E + experts[None, :], mask=inside, other=0.0))
        offsets = experts.to(tl.int64)[None, :] * (words * 32) + tokens[:, None]
        tl.store(keys_ptr + offsets, keys, mask=(experts < E)[None, :])
        if HAS_ALLOWED:
            allowed = tl.load(allowed_ptr + rows * E + experts[None, :], mask=inside, other=0).to(tl.int32)
            store_columns(eligible_ptr, allowed & (1 - chosen), tokens, first_expert, E, words, WORDS)


@triton.jit
def _index(selected_ptr, tied_ptr, ends_ptr, quota, words, HAS_TIES: tl.constexpr, WORDS: tl.constexpr):
    """Adds the first `quota` tied tokens to the selected bits, and writes inclusive prefix sums of them by word."""
    pairs = 0
    ties = 0
    for first in range(0, words, WORDS):
        columns = first + tl.arange(0, WORDS)
        inside = columns < words
        selected = load_words(selected_ptr, columns, words)
        if HAS_TIES:
            tied = load_words(tied_ptr, columns, words)
            count = bit_count(tied)
            earlier = ties + tl.cumsum(count, axis=0) - count
            selected |= first_bits(tied, tl.minimum(tl.maximum(quota - earlier, 0), count))
            tl.store(selected_ptr + columns, selected.to(tl.int32, bitcast=True), mask=inside)
            ties += tl.sum(count, axis=0)
        count = bit_count(selected)
        tl.store(ends_ptr + columns, pairs + tl.cumsum(count, axis=0), mask=inside)
        pairs += tl.sum(count, axis=0)


@triton.jit
def _word_of_slot(ends_ptr, slots, words, top):
    """Returns the word that holds the token of each slot, by a binary search in the prefix sums.

    top: the largest power of two <= words.
    """
    word = tl.zeros_like(slots)
    step = top
    while step > 0:
        probe = word + step
        end = tl.load(ends_ptr + probe - 1, mask=probe <= words, other=2**31 - 1)
        word = tl.where(end <= slots, probe, word)
        step //= 2
    return word


@fast_launch
@triton.jit(do_not_specialize=["T", "words", "top", "capacity"])
def _list(
    chosen_ptr,
    eligible_ptr,
    keys_ptr,
    scratch_ptr,
    pairs_ptr,
    token_ids_ptr,
    expert_ids_ptr,
    is_chosen_ptr,
    T,
    words,
    top,
    capacity,
    HAS_SCORES: tl.constexpr,
    HAS_ALLOWED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    COUNT_WORDS: tl.constexpr,
    STEP_WORDS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Lists the pairs of one expert by token: its best tokens with HAS_SCORES, else the tokens that have it in top-K.

    A program reads the number of pairs of all experts, and the bits and keys of its expert. It writes token ids, expert
    ids and chosen flags to its part of the lists. With HAS_SCORES the lists may have spare capacity after the last
    expert; all programs fill it with token -1, expert 0 and not chosen. scratch: 4 * words int32 per expert.
    Grid: (E,). Example: see reference.py.
    """
    expert, experts = tl.program_id(0), tl.num_programs(0)
    others = tl.arange(0, BLOCK_E)
    pairs_E = tl.load(pairs_ptr + others, mask=others < experts, other=0).to(tl.int64)
    start = tl.sum(tl.where(others < expert, pairs_E, 0), axis=0)
    pairs = tl.load(pairs_ptr + expert).to(tl.int32)
    row = expert.to(tl.int64) * words
    chosen_ptr += row
    ends_ptr = scratch_ptr + row * 4
    tied_ptr = ends_ptr + 2 * words
    selected_ptr = chosen_ptr
    quota = 0
    if HAS_SCORES:
        selected_ptr = tied_ptr + words
        wanted = tl.minimum(pairs, T)
        quota = select(
            selected_ptr,
            tied_ptr,
            ends_ptr,
            keys_ptr + row * 32,
            chosen_ptr,
            eligible_ptr + row,
            wanted,
            T,
            words,
            HAS_ALLOWED,
            COUNT_WORDS,
            STEP_WORDS,
        )
        tl.debug_barrier()
    _index(selected_ptr, tied_ptr, ends_ptr, quota, words, HAS_SCORES, COUNT_WORDS)
    tl.debug_barrier()
    for first in range(0, pairs, SLOTS):
        slots = first + tl.arange(0, SLOTS)
        word = _word_of_slot(ends_ptr, slots, words, top)
        listed = (slots < pairs) & (word < words)
        bits = tl.load(selected_ptr + word, mask=listed, other=0).to(tl.uint32, bitcast=True)
        first_slot = tl.load(ends_ptr + word - 1, mask=listed & (word > 0), other=0)
        bit = position_of_bit(bits, slots - first_slot)
        chosen_word = tl.load(chosen_ptr + word, mask=listed, other=0)
        tl.store(token_ids_ptr + start + slots, word * 32 + bit, mask=listed)
        tl.store(expert_ids_ptr + start + slots, expert.to(tl.int64), mask=listed)
        tl.store(is_chosen_ptr + start + slots, ((chosen_word >> bit) & 1).to(tl.int8), mask=listed)
    if HAS_SCORES:
        end = tl.sum(pairs_E, axis=0).to(tl.int32)
        for first in range(end + expert * SLOTS, capacity, experts * SLOTS):
            spare = first + tl.arange(0, SLOTS)
            tl.store(token_ids_ptr + spare, tl.full([SLOTS], -1, tl.int32), mask=spare < capacity)
            tl.store(expert_ids_ptr + spare, tl.zeros([SLOTS], tl.int64), mask=spare < capacity)
            tl.store(is_chosen_ptr + spare, tl.zeros([SLOTS], tl.int8), mask=spare < capacity)


class BitSets(NamedTuple):
    """The tables of the first kernel, one row per expert.

    chosen_EW: bits of the tokens that have the expert in their top-K. eligible_EW: bits of the tokens that are allowed
    but not in the top-K. keys_ET: (E, 32 W) keys. flags: which of the last two exist.
    """

    chosen_EW: Tensor
    eligible_EW: Tensor
    keys_ET: Tensor
    num_tokens: int
    flags: dict[str, bool]


def chosen_pairs(topk_ids_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels/route/select/reference.py."""
    tables = transposed(topk_ids_TK, None, None, counts_E.shape[0])
    return listed(tables, counts_E, topk_ids_TK.numel())


def start_selection(
    scores_TE: Tensor, topk_ids_TK: Tensor, allowed_TE: Tensor | None
) -> Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]:
    """See kernels/route/select/reference.py."""
    return partial(listed, transposed(topk_ids_TK, scores_TE, allowed_TE, scores_TE.shape[1]))


def transposed(topk_ids_TK: Tensor, scores_TE: Tensor | None, allowed_TE: Tensor | None, E: int) -> BitSets:
    T, K = topk_ids_TK.shape
    tiles = cdiv(T, 32 * TILE_WORDS)
    W = tiles * TILE_WORDS
    chosen_EW = topk_ids_TK.new_empty(E, W, dtype=torch.int32)
    # A variant does not access the tables that it does not need, so any tensor can stand for them.
    eligible_EW = chosen_EW if allowed_TE is None else chosen_EW.new_empty(E, W)
    keys_ET = chosen_EW if scores_TE is None else chosen_EW.new_empty(E, 32 * W)
    flags = {"HAS_SCORES": scores_TE is not None, "HAS_ALLOWED": allowed_TE is not None}
    if T:
        _transpose[(tiles, cdiv(E, 32))](
            topk_ids_TK.contiguous(),
            chosen_EW if scores_TE is None else scores_TE.contiguous(),
            chosen_EW if allowed_TE is None else allowed_TE.contiguous().view(torch.uint8),
            chosen_EW,
            eligible_EW,
            keys_ET,
            T,
            E,
            W,
            K=K,
            BLOCK_K=next_power_of_2(K),
            WORDS=TILE_WORDS,
            num_warps=4,
            **flags,
        )
    return BitSets(chosen_EW, eligible_EW, keys_ET, T, flags)


def listed(tables: BitSets, pairs_E: Tensor, num_pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    E, W = tables.chosen_EW.shape
    token_ids_N, expert_ids_N, chosen_N = (
        tables.chosen_EW.new_empty(num_pairs, dtype=dtype) for dtype in (torch.int32, torch.int64, torch.bool)
    )
    if num_pairs == 0:
        return token_ids_N, expert_ids_N, chosen_N
    _list[(E,)](
        tables.chosen_EW,
        tables.eligible_EW,
        tables.keys_ET,
        tables.chosen_EW.new_empty(E, 4, W),
        pairs_E.contiguous(),
        token_ids_N,
        expert_ids_N,
        chosen_N.view(torch.uint8),
        tables.num_tokens,
        W,
        next_power_of_2(W + 1) // 2,
        num_pairs,
        BLOCK_E=next_power_of_2(E),
        COUNT_WORDS=_COUNT_WORDS,
        STEP_WORDS=_STEP_WORDS,
        SLOTS=_SLOTS,
        num_warps=_NARROW_WARPS if E > _NARROW_FROM_EXPERTS else _WARPS,
        **tables.flags,
    )
    return token_ids_N, expert_ids_N, chosen_N
