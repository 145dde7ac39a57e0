"""Scores and the top-K choice by unique keys, in plain torch: the CPU path, and the twin of triton.py beside it.

No two candidates ever tie, so every device and every rank chooses alike. A key is one int64: one bit for an allowed
expert, then the score as an order-preserving 32-bit integer, then the id, reversed so that the smaller id wins. float64
scores are ordered by their float32 value, then by id. NaN ranks below -inf.

Legend: T tokens on this rank, E experts, K experts per token, g expert groups.
"""

import torch
from torch import Tensor

from sonic_ep.config import RouterConfig

_EXPERT_BITS = 12  # E <= 4096


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


def topk_mask(topk_ids_TK: Tensor, E: int) -> Tensor:
    """(T, E) bool: did token T choose expert E?"""
    mask_TE = torch.zeros(topk_ids_TK.shape[0], E, dtype=torch.bool, device=topk_ids_TK.device)
    return mask_TE.scatter_(1, topk_ids_TK, True)


def experts_of_best_groups(ranking_TE: Tensor, config: RouterConfig) -> Tensor:
    """Returns (T, E) bool: the experts of each token's best groups, by the sum of a group's two best rankings."""
    T, E = ranking_TE.shape
    per_group = E // config.num_groups
    scores_Tg = ranking_TE.view(T, config.num_groups, per_group).topk(2, dim=2).values.sum(2)
    groups = top_experts(scores_Tg, None, config.groups_per_token)
    return topk_mask(groups, config.num_groups).repeat_interleave(per_group, dim=1)


def times_chosen(topk_ids_TK: Tensor, E: int) -> Tensor:
    """(E,) int64: how many tokens chose each expert."""
    ids = topk_ids_TK.flatten()
    return torch.zeros(E, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))


def scores_of(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """Scores in the dtype of the logits: softmax over the experts, or sigmoid."""
    return logits_TE.softmax(dim=1) if config.score == "softmax" else logits_TE.sigmoid()
