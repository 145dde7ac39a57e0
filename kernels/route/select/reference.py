"""Which tokens go to which expert, by unique keys, in plain torch: the CPU path, and the twin of triton.py beside it.

A key is one int64: class bits, then the score as an order-preserving 32-bit integer, then the id, reversed so that the
smaller id wins: no two candidates ever tie.

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
    """Every pair of a plain top-K choice, by expert, then token, without a host sync.

    Shapes:  topk_ids_TK (T, K) integers, each row distinct; counts_E (E,) integers on its device: the tokens of each
             expert. Returns token ids (N,) int32, expert ids (N,) int64 and (N,) bool: True, all are chosen. N = T K.
    Example: rows [1, 0] and [2, 1] of 3 experts -> tokens [0, 0, 1, 1], experts [0, 1, 1, 2].
    """
    token_ids_N, expert_ids_N = pairs_of_topk(topk_ids_TK)
    return token_ids_N.to(INDEX_DTYPE), expert_ids_N, torch.ones_like(token_ids_N, dtype=torch.bool)


def start_selection(
    scores_TE: Tensor, topk_ids_TK: Tensor, allowed_TE: Tensor | None
) -> Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]:
    """What can be done before it is known how many pairs an expert gets; the result, given pairs_E and num_pairs, does
    the rest: for each expert its `pairs_E` best tokens, by the rule of `select_tokens`, without a host sync.

    Shapes:  as there and in `chosen_pairs`; every pairs_E in 0..T, num_pairs their sum. The (N,) bool says which pairs
             the tokens chose; the others were added. On a GPU num_pairs may be larger: token -1 and
             expert 0 then fill the end.
    """

    def selected_pairs(pairs_E: Tensor, num_pairs: int) -> tuple[Tensor, Tensor, Tensor]:
        mask_TE = select_tokens(scores_TE, topk_ids_TK, allowed_TE, pairs_E)
        token_ids_N, expert_ids_N = pairs_of_mask(mask_TE, num_pairs)
        chosen_N = topk_mask(topk_ids_TK, mask_TE.shape[1])[token_ids_N, expert_ids_N]
        return token_ids_N.to(INDEX_DTYPE), expert_ids_N, chosen_N

    return selected_pairs


def select_tokens(scores_TE: Tensor, topk_ids_TK: Tensor, allowed_TE: Tensor | None, pairs_E: Tensor) -> Tensor:
    """(T, E) bool: for each expert its `pairs_E` best tokens.

    Tokens that chose the expert outrank those that may choose it, which outrank the rest (only under group-limited
    routing); inside a class the higher score wins, then the smaller token id.
    Example: scores of one expert [.1, .9, .5, .7], chosen by tokens 0 and 2, 3 wanted -> tokens 2, 0 and 1.
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
    """Every (token, expert) of a plain top-K choice, by expert, then token: token ids (N,), expert ids (N,), int64."""
    T, K = topk_ids_TK.shape
    expert_ids_N, order_N = topk_ids_TK.flatten().sort(stable=True)
    return order_N // max(K, 1), expert_ids_N


def pairs_of_mask(selected_TE: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """The `num_pairs` True entries of a selection, by expert, then token, without a host sync."""
    expert_ids_N, token_ids_N = torch.nonzero_static(selected_TE.T, size=num_pairs).unbind(1)
    return token_ids_N, expert_ids_N
