"""What a user watches of the routing: figures that are worked out when somebody looks at them.

Legend: S ranks of the EP group, T tokens on this rank, E experts, N pairs this rank sends.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.routing import GroupCounts


class RoutingStats(NamedTuple):
    """Figures of one forward, on the device, ratios in fp32. Each is worked out when it is asked for; the host waits if
    it reads one.

    entropy_T: (T,) entropy of the scores of each of this rank's tokens as a distribution, in nats. token_ids_N: the
    tokens of this rank's pairs, see Selection. counts: see Counts; whole EP group, like all figures but the first two.
    """

    entropy_T: Tensor
    token_ids_N: Tensor
    counts: GroupCounts

    @property
    def entropy(self) -> Tensor:
        """() mean over this rank's tokens, 0 without any."""
        return self.entropy_T.sum() / max(self.entropy_T.shape[0], 1)

    @property
    def tokens_without_expert(self) -> Tensor:
        """() int64, this rank's tokens that no expert sees."""
        T = self.entropy_T.shape[0]
        # One more, where the -1 of a spare entry ends up.
        has_expert_T = torch.zeros(T + 1, dtype=torch.bool, device=self.token_ids_N.device)
        has_expert_T.index_fill_(0, self.token_ids_N.long(), True)
        return T - has_expert_T[:T].sum()

    @property
    def changed_share(self) -> Tensor:
        """() pairs dropped or added by rounding and capacity, over plain top-K's pairs."""
        return (self.counts.pairs_SE - self.counts.chosen_SE).abs().sum().float() / self._chosen()

    @property
    def capacity_cut_share(self) -> Tensor:
        """() pairs that capacity took away, over plain top-K's pairs."""
        return self.counts.cut_S.sum().float() / self._chosen()

    @property
    def pad_share(self) -> Tensor:
        """() padding rows over all rows."""
        rows_SE = self.counts.rows_SE
        return (rows_SE - self.counts.pairs_SE).sum().float() / rows_SE.sum().clamp(min=1)

    @property
    def rank_load_max_over_mean(self) -> Tensor:
        """() rows computed by the fullest rank over the mean."""
        S, E = self.counts.rows_SE.shape
        return _max_over_mean(self.counts.rows_SE.sum(0).view(S, E // S).sum(1))

    @property
    def expert_load_max_over_mean(self) -> Tensor:
        """() the same of the plain top-K counts of experts."""
        return _max_over_mean(self.counts_E)

    @property
    def counts_E(self) -> Tensor:
        """(E,) int64 plain top-K counts."""
        return self.counts.chosen_SE.sum(0)

    @property
    def t(self) -> Tensor:
        """() int64 chunk multiple."""
        return self.counts.t

    def _chosen(self) -> Tensor:
        return self.counts.chosen_SE.sum().clamp(min=1)


def _max_over_mean(values: Tensor) -> Tensor:
    return values.max().float() * values.numel() / values.sum().clamp(min=1)
