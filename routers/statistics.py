"""What a user watches of the routing: cheap figures, from integers that every rank already has.

Legend: S ranks of the EP group, T tokens on this rank, E experts, N pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sonic_ep.routing import Counts


@dataclass(frozen=True, slots=True)
class RoutingStats:
    """Figures of one forward. No host sync is needed to make them; reading those on a GPU is one.

    changed_share: pairs dropped or added by rounding and capacity, over plain top-K's pairs, whole EP group (CPU).
    capacity_cut_share: pairs that capacity took away, over the same (CPU). pad_share: padding rows over all rows (CPU).
    tokens_without_expert: () int64, this rank's tokens that no expert sees (device).
    rank_load_max_over_mean: rows computed by the fullest rank over the mean (CPU). expert_load_max_over_mean: the same
    of the plain top-K counts of experts (CPU). entropy: () mean over this rank's tokens of the entropy of their scores
    as a distribution, in nats (device). counts_E: (E,) int64 plain top-K counts, whole EP group (CPU). t: ()
    int64 chunk multiple (CPU).
    """

    changed_share: Tensor
    capacity_cut_share: Tensor
    pad_share: Tensor
    tokens_without_expert: Tensor
    rank_load_max_over_mean: Tensor
    expert_load_max_over_mean: Tensor
    entropy: Tensor
    counts_E: Tensor
    t: Tensor


def routing_stats(scores_TE: Tensor, token_ids_N: Tensor, counts: Counts) -> RoutingStats:
    """Figures of one routing; see RoutingStats."""
    S, E = counts.chosen_SE.shape
    chosen = counts.chosen_SE.sum().clamp(min=1)
    rows_S = counts.rows_SE.sum(0).view(S, E // S).sum(1)
    counts_E = counts.chosen_SE.sum(0)
    return RoutingStats(
        changed_share=(counts.pairs_SE - counts.chosen_SE).abs().sum() / chosen,
        capacity_cut_share=counts.cut_S.sum() / chosen,
        pad_share=(counts.rows_SE - counts.pairs_SE).sum() / counts.rows_SE.sum().clamp(min=1),
        tokens_without_expert=_tokens_without_expert(token_ids_N, scores_TE.shape[0]),
        rank_load_max_over_mean=_max_over_mean(rows_S),
        expert_load_max_over_mean=_max_over_mean(counts_E),
        entropy=_mean_entropy(scores_TE.detach()),
        counts_E=counts_E,
        t=counts.t,
    )


def _max_over_mean(values: Tensor) -> Tensor:
    return values.max() * values.numel() / values.sum().clamp(min=1)


def _tokens_without_expert(token_ids_N: Tensor, T: int) -> Tensor:
    has_expert_T = torch.zeros(T, dtype=torch.bool, device=token_ids_N.device)
    has_expert_T.index_fill_(0, token_ids_N.long(), True)
    return T - has_expert_T.sum()


def _mean_entropy(scores_TE: Tensor) -> Tensor:
    shares_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + 1e-20)
    return torch.special.entr(shares_TE).sum() / max(scores_TE.shape[0], 1)
