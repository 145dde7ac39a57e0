"""The pairs of a given top-K and their weights in four Triton kernels, and the gradient of the weights in one. The
weights of rounded pairs, and their gradients, in one each.

The third is the one of select/triton.py, which makes lists of bit sets, and so is the first where ids are given.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.bitset import row_count, store_columns
from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.route.select.triton import TILE_WORDS, BitSets, listed, transposed
from sonic_ep.kernels.route.topk_pairs.reference import EPSILON, SPARE, TopKPairs
from sonic_ep.routing import PairLists

_COUNT_WORDS = 512  # of a bit set, in each step of the program that counts it
_PAIRS = 256  # of a program
_SPARE, _EPSILON = tl.constexpr(SPARE), tl.constexpr(EPSILON)


@fast_launch
@triton.jit(do_not_specialize=["T", "words"])
def _transpose_map(map_ptr, chosen_ptr, T, E, words, WORDS: tl.constexpr):
    """Turns a map of tokens into bit sets of experts.

    A program reads the entries of WORDS * 32 tokens and 32 experts of map (T, E), 0 or 1, and writes their bits to
    chosen (E, words). Grid: (words / WORDS, cdiv(E, 32)). Example: see reference.py.
    """
    tokens = tl.program_id(0) * (WORDS * 32) + tl.arange(0, WORDS * 32)
    experts = tl.program_id(1) * 32 + tl.arange(0, 32)
    inside = (tokens < T)[:, None] & (experts < E)[None, :]
    entries = tl.load(map_ptr + tokens.to(tl.int64)[:, None] * E + experts[None, :], mask=inside, other=0)
    store_columns(chosen_ptr, entries.to(tl.int32), tokens, tl.program_id(1) * 32, E, words, WORDS)


@fast_launch
@triton.jit(do_not_specialize=["T", "words"])
def _count(chosen_ptr, counts_ptr, tokens_ptr, T, words, COUNT_WORDS: tl.constexpr):
    """Counts the tokens of one expert.

    A program reads a row of chosen (E, words) and writes one of counts (E,); the first writes T to tokens (1,).
    Grid: (E,). Example: see reference.py.
    """
    expert = tl.program_id(0)
    count = row_count(chosen_ptr + expert.to(tl.int64) * words, words, COUNT_WORDS)
    tl.store(counts_ptr + expert, count.to(tl.int64))
    if expert == 0:
        tl.store(tokens_ptr, T.to(tl.int64))


@fast_launch
@triton.jit(do_not_specialize=["N"])
def _weigh(
    ids_ptr,
    table_ptr,
    tokens_ptr,
    experts_ptr,
    slots_ptr,
    weights_ptr,
    N,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    HAS_IDS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Finds the slots and weights of PAIRS pairs.

    A program reads each pair's token and expert, and with HAS_IDS the ids (T, C) of the token, else its columns are all
    experts. It reads the pair's weight from table (T, C), and writes slots and weights (N,). Grid: (cdiv(N, PAIRS),).
    Example: see reference.py.
    """
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pairs < N
    first = tl.load(tokens_ptr + pairs, mask=inside, other=0).to(tl.int64) * C
    experts = tl.load(experts_ptr + pairs, mask=inside, other=0)
    if HAS_IDS:
        columns = tl.arange(0, C_PADDED)[None, :]
        ids = tl.load(ids_ptr + first[:, None] + columns, mask=inside[:, None] & (columns < C), other=-1)
        slots = first + tl.sum(tl.where(ids == experts[:, None], columns, 0), axis=1)
    else:
        slots = first + experts
    weights = tl.load(table_ptr + slots, mask=inside, other=0.0)
    tl.store(slots_ptr + pairs, slots.to(tl.int32), mask=inside)
    tl.store(weights_ptr + pairs, weights.to(weights_ptr.dtype.element_ty), mask=inside)


