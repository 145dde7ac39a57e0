"""The pairs of a given top-K and their weights, rounded or not, and the gradients of weights: in plain torch.

Some frameworks give a table of ids and weights, (T, K), others a map of the chosen experts, and weights, (T, E).

The CPU path, and the oracle of triton.py.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.kernels.route.select.reference import pairs_of_mask
from sonic_ep.kernels.route.topk.reference import times_chosen
from sonic_ep.routing import INDEX_DTYPE, PairLists

SPARE = -(2**31)  # the slot of a spare entry
EPSILON = 1e-20  # added to a sum of scores, which may underflow to 0


class TopKPairs(NamedTuple):
    """The pairs of a top-K, by expert, then token.

    counts_E: int64, tokens of each expert. tokens_1: (1,) int64, T. token_ids_N: int32. slots_N: int32, where each pair
    is in the flattened table of weights. weights_N: in fp32 at least.
    """

    counts_E: Tensor
    tokens_1: Tensor
    token_ids_N: Tensor
    slots_N: Tensor
    weights_N: Tensor


def pairs_with_weights(chosen: Tensor, weights: Tensor, E: int, K: int) -> TopKPairs:
    """Returns the pairs of a top-K with their weights, without a host sync. Not differentiable.

    Shapes:  chosen and weights (T, K): ids, int64 in 0..E-1, distinct in each row, and floating point. Or (T, E): bool
             with K times True in each row, and floating point. N = T * K.
    Example: two tokens, three experts.

        >>> import torch
        >>> from sonic_ep.kernels.route.topk_pairs.reference import pairs_with_weights
        >>> pairs = pairs_with_weights(torch.tensor([[1, 0], [2, 1]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]]), 3, 2)
        >>> pairs.counts_E.tolist(), pairs.token_ids_N.tolist(), pairs.slots_N.tolist(), pairs.weights_N.tolist()
        ([1, 2, 1], [0, 0, 1, 1], [1, 0, 3, 2], [0.25, 0.75, 0.5, 0.5])
    """
    if chosen.dtype == torch.bool:
        counts_E = chosen.sum(0)
        token_ids_N, expert_ids_N = pairs_of_mask(chosen, chosen.shape[0] * K)
        slots_N = token_ids_N * E + expert_ids_N
    else:
        counts_E = times_chosen(chosen, E)
        slots_N = chosen.flatten().argsort(stable=True)
        token_ids_N = slots_N // max(K, 1)
    weights_N = weights.flatten().index_select(0, slots_N)
    return TopKPairs(
        counts_E,
        counts_E.new_full((1,), chosen.shape[0]),
        token_ids_N.to(INDEX_DTYPE),
        slots_N.to(INDEX_DTYPE),
        weights_N.to(torch.promote_types(weights_N.dtype, torch.float32)),
    )


def in_slots(values_N: Tensor, slots_N: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a table with the value of each pair in its slot, and 0 elsewhere.

    Shapes:  values_N (N,) floating point, slots_N of TopKPairs. shape, dtype: of the result.
    Example:

        >>> import torch
        >>> from sonic_ep.kernels.route.topk_pairs.reference import in_slots
        >>> in_slots(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 0, 3]), (2, 2), torch.float32).tolist()
        [[2.0, 1.0], [0.0, 3.0]]
    """
    table = values_N.new_zeros(shape, dtype=dtype)
    table.view(-1).index_copy_(0, slots_N.long(), values_N.to(dtype))
    return table


def count_topk(topk_ids_TK: Tensor, E: int) -> tuple[Tensor, Tensor]:
    """Returns counts_E and tokens_1 of `TopKPairs`. topk_ids_TK: (T, K) int64, distinct in each row.

    Example:

        >>> import torch
        >>> from sonic_ep.kernels.route.topk_pairs.reference import count_topk
        >>> [values.tolist() for values in count_topk(torch.tensor([[1, 0], [2, 1]]), 3)]
        [[1, 2, 1], [2]]
    """
    return times_chosen(topk_ids_TK, E), topk_ids_TK.new_full((1,), topk_ids_TK.shape[0])


