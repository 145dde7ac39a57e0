"""Scores and top-K by unique keys, in plain torch: the CPU path, and the twin of triton.py.

Keys never tie, so every device and every rank selects the same experts. A key is one int64: one bit that is set for an
allowed expert, then the score as an order-preserving 32-bit integer, then the expert id, reversed so that the smaller
id wins. float64 scores are ordered by their float32 value, then by id. NaN ranks below -inf.

Legend: T tokens on this rank, E experts, K experts per token, g expert groups.
"""

import torch
from torch import Tensor

from sonic_ep.config import RouterConfig

_EXPERT_BITS = 12  # E <= 4096


def ordered_bits(scores: Tensor) -> Tensor:
    """Returns int64 in 0..2^32-1 that order like the float32 values of `scores`. -0.0 equals 0.0; NaN becomes 0.

    Example:

        >>> import torch
        >>> from sonic_ep.kernels.route.topk.reference import ordered_bits
        >>> ordered_bits(torch.tensor([float("nan"), -1.0, -0.0, 0.0, 1.0])).tolist()
        [0, 1082130431, 2147483648, 2147483648, 3212836864]
    """
    values = scores.detach().float() + 0.0
    bits = values.contiguous().view(torch.int32)
    signed = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return torch.where(values.isnan(), 0, signed + 2**31)


def top_experts(scores_TE: Tensor, allowed_TE: Tensor | None, K: int) -> Tensor:
    """Returns (T, K) int64: the ids of each token's K best experts, best first. Of equal scores the smaller id wins.

    Shapes:  scores_TE (T, E) floats; allowed_TE (T, E) bool or None. An expert that is not allowed is selected only if
             a token has fewer than K allowed experts.
    Example: experts 0 and 2 tie; then expert 0 is not allowed.

        >>> import torch
        >>> from sonic_ep.kernels.route.topk.reference import top_experts
        >>> scores_TE = torch.tensor([[0.4, 0.1, 0.4, 0.2]])
        >>> top_experts(scores_TE, None, 2).tolist()
        [[0, 2]]
        >>> top_experts(scores_TE, torch.tensor([[False, True, True, True]]), 2).tolist()
        [[2, 3]]
    """
    E = scores_TE.shape[1]
    ids_E = torch.arange(E, device=scores_TE.device)
    keys_TE = (ordered_bits(scores_TE) << _EXPERT_BITS) | (2**_EXPERT_BITS - 1 - ids_E)
    if allowed_TE is not None:
        keys_TE = keys_TE | (allowed_TE.long() << (32 + _EXPERT_BITS))
    return keys_TE.topk(K, dim=1).indices


def topk_mask(topk_ids_TK: Tensor, E: int) -> Tensor:
    """Returns (T, E) bool: True where the expert is in the token's top-K.

    Example:

        >>> import torch
        >>> from sonic_ep.kernels.route.topk.reference import topk_mask
        >>> topk_mask(torch.tensor([[1, 0], [2, 1]]), 3).int().tolist()
        [[1, 1, 0], [0, 1, 1]]
    """
    mask_TE = torch.zeros(topk_ids_TK.shape[0], E, dtype=torch.bool, device=topk_ids_TK.device)
    return mask_TE.scatter_(1, topk_ids_TK, True)


def experts_of_best_groups(ranking_TE: Tensor, config: RouterConfig) -> Tensor:
    """Returns (T, E) bool: True for the experts of each token's best groups.

    A group is E / num_groups consecutive experts. Its rank is the sum of its two best values of `ranking_TE`. The best
    `groups_per_token` groups win. Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    Example: two groups with sums 1.0 and 1.5.

        >>> import torch
        >>> from sonic_ep.config import RouterConfig
        >>> from sonic_ep.kernels.route.topk.reference import experts_of_best_groups
        >>> config = RouterConfig(num_groups=2, groups_per_token=1)
        >>> experts_of_best_groups(torch.tensor([[1.0, 0.0, 0.75, 0.75]]), config).tolist()
        [[False, False, True, True]]
    """
    T, E = ranking_TE.shape
    per_group = E // config.num_groups
    scores_Tg = ranking_TE.view(T, config.num_groups, per_group).topk(2, dim=2).values.sum(2)
    groups = top_experts(scores_Tg, None, config.groups_per_token)
    return topk_mask(groups, config.num_groups).repeat_interleave(per_group, dim=1)


def times_chosen(topk_ids_TK: Tensor, E: int) -> Tensor:
    """Returns (E,) int64: the number of tokens that have each expert in their top-K.

    Example:

        >>> import torch
        >>> from sonic_ep.kernels.route.topk.reference import times_chosen
        >>> times_chosen(torch.tensor([[1, 0], [2, 1]]), 3).tolist()
        [1, 2, 1]
    """
    ids = topk_ids_TK.flatten()
    return torch.zeros(E, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))


def scores_of(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """Returns the scores (T, E) in the dtype of the logits: softmax over the experts, or sigmoid.

    Example:

        >>> import torch
        >>> from sonic_ep.config import RouterConfig
        >>> from sonic_ep.kernels.route.topk.reference import scores_of
        >>> logits_TE = torch.zeros(1, 4)
        >>> [scores_of(logits_TE, RouterConfig(score=score)).tolist() for score in ("softmax", "sigmoid")]
        [[[0.25, 0.25, 0.25, 0.25]], [[0.5, 0.5, 0.5, 0.5]]]
    """
    return logits_TE.softmax(dim=1) if config.score == "softmax" else logits_TE.sigmoid()
