"""The pairs of a given top-K and their weights in four Triton kernels, and the gradient of the weights in one.

The third is the one of select/triton.py, which makes lists of bit sets, and so is the first where ids are given.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.bitset import row_count, store_columns
from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.route.select.triton import TILE_WORDS, BitSets, listed, transposed
from sonic_ep.kernels.route.topk_pairs.reference import TopKPairs

_COUNT_WORDS = 512  # of a bit set, in each step of the program that counts it
_PAIRS = 256  # of a program


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


def pairs_with_weights(chosen: Tensor, weights: Tensor, E: int, K: int) -> TopKPairs:
    """See kernels/route/topk_pairs/reference.py."""
    chosen, T, is_map = chosen.contiguous(), chosen.shape[0], chosen.dtype == torch.bool
    tables = _of_map(chosen) if is_map else transposed(chosen, None, None, E)
    words = tables.chosen_EW.shape[1]
    counts_E, tokens_1 = (chosen.new_empty(size, dtype=torch.int64) for size in (E, 1))
    _count[(E,)](tables.chosen_EW, counts_E, tokens_1, T, words, COUNT_WORDS=_COUNT_WORDS, num_warps=4)
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


def _of_map(map_TE: Tensor) -> BitSets:
    (T, E), tiles = map_TE.shape, cdiv(map_TE.shape[0], 32 * TILE_WORDS)
    chosen_EW = map_TE.new_empty(E, tiles * TILE_WORDS, dtype=torch.int32)
    if T:
        grid = tiles, cdiv(E, 32)
        entries, words = map_TE.view(torch.uint8), tiles * TILE_WORDS
        _transpose_map[grid](entries, chosen_EW, T, E, words, WORDS=TILE_WORDS, num_warps=4)
    return BitSets(chosen_EW, chosen_EW, chosen_EW, T, {"HAS_SCORES": False, "HAS_ALLOWED": False})


def in_slots(values_N: Tensor, slots_N: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """See kernels/route/topk_pairs/reference.py."""
    N = values_N.shape[0]
    table = (values_N.new_empty if N == shape[0] * shape[1] else values_N.new_zeros)(shape, dtype=dtype)
    if N:
        _scatter[(cdiv(N, _PAIRS),)](values_N.contiguous(), slots_N, table, N, PAIRS=_PAIRS, num_warps=4)
    return table