@fast_launch
@triton.jit(do_not_specialize=["N"])
def _scatter(values_ptr, slots_ptr, out_ptr, N, PAIRS: tl.constexpr):
    """Writes the values (N,) of PAIRS pairs to their slots of out, with N entries. Grid: (cdiv(N, PAIRS),).

    Example: see reference.py.
    """
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    slots = tl.load(slots_ptr + pairs, mask=pairs < N, other=0)
    values = tl.load(values_ptr + pairs, mask=pairs < N, other=0.0)
    tl.store(out_ptr + slots, values.to(out_ptr.dtype.element_ty), mask=pairs < N)


@fast_launch
@triton.jit(do_not_specialize=["N", "scale"])
def _weigh_rounded(
    ids_ptr,
    table_ptr,
    scores_ptr,
    tokens_ptr,
    experts_ptr,
    is_chosen_ptr,
    slots_ptr,
    weights_ptr,
    N,
    scale: tl.float32,
    E: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    DIVIDES: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Finds the slots and weights of PAIRS rounded pairs.

    A program reads each pair's token, expert and flag, and the ids (T, K) of the token. It reads the weight from table
    (T, K), or (T, E) if BY_EXPERT, or the score (T, E), with DIVIDES all K scores. It writes slots and weights (N,).
    Grid: (cdiv(N, PAIRS),). Example: see reference.py.
    """
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    tokens = tl.load(tokens_ptr + pairs, mask=pairs < N, other=-1).to(tl.int64)
    real = tokens >= 0
    experts = tl.load(experts_ptr + pairs, mask=real, other=0)
    is_chosen = real & (tl.load(is_chosen_ptr + pairs, mask=real, other=0) > 0)
    is_added = real & (is_chosen == 0)
    of_score = tokens * E + experts
    columns = tl.arange(0, K_PADDED)[None, :]
    in_row = real[:, None] & (columns < K)
    ids = tl.load(ids_ptr + tokens[:, None] * K + columns, mask=in_row, other=-1)
    if BY_EXPERT:
        slots = of_score
    else:
        slots = tokens * K + tl.sum(tl.where(ids == experts[:, None], columns, 0), axis=1)
    added = tl.load(scores_ptr + of_score, mask=is_added, other=0.0)
    if DIVIDES:
        scores = tl.load(scores_ptr + tokens[:, None] * E + ids, mask=in_row & is_added[:, None], other=0.0)
        added = added / (tl.sum(scores, axis=1) + _EPSILON)
    given = tl.load(table_ptr + slots, mask=is_chosen, other=0.0).to(weights_ptr.dtype.element_ty)
    slots = tl.where(real, tl.where(is_chosen, slots, -1 - of_score), _SPARE)
    tl.store(slots_ptr + pairs, slots.to(tl.int32), mask=pairs < N)
    tl.store(weights_ptr + pairs, tl.where(is_chosen, given, added * scale), mask=pairs < N)


@fast_launch
@triton.jit(do_not_specialize=["N"])
def _scatter_two(values_ptr, slots_ptr, table_ptr, added_ptr, N, PAIRS: tl.constexpr):
    """Writes the values (N,) of PAIRS rounded pairs to their slots of table, or to added. Grid: (cdiv(N, PAIRS),).

    Example: see reference.py.
    """
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    slots = tl.load(slots_ptr + pairs, mask=pairs < N, other=_SPARE)
    values = tl.load(values_ptr + pairs, mask=slots != _SPARE, other=0.0)
    tl.store(table_ptr + slots, values.to(table_ptr.dtype.element_ty), mask=slots >= 0)
    tl.store(added_ptr - 1 - slots.to(tl.int64), values, mask=(slots < 0) & (slots != _SPARE))


def pairs_with_weights(chosen: Tensor, weights: Tensor, E: int, K: int) -> TopKPairs:
    """See kernels/route/topk_pairs/reference.py."""
    chosen, T, is_map = chosen.contiguous(), chosen.shape[0], chosen.dtype == torch.bool
    tables = _of_map(chosen) if is_map else transposed(chosen, None, None, E)
    counts_E, tokens_1 = _counted(tables)
    N, C = T * K, weights.shape[1]
    token_ids_N, expert_ids_N, _ = listed(tables, counts_E, N)
    slots_N = token_ids_N.new_empty(N)
    weights_N = weights.new_empty(N, dtype=torch.promote_types(weights.dtype, torch.float32))
    if N:
        _weigh[(cdiv(N, _PAIRS),)](
            expert_ids_N if is_map else chosen,
            weights.contiguous(),
            token_ids_N,
            expert_ids_N,
            slots_N,
            weights_N,
            N,
            C=C,
            C_PADDED=next_power_of_2(C),
            HAS_IDS=not is_map,
            PAIRS=_PAIRS,
            num_warps=4,
        )
    return TopKPairs(counts_E, tokens_1, token_ids_N, slots_N, weights_N)


def count_topk(topk_ids_TK: Tensor, E: int) -> tuple[Tensor, Tensor]:
    """See kernels/route/topk_pairs/reference.py."""
    return _counted(transposed(topk_ids_TK, None, None, E))


def _counted(tables: BitSets) -> tuple[Tensor, Tensor]:
    bits_EW = tables.chosen_EW
    E, W = bits_EW.shape
    counts_E, tokens_1 = (bits_EW.new_empty(size, dtype=torch.int64) for size in (E, 1))
    _count[(E,)](bits_EW, counts_E, tokens_1, tables.num_tokens, W, COUNT_WORDS=_COUNT_WORDS, num_warps=4)
    return counts_E, tokens_1


def _of_map(map_TE: Tensor) -> BitSets:
    (T, E), tiles = map_TE.shape, cdiv(map_TE.shape[0], 32 * TILE_WORDS)
    chosen_EW = map_TE.new_empty(E, tiles * TILE_WORDS, dtype=torch.int32)
    if T:
        grid = tiles, cdiv(E, 32)
        entries, words = map_TE.view(torch.uint8), tiles * TILE_WORDS
        _transpose_map[grid](entries, chosen_EW, T, E, words, WORDS=TILE_WORDS, num_warps=4)
    return BitSets(chosen_EW, chosen_EW, chosen_EW, T, {"HAS_SCORES": False, "HAS_ALLOWED": False})


def in_slots(values_N: Tensor, slots_N: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """See kernels/route/topk_pairs/reference.py."""
    N = values_N.shape[0]
    table = (values_N.new_empty if N == math.prod(shape) else values_N.new_zeros)(shape, dtype=dtype)
    if N:
        _scatter[(cdiv(N, _PAIRS),)](values_N.contiguous(), slots_N, table, N, PAIRS=_PAIRS, num_warps=4)
    return table


def weights_of_rounded(
    pairs: PairLists, weights: Tensor, scores_TE: Tensor, *, by_expert: bool, scale: float, divides: bool
) -> tuple[Tensor, Tensor]:
    """See kernels/route/topk_pairs/reference.py."""
    E, K, N = scores_TE.shape[1], pairs.topk_ids_TK.shape[1], pairs.token_ids_N.shape[0]
    slots_N, weights_N = pairs.token_ids_N.new_empty(N), scores_TE.new_empty(N)
    if N:
        _weigh_rounded[(cdiv(N, _PAIRS),)](
            pairs.topk_ids_TK.contiguous(),
            weights.contiguous(),
            scores_TE.contiguous(),
            pairs.token_ids_N,
            pairs.expert_ids_N,
            pairs.chosen_N.view(torch.uint8),
            slots_N,
            weights_N,
            N,
            scale,
            E=E,
            K=K,
            K_PADDED=next_power_of_2(K),
            BY_EXPERT=by_expert,
            DIVIDES=divides,
            PAIRS=_PAIRS,
            num_warps=4,
        )
    return weights_N, slots_N


def in_two_tables(
    values_N: Tensor, slots_N: Tensor, shape: tuple[int, ...], dtype: torch.dtype, scores_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """See kernels/route/topk_pairs/reference.py."""
    N, table, added = values_N.shape[0], values_N.new_zeros(shape, dtype=dtype), values_N.new_zeros(scores_shape)
    if N:
        _scatter_two[(cdiv(N, _PAIRS),)](values_N.contiguous(), slots_N, table, added, N, PAIRS=_PAIRS, num_warps=4)
    return table, added