def weights_of_rounded(
    pairs: PairLists, weights: Tensor, scores_TE: Tensor, *, by_expert: bool, scale: float, divides: bool
) -> tuple[Tensor, Tensor]:
    """Returns (N,) weights of rounded pairs, in the dtype of the scores, and slots. Not differentiable.

    A pair of the top-K has the weight that is given for it. One that rounding added has `scale` times its score,
    divided by the sum of the token's top-K scores if `divides`. A slot is that of TopKPairs, or -1 minus the place of
    an added pair's score in the flattened (T, E) table. Of a spare entry (token -1) the slot is SPARE, and the weight
    anything.

    Shapes:  weights (T, K) in the order of `pairs.topk_ids_TK`, or (T, E) if by_expert; scores_TE (T, E) fp32 or
             fp64.
    Example: one token with expert 1, to which rounding added expert 0, and a spare entry.

        >>> import torch
        >>> from sonic_ep.kernels.route.topk_pairs.reference import SPARE, weights_of_rounded
        >>> from sonic_ep.routing import PairLists
        >>> lists = torch.tensor([0, 0, -1]).int(), torch.tensor([0, 1, 0]), torch.tensor([False, True, False])
        >>> pairs, scores = PairLists(torch.tensor([[1]]), *lists), torch.tensor([[0.25, 0.75]])
        >>> options = {"by_expert": False, "scale": 2.0, "divides": False}
        >>> weights, slots = weights_of_rounded(pairs, torch.tensor([[1.0]]), scores, **options)
        >>> weights[:2].tolist(), slots.tolist() == [-1, 0, SPARE]
        ([0.5, 1.0], True)
    """
    E = scores_TE.shape[1]
    is_spare_N = pairs.token_ids_N < 0
    tokens_N, experts_N = pairs.token_ids_N.long().clamp(min=0), pairs.expert_ids_N.masked_fill(is_spare_N, 0)
    added_TE = scores_TE
    if divides:
        added_TE = scores_TE / (scores_TE.gather(1, pairs.topk_ids_TK).sum(1, keepdim=True) + EPSILON)
    scores_N = tokens_N * E + experts_N
    slots_N = scores_N
    if not by_expert:
        columns_N = (pairs.topk_ids_TK.index_select(0, tokens_N) == experts_N[:, None]).to(torch.uint8).argmax(1)
        slots_N = tokens_N * weights.shape[1] + columns_N
    given_N = weights.flatten().index_select(0, slots_N).to(scores_TE.dtype)
    weights_N = given_N.where(pairs.chosen_N, scale * added_TE.flatten().index_select(0, scores_N))
    slots_N = slots_N.where(pairs.chosen_N, -1 - scores_N).masked_fill(is_spare_N, SPARE)
    return weights_N, slots_N.to(INDEX_DTYPE)


def in_two_tables(
    values_N: Tensor, slots_N: Tensor, shape: tuple[int, ...], dtype: torch.dtype, scores_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Returns tables with the values of chosen pairs in their slots, and of added pairs in the places of their scores.

    Other entries are 0. shape, dtype: of the first; the second has the dtype of the values. slots_N: of
    `weights_of_rounded`.

    Example: the pairs of that one.

        >>> import torch
        >>> from sonic_ep.kernels.route.topk_pairs.reference import SPARE, in_two_tables
        >>> slots = torch.tensor([-1, 0, SPARE])
        >>> tables = in_two_tables(torch.tensor([3.0, 4.0, 5.0]), slots, (1, 1), torch.float32, (1, 2))
        >>> [table.tolist() for table in tables]
        [[[4.0]], [[3.0, 0.0]]]
    """
    slots_N = slots_N.long()
    is_chosen_N, is_added_N = slots_N >= 0, (slots_N < 0) & (slots_N != SPARE)
    of_table, of_scores = math.prod(shape), math.prod(scores_shape)
    # The others go to an entry behind the table: no index depends on how many there are.
    table = values_N.new_zeros(of_table + 1, dtype=dtype)
    table.scatter_(0, slots_N.where(is_chosen_N, of_table), values_N.to(dtype))
    added = values_N.new_zeros(of_scores + 1).scatter_(0, (-1 - slots_N).where(is_added_N, of_scores), values_N)
    return table[:-1].view(shape), added[:-1].view(scores_shape)
