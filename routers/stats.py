"""Statistics of a routing, each computed when it is accessed.

Legend: A hosts of the EP group, S ranks of the EP group, Q destination ranks, T tokens on this rank, E experts,
K experts per token, N pairs this rank sends.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.groups import EPGroup
from sonic_ep.kernels.route.topk.reference import topk_mask
from sonic_ep.routing import GroupCounts


class Traffic(NamedTuple):
    """Rows that this rank sends in a dispatch, by where they go: () int64. As many come back in its combine.

    to_ranks: distinct (token, other rank) rows. to_remote_ranks: the part of them that goes to other hosts, which
    crosses by all-to-all. to_remote_hosts: distinct (token, other host) rows, which is what crosses in two hops.
    max_hosts: the most hosts, this one included, that any token of this rank has experts on.

    A row has d values in the dtype of x.
    """

    to_ranks: Tensor
    to_remote_ranks: Tensor
    to_remote_hosts: Tensor
    max_hosts: Tensor

    @classmethod
    def of_needed(cls, is_needed_TQ: Tensor, group: EPGroup) -> "Traffic":
        """Returns the traffic of (T, Q) bool: whether token t of this rank has an expert on rank q."""
        hosts_S = group.host_layout.hosts_S
        here = [host == hosts_S[group.rank] for host in hosts_S]
        of_hosts = [[q for q, host in enumerate(hosts_S) if host == name] for name in group.host_layout.names]
        on_host_TA = torch.stack([is_needed_TQ[:, ranks].any(1) for ranks in of_hosts], 1)
        to_rank_Q, to_host_A = is_needed_TQ.sum(0), on_host_TA.sum(0)
        return cls(
            to_rank_Q.sum() - to_rank_Q[group.rank],
            to_rank_Q[[not is_here for is_here in here]].sum(),
            to_host_A.sum() - to_host_A[group.host_layout.names.index(hosts_S[group.rank])],
            on_host_TA.sum(1).max() if len(on_host_TA) else to_host_A.new_zeros(()),
        )

    @classmethod
    def of_topk(cls, topk_ids_TK: Tensor, E: int, group: EPGroup) -> "Traffic":
        """Returns the traffic of plain top-K."""
        return cls.of_needed(topk_mask(topk_ids_TK, E).view(-1, group.size, E // group.size).any(2), group)


class RoutingStats(NamedTuple):
    """Statistics of one forward, on the device; ratios in fp32. Each is computed on access. Reading one syncs the host.

    entropy_T: (T,) entropy, in nats, of each token's scores divided by their sum; NaN for a token with a NaN or
    infinite logit. token_ids_N: the tokens of this rank's pairs, see RoutedPairs. counts: see GroupCounts. `entropy`,
    `tokens_with_bad_logits`, `tokens_without_expert` and `traffic` are of this rank, all others of the whole EP group.
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

    def traffic(self, group: EPGroup) -> Traffic:
        """Returns which rows of this rank travel. group: the layer's, see `EPGroup.host_layout`.

        `Router.traffic` says how many would without group limits.
        """
        T, E = self.entropy_T.shape[0], self.counts.pairs_SE.shape[1]
        ends_E = self.counts.pairs_SE[group.rank].cumsum(0)
        places_N = torch.arange(self.token_ids_N.shape[0], device=ends_E.device)
        expert_ids_N = torch.searchsorted(ends_E, places_N, right=True).clamp(max=E - 1)
        # One more token, because the token -1 of a spare entry indexes the last one.
        is_needed_TQ = torch.zeros(T + 1, group.size, dtype=torch.bool, device=ends_E.device)
        is_needed_TQ[self.token_ids_N.long(), expert_ids_N // (E // group.size)] = True
        return Traffic.of_needed(is_needed_TQ[:T], group)

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
