"""What a user watches of the routing: figures that are worked out when somebody looks at them.

Legend: S ranks of the EP group, T tokens on this rank, E experts, N listed pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sonic_ep.routing import Counts


@dataclass(frozen=True, slots=True)
class RoutingStats:
    """Figures of one forward, on the device: none is made before it is asked for but the first two, and the host waits
    only where it reads one.

    tokens_without_expert: () int64, this rank's tokens that no expert sees. entropy: () mean over this rank's tokens of
    the entropy of their scores as a distribution, in nats. counts: see Counts; whole EP group, like all that follows.
    """

    tokens_without_expert: Tensor
    entropy: Tensor
    counts: Counts

    @property
    def changed_share(self) -> Tensor:
        """() pairs dropped or added by rounding and capacity, over plain top-K's pairs."""
        return (self.counts.pairs_SE - self.counts.chosen_SE).abs().sum() / self._chosen()

    @property
    def capacity_cut_share(self) -> Tensor:
        """() pairs that capacity took away, over plain top-K's pairs."""
        return self.counts.cut_S.sum() / self._chosen()

    @property
    def pad_share(self) -> Tensor:
        """() padding rows over all rows."""
        rows_SE = self.counts.rows_SE
        return (rows_SE - self.counts.pairs_SE).sum() / rows_SE.sum().clamp(min=1)

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


def routing_stats(scores_TE: Tensor, token_ids_N: Tensor, counts: Counts) -> RoutingStats:
    """Figures of one routing; see RoutingStats."""
    without = _tokens_without_expert(token_ids_N, scores_TE.shape[0])
    return RoutingStats(without, _mean_entropy(scores_TE.detach()), counts)


def _max_over_mean(values: Tensor) -> Tensor:
    return values.max() * values.numel() / values.sum().clamp(min=1)


def _tokens_without_expert(token_ids_N: Tensor, T: int) -> Tensor:
    # Behind the tokens, where the -1 of a spare entry ends up.
    has_expert_T = torch.zeros(T + 1, dtype=torch.bool, device=token_ids_N.device)
    has_expert_T.index_fill_(0, token_ids_N.long(), True)
    return T - has_expert_T[:T].sum()


def _mean_entropy(scores_TE: Tensor) -> Tensor:
    shares_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + 1e-20)
    return torch.special.entr(shares_TE).sum() / max(scores_TE.shape[0], 1)
