"""The pairs of a given top-K and their weights, and the gradient of the weights: in plain torch.

The CPU path, and the oracle of triton.py.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.kernels.route.topk.reference import times_chosen
from sonic_ep.routing import INDEX_DTYPE


class TopKPairs(NamedTuple):
    """The pairs of a top-K, by expert, then token.

    counts_E: int64, tokens of each expert. tokens_1: (1,) int64, T. token_ids_N: int32. slots_N: int32, where each pair
    is in the flattened (T, K) table. weights_N: in fp32 at least.
    """

    counts_E: Tensor
    tokens_1: Tensor
    token_ids_N: Tensor
    slots_N: Tensor
    weights_N: Tensor


def pairs_with_weights(topk_ids_TK: Tensor, weights_TK: Tensor, E: int) -> TopKPairs:
    """Returns the pairs of a top-K with their weights, without a host sync. Not differentiable.

    Shapes:  topk_ids_TK (T, K) int64 in 0..E-1, distinct in each row; weights_TK (T, K) floating point. N = T * K.
    Example: two tokens, three experts.

        >>> import torch
        >>> from sonic_ep.kernels.route.topk_pairs.reference import pairs_with_weights
        >>> pairs = pairs_with_weights(torch.tensor([[1, 0], [2, 1]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]]), 3)
        >>> pairs.counts_E.tolist(), pairs.token_ids_N.tolist(), pairs.slots_N.tolist(), pairs.weights_N.tolist()
        ([1, 2, 1], [0, 0, 1, 1], [1, 0, 3, 2], [0.25, 0.75, 0.5, 0.5])
    """
    T, K = topk_ids_TK.shape
    slots_N = topk_ids_TK.flatten().argsort(stable=True)
    weights_N = weights_TK.flatten().index_select(0, slots_N)
    return TopKPairs(
        times_chosen(topk_ids_TK, E),
        topk_ids_TK.new_full((1,), T),
        (slots_N // max(K, 1)).to(INDEX_DTYPE),
        slots_N.to(INDEX_DTYPE),
        weights_N.to(torch.promote_types(weights_N.dtype, torch.float32)),
    )


def in_slots(values_N: Tensor, slots_N: Tensor, K: int, dtype: torch.dtype) -> Tensor:
    """Returns (T, K): the value of each pair in its slot.

    Shapes:  values_N (N,) floating point, slots_N of TopKPairs. dtype: of the result.
    Example:

        >>> import torch
        >>> from sonic_ep.kernels.route.topk_pairs.reference import in_slots
        >>> in_slots(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1, 0, 3, 2]), 2, torch.float32).tolist()
        [[2.0, 1.0], [4.0, 3.0]]
    """
    values = torch.empty_like(values_N, dtype=dtype).index_copy_(0, slots_N.long(), values_N.to(dtype))
    return values.view(values_N.shape[0] // max(K, 1), K)
