"""Which tokens go to which expert, as two Triton kernels: no sort of T x E, no host sync, no order left to chance.

The first turns the step's (T, E) tables around: for each expert one bit per token that chose it (32 tokens a word), and
under selection the scores as keys. In the second a program owns an expert: it selects the best keys (bitset_topk.py),
gives equal ones to the smaller tokens, and looks every slot of its list up in prefix sums of the selected bits.

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

_TILE_WORDS = 4  # of the first kernel, by 32 experts
# One step of the second along an expert's tokens, where it only counts and where it does more; and along its list.
_COUNT_WORDS = 512
_STEP_WORDS = 128
_SLOTS = 1024
# Warps of a program of the second; fewer where programs of more experts than multiprocessors can share one.
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
    """By expert: chosen bits; with scores, keys and the bits of allowed, unchosen tokens. A program: 32 experts."""
    tokens = tl.program_id(0) * (WORDS * 32) + tl.arange(0, WORDS * 32)
    first_expert = tl.program_id(1) * 32
    slots = tl.arange(0, BLOCK_K)
    rows = tokens.to(tl.int64)[:, None]
    real = (tokens < T)[:, None]
    ids = tl.load(ids_ptr + rows * K + slots[None, :], mask=real & (slots < K)[None, :], other=-1)
    ids = ids.to(tl.int32) - first_expert
    # Bit j of a token: it chose expert first_expert + j. A token's experts differ, so a sum is an or.
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
    """Select the first `quota` of the tied, and write prefix sums of selected bits by word."""
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
    """How many words end at or before each slot of the list: a binary search. top: a power of two, words < 2 top."""
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
    """One expert's pairs, by token: with scores its `pairs` best, else those that chose it. With scores there may be
    room behind the last expert's: token -1 and expert 0."""
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


class _Transposed(NamedTuple):
    """(E, W) bits of who chose and of who may be chosen, (E, 32 W) keys, and which of them are there."""

    chosen_EW: Tensor
    eligible_EW: Tensor
    keys_ET: Tensor
    num_tokens: int
    flags: dict[str, bool]


def chosen_pairs(topk_ids_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See routers/select.py."""
    tables = _transposed(topk_ids_TK, None, None, counts_E.shape[0])
    return _listed(tables, counts_E, topk_ids_TK.numel())


def start_selection(
    scores_TE: Tensor, topk_ids_TK: Tensor, allowed_TE: Tensor | None
) -> Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]:
    """See routers/select.py."""
    return partial(_listed, _transposed(topk_ids_TK, scores_TE, allowed_TE, scores_TE.shape[1]))


def _transposed(topk_ids_TK: Tensor, scores_TE: Tensor | None, allowed_TE: Tensor | None, E: int) -> _Transposed:
    (T, K), device = topk_ids_TK.shape, topk_ids_TK.device
    tiles = cdiv(T, 32 * _TILE_WORDS)
    W = tiles * _TILE_WORDS
    chosen_EW = torch.empty(E, W, dtype=torch.int32, device=device)
    # What a variant does without is never touched: any tensor will do.
    eligible_EW = chosen_EW if allowed_TE is None else torch.empty_like(chosen_EW)
    keys_ET = chosen_EW if scores_TE is None else torch.empty(E, 32 * W, dtype=torch.int32, device=device)
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
            WORDS=_TILE_WORDS,
            num_warps=4,
            **flags,
        )
    return _Transposed(chosen_EW, eligible_EW, keys_ET, T, flags)


def _listed(tables: _Transposed, pairs_E: Tensor, num_pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    (E, W), device = tables.chosen_EW.shape, tables.chosen_EW.device
    token_ids_N, expert_ids_N, chosen_N = (
        torch.empty(num_pairs, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64, torch.bool)
    )
    if num_pairs == 0:
        return token_ids_N, expert_ids_N, chosen_N
    _list[(E,)](
        tables.chosen_EW,
        tables.eligible_EW,
        tables.keys_ET,
        torch.empty(E, 4, W, dtype=torch.int32, device=device),
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
