"""The plan: from n[R, E], every offset of every rank. Pure integers, the same on all ranks, nothing to exchange.

Each rank owns E / ep_size consecutive experts and computes the rows of all sources for them in one *pair buffer*,
grouped by expert. Inside an expert, the full tiles of every source come first (a tile of one source can start when that
source has arrived), then the sources' tails:

    expert e:  | source 0: full tiles | source 1: full tiles | ... | tail of 0 | tail of 1 | ...

Example: 2 ranks, tile 128, one expert with n = [300, 130] -> heads 256 and 128, tails 44 and 2; source 1's head starts
at row 256, the tails at 384 and 428, and the expert has 430 rows.

Legend: S source ranks, Q owner ranks (both ep_size), E experts, e experts of one rank, P rows of one pair buffer.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from sonic_ep.kernels.tiles import TILE_ROWS


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

    def arrivals(self, owner: int, device: torch.device) -> "Arrivals":
        """Where the pairs that `owner` receives stand in its pair buffer. Needs the plan on the host for the sizes."""
        e = self.expert_starts_Qe.shape[1] - 1
        own = slice(owner * e, (owner + 1) * e)
        rows_C = self.rows_SE[:, own].reshape(-1)  # C: chunks (source, local expert), in arrival order
        pairs_C = self.pairs_SE[:, own].reshape(-1)
        num_rows, num_pairs = int(rows_C.sum()), int(pairs_C.sum())
        lists = [rows_C, pairs_C, self.head_rows_SE[:, own], self.head_starts_SE[:, own], self.tail_starts_SE[:, own]]
        rows_C, pairs_C, head_C, head_start_C, tail_start_C = torch.stack([v.reshape(-1) for v in lists]).to(device)
        chunk_P = torch.repeat_interleave(rows_C, output_size=num_rows)
        index_P = torch.arange(num_rows, device=device) - (rows_C.cumsum(0) - rows_C)[chunk_P]
        in_tail_P = index_P >= head_C[chunk_P]
        slot_P = index_P + torch.where(in_tail_P, (tail_start_C - head_C)[chunk_P], head_start_C[chunk_P])
        # A padding row repeats its chunk's last real pair: it reads a row that its own source has sent.
        pair_P = (pairs_C.cumsum(0) - pairs_C)[chunk_P] + torch.minimum(index_P, pairs_C[chunk_P] - 1)
        real_rows_V = torch.nonzero_static(index_P < pairs_C[chunk_P], size=num_pairs).flatten()
        slot_V = slot_P[real_rows_V]
        return Arrivals(slot_P=slot_P, pair_P=pair_P, slot_V=slot_V)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Received pairs in arrival order (source, expert, send order) against slots of the pair buffer. int64.

    slot_P: (P,) slot of each row, padding included, in arrival order. pair_P: (P,) the received pair it computes.
    slot_V: (V,) slot of each received (real) pair.
    """

    slot_P: Tensor
    pair_P: Tensor
    slot_V: Tensor
