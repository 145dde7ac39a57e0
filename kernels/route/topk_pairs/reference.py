"""The pairs of a given top-K and their weights, and the gradient of the weights: in plain torch.

Some frameworks give a table of ids and weights, (T, K), others a map of the chosen experts, and weights, (T, E).

The CPU path, and the oracle of triton.py.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.kernels.route.select.reference import pairs_of_mask
from sonic_ep.kernels.route.topk.reference import times_chosen
from sonic_ep.routing import INDEX_DTYPE


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


def in_slots(values_N: Tensor, slots_N: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
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
