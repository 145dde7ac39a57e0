"""Selects the tokens of each expert by unique keys, in plain torch: the CPU path, and the twin of triton.py.

A key is one int64: class bits, then the score as an order-preserving 32-bit integer, then the token id, reversed so
that the smaller id wins. Keys never tie.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sonic_ep.kernels.route.topk.reference import ordered_bits, topk_mask
from sonic_ep.routing import INDEX_DTYPE

_TOKEN_BITS = 29
MAX_TOKENS = 2**_TOKEN_BITS


def chosen_pairs(topk_ids_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns every pair of plain top-K, by expert, then token, without a host sync.

    Shapes:  topk_ids_TK (T, K) integers, distinct in each row; counts_E (E,) integers on the same device: the number of
             tokens of each expert. Returns token ids (N,) int32, expert ids (N,) int64 and (N,) bool, all True, because
             every pair is in its token's top-K. N = T * K.
    Example: two tokens, three experts.

        >>> import torch
        >>> from sonic_ep.kernels.route.select.reference import chosen_pairs
        >>> lists = chosen_pairs(torch.tensor([[1, 0], [2, 1]]), torch.tensor([1, 2, 1]))
        >>> [values.tolist() for values in lists]
        [[0, 0, 1, 1], [0, 1, 1, 2], [True, True, True, True]]
    """
    token_ids_N, expert_ids_N = pairs_of_topk(topk_ids_TK)
    return token_ids_N.to(INDEX_DTYPE), expert_ids_N, torch.ones_like(token_ids_N, dtype=torch.bool)


def start_selection(
    scores_TE: Tensor, topk_ids_TK: Tensor, allowed_TE: Tensor | None
) -> Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]:
    """Starts the selection of each expert's best tokens, before the number of pairs of each expert is known.

    The result is a function of (pairs_E, num_pairs), which finishes the selection and returns the lists of
    `chosen_pairs`: for each expert its `pairs_E` best tokens by the rule of `select_tokens`. Neither call syncs the
    host. The GPU does as much as possible in the first call, which may run while the counts are gathered.

    Shapes:  inputs as in `select_tokens`. pairs_E (E,) integers in 0..T; num_pairs is their sum. The (N,) bool is True
             for pairs in their token's top-K and False for pairs that rounding added. On a GPU num_pairs may exceed the
             sum: the spare entries at the end have token -1 and expert 0.
    Example: expert 0 gets two tokens, one of them added; expert 1 gets one.

        >>> import torch
        >>> from sonic_ep.kernels.route.select.reference import start_selection
        >>> scores_TE = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.3, 0.7]])
        >>> finish = start_selection(scores_TE, torch.tensor([[0], [1], [1]]), None)
        >>> [values.tolist() for values in finish(torch.tensor([2, 1]), 3)]
        [[0, 1, 2], [0, 0, 1], [True, False, True]]
    """

    def selected_pairs(pairs_E: Tensor, num_pairs: int) -> tuple[Tensor, Tensor, Tensor]:
        mask_TE = select_tokens(scores_TE, topk_ids_TK, allowed_TE, pairs_E)
        token_ids_N, expert_ids_N = pairs_of_mask(mask_TE, num_pairs)
        chosen_N = topk_mask(topk_ids_TK, mask_TE.shape[1])[token_ids_N, expert_ids_N]
        return token_ids_N.to(INDEX_DTYPE), expert_ids_N, chosen_N

    return selected_pairs


def select_tokens(scores_TE: Tensor, topk_ids_TK: Tensor, allowed_TE: Tensor | None, pairs_E: Tensor) -> Tensor:
    """Returns (T, E) bool: True for the `pairs_E` best tokens of each expert.

    Tokens with the expert in their top-K rank first. Then come tokens for which it is allowed, then the rest (which
    exists only under group-limited routing). Within a class the higher score wins, then the smaller token id.

    Shapes:  scores_TE (T, E) floats; topk_ids_TK (T, K) int64; allowed_TE (T, E) bool, or None if every expert is
             allowed; pairs_E (E,) integers in 0..T.
    Example: tokens 0 and 2 have expert 0 in their top-K; it gets token 1 in addition.

        >>> import torch
        >>> from sonic_ep.kernels.route.select.reference import select_tokens
        >>> scores_TE, topk_ids_TK = torch.tensor([[0.1, 0], [0.9, 0], [0.5, 0], [0.7, 0]]), torch.tensor([0, 1, 0, 1])
        >>> select_tokens(scores_TE, topk_ids_TK[:, None], None, torch.tensor([3, 0]))[:, 0].tolist()
        [True, True, True, False]
    """
    T, E = scores_TE.shape
    chosen_TE = topk_mask(topk_ids_TK, E)
    class_TE = chosen_TE.long() * 2 if allowed_TE is None else chosen_TE.long() * 2 + (~chosen_TE & allowed_TE).long()
    tokens_T1 = torch.arange(T, device=scores_TE.device)[:, None]
    keys_TE = (class_TE << (32 + _TOKEN_BITS)) | (ordered_bits(scores_TE) << _TOKEN_BITS) | (MAX_TOKENS - 1 - tokens_T1)
    order_TE = keys_TE.argsort(dim=0, descending=True)
    selected_TE = torch.zeros_like(chosen_TE)
    return selected_TE.scatter_(0, order_TE, tokens_T1 < pairs_E[None, :])


def pairs_of_topk(topk_ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the token ids and expert ids of plain top-K, both (N,) int64, by expert, then token.

    Example:

        >>> import torch
        >>> from sonic_ep.kernels.route.select.reference import pairs_of_topk
        >>> [ids.tolist() for ids in pairs_of_topk(torch.tensor([[1, 0], [2, 1]]))]
        [[0, 0, 1, 1], [0, 1, 1, 2]]
    """
    T, K = topk_ids_TK.shape
    expert_ids_N, order_N = topk_ids_TK.flatten().sort(stable=True)
    return order_N // max(K, 1), expert_ids_N


def pairs_of_mask(selected_TE: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Returns the token ids and expert ids of the True entries of a (T, E) mask, by expert, then token.

    num_pairs: the number of True entries. Both results are (num_pairs,) int64. There is no host sync.
    Example:

        >>> import torch
        >>> from sonic_ep.kernels.route.select.reference import pairs_of_mask
        >>> [ids.tolist() for ids in pairs_of_mask(torch.tensor([[True, True], [False, True]]), 3)]
        [[0, 0, 1], [0, 1, 1]]
    """
    expert_ids_N, token_ids_N = torch.nonzero_static(selected_TE.T, size=num_pairs).unbind(1)
    return token_ids_N, expert_ids_N
