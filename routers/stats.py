"""Statistics of a routing, each computed when it is accessed.

Legend: S ranks of the EP group, T tokens on this rank, E experts, N pairs this rank sends.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.routing import GroupCounts


class RoutingStats(NamedTuple):
    """Statistics of one forward, on the device; ratios in fp32. Each is computed on access. Reading one syncs the host.

    entropy_T: (T,) entropy, in nats, of each token's scores divided by their sum; NaN for a token with a NaN or
    infinite logit. token_ids_N: the tokens of this rank's pairs, see RoutedPairs. counts: see GroupCounts. `entropy`,
    `tokens_with_bad_logits` and `tokens_without_expert` are of this rank, all others of the whole EP group.
    """

    entropy_T: Tensor
    token_ids_N: Tensor
    counts: GroupCounts

    @property
    def entropy(self) -> Tensor:
        """() mean of entropy_T; 0 if T = 0."""
        return self.entropy_T.sum() / max(self.entropy_T.shape[0], 1)

    @property
    def tokens_with_bad_logits(self) -> Tensor:
        """() int64, the number of this rank's tokens with a NaN or infinite logit, as a NaN in x makes them.

        `router.check_logits` raises for them instead, on every rank.
        """
        return self.entropy_T.isnan().sum()

    @property
    def tokens_without_expert(self) -> Tensor:
        """() int64, the number of this rank's tokens that have no pair."""
        T = self.entropy_T.shape[0]
        # One more entry, because the token -1 of a spare entry indexes the last one.
        has_expert_T = torch.zeros(T + 1, dtype=torch.bool, device=self.token_ids_N.device)
        has_expert_T.index_fill_(0, self.token_ids_N.long(), True)
        return T - has_expert_T[:T].sum()

    @property
    def changed_share(self) -> Tensor:
        """() pairs that rounding and capacity dropped or added, divided by the pairs of plain top-K."""
        return (self.counts.pairs_SE - self.counts.chosen_SE).abs().sum().float() / self._chosen()

    @property
    def capacity_cut_share(self) -> Tensor:
        """() pairs that capacity removed, divided by the pairs of plain top-K."""
        return self.counts.cut_S.sum().float() / self._chosen()

    @property
    def pad_share(self) -> Tensor:
        """() padding rows divided by all rows."""
        rows_SE = self.counts.rows_SE
        return (rows_SE - self.counts.pairs_SE).sum().float() / rows_SE.sum().clamp(min=1)

    @property
    def rank_load_max_over_mean(self) -> Tensor:
        """() the most rows of any destination rank, divided by the mean."""
        S, E = self.counts.rows_SE.shape
        return _max_over_mean(self.counts.rows_SE.sum(0).view(S, E // S).sum(1))

    @property
    def expert_load_max_over_mean(self) -> Tensor:
        """() the largest plain top-K count of any expert, divided by the mean."""
        return _max_over_mean(self.counts_E)

    @property
    def counts_E(self) -> Tensor:
        """(E,) int64 plain top-K counts."""
        return self.counts.chosen_SE.sum(0)

    @property
    def t(self) -> Tensor:
        """() int64, the row multiple of a chunk."""
        return self.counts.t

    def _chosen(self) -> Tensor:
        return self.counts.chosen_SE.sum().clamp(min=1)


def _max_over_mean(values: Tensor) -> Tensor:
    return values.max().float() * values.numel() / values.sum().clamp(min=1)
