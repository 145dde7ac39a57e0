"""The pairs of a given top-K and their weights in four Triton kernels, and the gradient of the weights in one.

The first and the third are those of select/triton.py: bit sets of each expert's tokens, and their lists.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.bitset import row_count
from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.route.select.triton import listed, transposed
from sonic_ep.kernels.route.topk_pairs.reference import TopKPairs

_COUNT_WORDS = 512  # of a bit set, in each step of the program that counts it
_PAIRS = 256  # of a program


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
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Finds the slots and weights of PAIRS pairs.

    A program reads each pair's token and expert, and the ids (T, K) of the token. It reads the pair's weight from table
    (T, K). It writes slots and weights (N,). Grid: (cdiv(N, PAIRS),). Example: see reference.py.
    """
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pairs < N
    first = tl.load(tokens_ptr + pairs, mask=inside, other=0).to(tl.int64) * K
    experts = tl.load(experts_ptr + pairs, mask=inside, other=-1)
    columns = tl.arange(0, K_PADDED)[None, :]
    ids = tl.load(ids_ptr + first[:, None] + columns, mask=inside[:, None] & (columns < K), other=-2)
    slots = first + tl.sum(tl.where(ids == experts[:, None], columns, 0), axis=1)
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


def pairs_with_weights(topk_ids_TK: Tensor, weights_TK: Tensor, E: int) -> TopKPairs:
    """See kernels/route/topk_pairs/reference.py."""
    (T, K), tables = topk_ids_TK.shape, transposed(topk_ids_TK, None, None, E)
    counts_E, tokens_1 = topk_ids_TK.new_empty(E), topk_ids_TK.new_empty(1)
    words = tables.chosen_EW.shape[1]
    _count[(E,)](tables.chosen_EW, counts_E, tokens_1, T, words, COUNT_WORDS=_COUNT_WORDS, num_warps=4)
    N = T * K
    token_ids_N, expert_ids_N, _ = listed(tables, counts_E, N)
    slots_N = token_ids_N.new_empty(N)
    weights_N = weights_TK.new_empty(N, dtype=torch.promote_types(weights_TK.dtype, torch.float32))
    if N:
        _weigh[(cdiv(N, _PAIRS),)](
            topk_ids_TK.contiguous(),
            weights_TK.contiguous(),
            token_ids_N,
            expert_ids_N,
            slots_N,
            weights_N,
            N,
            K=K,
            K_PADDED=next_power_of_2(K),
            PAIRS=_PAIRS,
            num_warps=4,
        )
    return TopKPairs(counts_E, tokens_1, token_ids_N, slots_N, weights_N)


def in_slots(values_N: Tensor, slots_N: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """See kernels/route/topk_pairs/reference.py."""
    N = values_N.shape[0]
    out_TK = values_N.new_empty(N // max(K, 1), K, dtype=dtype)
    if N:
        _scatter[(cdiv(N, _PAIRS),)](values_N.contiguous(), slots_N, out_TK, N, PAIRS=_PAIRS, num_warps=4)
    return out_TK
