"""The plan: from n[S, E], every offset of every rank. Pure integers, the same on all ranks, nothing to exchange.

Each rank owns E / ep_size consecutive experts and computes the rows of all sources for them in one *pair buffer*,
grouped by expert. Inside an expert, the full tiles of every source come first (a tile of one source can start when that
source has arrived), then the sources' tails:

    expert e:  | source 0: full tiles | source 1: full tiles | ... | tail of 0 | tail of 1 | ...

Example: 2 ranks, tile 128, one expert with n = [300, 130] -> heads 256 and 128, tails 44 and 2; source 1's head starts
at row 256, the tails at 384 and 428, and the expert has 430 rows.

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
    """Offsets of every chunk of every rank; int64, on the device of the counts.

    rows_SE, pairs_SE: rows and real pairs of each chunk (real ones first). head_rows_SE: rows in the chunk's full
    tiles.
    head_starts_SE, tail_starts_SE: where head and tail stand in the owner's pair buffer (exclusive prefix sums).
    expert_starts_Qe: (Q, e + 1) exclusive prefix sums of each owner's rows per expert; the last entry is P.
    pairs_SQ: real pairs that rank S sends to rank Q.
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
        """Plan a step. rows_SE, pairs_SE: (ep_size, E) int64, E a multiple of ep_size."""
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
        """What `rank` needs of it: the chunks that it receives, and how many pairs it sends."""
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
    """Returns one rank's part of the plan of these counts, both (S, E) int64."""
    return Plan.from_counts(rows_SE, pairs_SE, tile_rows).of_rank(rank)


def bounded_plan(plan: RankPlan, sizes: Tensor, tokens: int, rows: int, pairs: int) -> RankPlan:
    """The plan; unless the room holds it, nobody has a pair for anybody, chunks and experts are empty. Nothing waits.

    sizes: of `pack_split_sizes`, kernels/dispatch/split_sizes/reference.py, the same on every rank.
    """
    S = plan.pair_starts_Q.shape[0] - 1
    tokens_S, rows_SQ, pairs_SQ = sizes[: S + 2 * S * S].split((S, S * S, S * S))
    received_Q, pairs_SQ = rows_SQ.view(S, S).sum(0), pairs_SQ.view(S, S)
    holds = (tokens_S.max() == tokens) & (received_Q.max() <= rows)
    holds &= torch.maximum(pairs_SQ.sum(0).max(), pairs_SQ.sum(1).max()) <= pairs
    table_FC, starts_e, pairs_SQ = (values * holds for values in (plan.table_FC, plan.expert_starts_e, plan.pairs_SQ))
    return plan._replace(table_FC=table_FC, expert_starts_e=starts_e, pairs_SQ=pairs_SQ)
