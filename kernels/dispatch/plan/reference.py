"""The plan: every offset of every rank, computed from the rounded counts n[S, E] by every rank, without an exchange.

All numbers are integers, the same on every rank. Each rank has E / ep_size consecutive experts. It computes the rows of
all sources for them in one *pair buffer*, which is grouped by expert. A *chunk* is the rows of one source for one
expert. The *head* of a chunk is its full tiles, the *tail* is the rest. Inside an expert, the heads of all sources come
first, then the tails. So a tile of a head needs only one source, and can start when that source has arrived:

    expert e:  | head of source 0 | head of source 1 | ... | tail of 0 | tail of 1 | ...

Example: 2 ranks, tile 128, one expert with n = [300, 130]. The heads have 256 and 128 rows, the tails 44 and 2. Source
1's head starts at row 256, the tails start at 384 and 428, and the expert has 430 rows.

Legend: S ranks of the EP group, Q destination ranks, E experts, e local experts, P rows of the pair buffer.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.kernels.experts.tile_table import TILE_ROWS
from sonic_ep.routing import INDEX_DTYPE


@dataclass(frozen=True, slots=True)
class Plan:
    """The offsets of every chunk of every rank. All tensors are int64, on the device of the counts.

    rows_SE, pairs_SE: (S, E) rows and real pairs of each chunk. Real pairs come first, then padding rows.
    head_rows_SE: (S, E) rows in the full tiles of each chunk.
    head_starts_SE, tail_starts_SE: (S, E) the first row of each head and tail in the destination rank's pair buffer.
    expert_starts_Qe: (Q, e + 1) exclusive prefix sums of each destination rank's rows per expert. The last entry is P.
    pairs_SQ: (S, Q) real pairs from each rank to each destination rank.
    """

    rows_SE: Tensor
    pairs_SE: Tensor
    head_rows_SE: Tensor
    head_starts_SE: Tensor
    tail_starts_SE: Tensor
    expert_starts_Qe: Tensor
    pairs_SQ: Tensor

    @classmethod
    def from_counts(cls, rows_SE: Tensor, pairs_SE: Tensor, tile_rows: int = TILE_ROWS) -> Self:
        """Returns the plan of a step.

        Shapes:  rows_SE and pairs_SE (S, E) int64, E a multiple of S.
        Example: 2 ranks, one expert each, tile 4.

            >>> import torch
            >>> from sonic_ep.kernels.dispatch.plan.reference import Plan
            >>> rows = torch.tensor([[5, 4], [6, 3]])
            >>> plan = Plan.from_counts(rows, rows, tile_rows=4)
            >>> plan.head_starts_SE.tolist(), plan.tail_starts_SE.tolist(), plan.expert_starts_Qe.tolist()
            ([[0, 0], [4, 4]], [[8, 4], [9, 4]], [[0, 11], [0, 7]])
        """
        S, E = rows_SE.shape
        head_SE = rows_SE // tile_rows * tile_rows
        tail_SE = rows_SE - head_SE
        total_Qe = rows_SE.sum(0).view(S, E // S)
        expert_starts_Qe = torch.nn.functional.pad(total_Qe.cumsum(1), (1, 0))
        base_E = expert_starts_Qe[:, :-1].reshape(E)
        head_starts_SE = base_E + head_SE.cumsum(0) - head_SE
        tail_starts_SE = base_E + head_SE.sum(0) + tail_SE.cumsum(0) - tail_SE
        pairs_SQ = pairs_SE.view(S, S, E // S).sum(2)
        return cls(rows_SE, pairs_SE, head_SE, head_starts_SE, tail_starts_SE, expert_starts_Qe, pairs_SQ)

    def of_rank(self, rank: int) -> RankPlan:
        """Returns the part that `rank` needs: the chunks that it receives, and the pairs that it sends."""
        S, e = self.rows_SE.shape[0], self.expert_starts_Qe.shape[1] - 1
        own = slice(rank * e, (rank + 1) * e)
        lists = (self.rows_SE, self.pairs_SE, self.head_rows_SE, self.head_starts_SE, self.tail_starts_SE)
        table = torch.stack([values[:, own] for values in lists]).view(len(lists), S * e)
        first_pair_C = table[1].cumsum(0) - table[1]
        return RankPlan(
            table_FC=torch.cat([table, first_pair_C[None]]).to(INDEX_DTYPE),
            expert_starts_e=self.expert_starts_Qe[rank].to(INDEX_DTYPE),
            pair_starts_Q=torch.nn.functional.pad(self.pairs_SQ[rank].cumsum(0), (1, 0)).to(INDEX_DTYPE),
            pairs_SQ=self.pairs_SQ.flatten().to(INDEX_DTYPE),
        )


def rank_plan(rows_SE: Tensor, pairs_SE: Tensor, rank: int, tile_rows: int) -> RankPlan:
    """Returns one rank's part of the plan of these counts.

    Shapes:  rows_SE and pairs_SE (S, E) int64, E a multiple of S. The result is int32.
    Example: 2 ranks, one expert each, tile 4. Rank 0 receives 5 rows from rank 0, and 6 from rank 1, of which 5 are
    pairs.

        >>> import torch
        >>> from sonic_ep.kernels.dispatch.plan.reference import rank_plan
        >>> plan = rank_plan(torch.tensor([[5, 4], [6, 3]]), torch.tensor([[5, 4], [5, 3]]), rank=0, tile_rows=4)
        >>> plan.table_FC.tolist()  # rows, pairs, head rows, head starts, tail starts, first pairs
        [[5, 6], [5, 5], [4, 4], [0, 4], [8, 9], [0, 5]]
        >>> plan.expert_starts_e.tolist(), plan.pair_starts_Q.tolist(), plan.pairs_SQ.tolist()
        ([0, 11], [0, 5, 9], [5, 4, 5, 3])
    """
    return Plan.from_counts(rows_SE, pairs_SE, tile_rows).of_rank(rank)


def bounded_plan(plan: RankPlan, sizes: Tensor, tokens: int, rows: int, pairs: int, least: int = 0) -> RankPlan:
    """Returns the plan if the step fits the size bound. Otherwise returns it without rows and pairs, on every rank.

    A bounded launch uses it: if the bound was too small, no rank sends or waits. The device decides, so the host
    does not wait either. pair_starts_Q stays as it is.

    The step fits if the most tokens of any rank, or `least` if that is more, equal `tokens`, no rank receives more than
    `rows` rows, and none sends or receives more than `pairs` pairs.

    sizes:   of `pack_split_sizes` (kernels/dispatch/split_sizes/reference.py), the same on every rank.
    Example: 2 ranks with 4 tokens each. Rank 0 receives 11 rows.

        >>> import torch
        >>> from sonic_ep.kernels.dispatch.plan.reference import bounded_plan, rank_plan
        >>> from sonic_ep.kernels.dispatch.split_sizes.reference import pack_split_sizes
        >>> rows = torch.tensor([[5, 4], [6, 3]])
        >>> plan, sizes = rank_plan(rows, rows, 0, 4), pack_split_sizes(torch.tensor([4, 4]), rows, rows, None)
        >>> [bounded_plan(plan, sizes, 4, bound, 16).expert_starts_e.tolist() for bound in (11, 10)]
        [[0, 11], [0, 0]]
    """
    S = plan.pair_starts_Q.shape[0] - 1
    tokens_S, rows_SQ, pairs_SQ = sizes[: S + 2 * S * S].split((S, S * S, S * S))
    received_Q, pairs_SQ = rows_SQ.view(S, S).sum(0), pairs_SQ.view(S, S)
    holds = (tokens_S.max().clamp(min=least) == tokens) & (received_Q.max() <= rows)
    holds &= torch.maximum(pairs_SQ.sum(0).max(), pairs_SQ.sum(1).max()) <= pairs
    table_FC, starts_e, pairs_SQ = (values * holds for values in (plan.table_FC, plan.expert_starts_e, plan.pairs_SQ))
    return plan._replace(table_FC=table_FC, expert_starts_e=starts_e, pairs_SQ=pairs_SQ)
