"""Selection by unique keys: no two candidates ever tie, so every device and every rank chooses alike.

A key is one int64: class bits, then the score as an order-preserving 32-bit integer, then the id, reversed so that the
smaller id wins. float64 scores are ordered by their float32 value, then by id. NaN ranks below -inf.

Legend: T tokens, E experts, K experts per token, N selected pairs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sonic_ep.kernels.backend import select_kernels
from sonic_ep.routing import INDEX_DTYPE

_EXPERT_BITS = 12  # E <= 4096
_TOKEN_BITS = 29
MAX_TOKENS = 2**_TOKEN_BITS


def ordered_bits(scores: Tensor) -> Tensor:
    """int64 in 0..2^32-1 that order like the float32 values of `scores`; -0.0 equals 0.0, NaN comes first."""
    values = scores.detach().float() + 0.0
    bits = values.contiguous().view(torch.int32)
    signed = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return torch.where(values.isnan(), 0, signed + 2**31)


def top_experts(scores_TE: Tensor, allowed_TE: Tensor | None, K: int) -> Tensor:
    """(T, K) int64 ids of each token's K best experts, best first; among equal scores the smaller id.

    allowed_TE: bool; experts outside it are taken only when fewer than K are inside.
    """
    E = scores_TE.shape[1]
    ids_E = torch.arange(E, device=scores_TE.device)
    keys_TE = (ordered_bits(scores_TE) << _EXPERT_BITS) | (2**_EXPERT_BITS - 1 - ids_E)
    if allowed_TE is not None:
        keys_TE = keys_TE | (allowed_TE.long() << (32 + _EXPERT_BITS))
    return keys_TE.topk(K, dim=1).indices


def chosen_pairs(topk_ids_TK: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every pair of a plain top-K choice, by expert, then token, without a host sync.

    Shapes:  topk_ids_TK (T, K) integers, each row distinct; counts_E (E,) integers on its device: the tokens of each
             expert. Returns token ids (N,) int32, expert ids (N,) int64 and (N,) bool: True, all are chosen. N = T K.
    Example: rows [1, 0] and [2, 1] of 3 experts -> tokens [0, 0, 1, 1], experts [0, 1, 1, 2].
    """
    if (kernels := select_kernels(topk_ids_TK.device)) is not None:
        return kernels.chosen_pairs(topk_ids_TK, counts_E)
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
    if (kernels := select_kernels(scores_TE.device)) is not None:
        return kernels.start_selection(scores_TE, topk_ids_TK, allowed_TE)

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


def topk_mask(topk_ids_TK: Tensor, E: int) -> Tensor:
    """(T, E) bool: did token T choose expert E?"""
    mask_TE = torch.zeros(topk_ids_TK.shape[0], E, dtype=torch.bool, device=topk_ids_TK.device)
    return mask_TE.scatter_(1, topk_ids_TK, True)


def pairs_of_topk(topk_ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Every (token, expert) of a plain top-K choice, by expert, then token: token ids (N,), expert ids (N,), int64."""
    T, K = topk_ids_TK.shape
    expert_ids_N, order_N = topk_ids_TK.flatten().sort(stable=True)
    return order_N // max(K, 1), expert_ids_N


def pairs_of_mask(selected_TE: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """The `num_pairs` True entries of a selection, by expert, then token, without a host sync."""
    expert_ids_N, token_ids_N = torch.nonzero_static(selected_TE.T, size=num_pairs).unbind(1)
    return token_ids_N, expert_ids_N
