"""The owner's index lists in plain torch: received pairs against the rows of the pair buffer and the received rows.

Pairs arrive by *chunk* (source rank, local expert), inside a chunk by received row, ascending; a source numbers the
rows that it sends from 0. The pair buffer holds each chunk in two pieces, full tiles and tail, at places that the plan
knows. This is the CPU path, and the oracle of kernels/dispatch/recv_index/triton.py.

Example: one source, tile 4, expert 0 with rows [0, 2, 3, 5, 6], expert 1 with [2] ->
    slot_V [0, 1, 2, 3, 4, 5], row_of_pair_P [0, 2, 3, 5, 6, 2], and by row (0: 0) (2: 1, 5) (3: 2) (5: 3) (6: 4):
    pairs_by_row_V [0, 1, 5, 2, 3, 4], pair_starts_R [0, 1, 1, 3, 4, 4, 5, 6].

Legend: S ranks of the EP group, e local experts, C chunks (source rank, local expert), F fields of a table, V pairs
this rank receives, P rows of the pair buffer, R rows this rank receives.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.routing import INDEX_DTYPE


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks that one rank receives, and where they stand in its pair buffer.

    table_FC: (6, C) int32: rows; pairs (the real ones, which come first; a chunk with rows has at least one); rows in
    full tiles; the slots of the first row in a full tile and of the first one after; and the first pair, in arrival
    order.
    expert_starts_e: (e + 1,) int32 exclusive prefix sums of pair-buffer rows per expert.
    """

    table_FC: Tensor
    expert_starts_e: Tensor
    num_sources: int
    num_rows: int  # P; the GPU's lists may have room to spare behind it
    num_pairs: int  # V; likewise
    zeroed: bool = False  # is that room zero: harmless to whoever reads row 0 with weight 0

    @property
    def num_experts(self) -> int:
        """e."""
        return self.expert_starts_e.shape[0] - 1


class RankPlan(NamedTuple):
    """What one rank needs of a plan, int32. table_FC, expert_starts_e: see Chunks.

    pair_starts_Q: (Q + 1,), the first pair that it sends to each owner, and how many it sends. pairs_SQ: (S * Q,), the
    pairs that each rank sends to each owner, the same on all ranks.
    """

    table_FC: Tensor
    expert_starts_e: Tensor
    pair_starts_Q: Tensor
    pairs_SQ: Tensor

    def chunks(self, num_rows: int, num_pairs: int, *, zeroed: bool = False) -> Chunks:
        """The chunks that it receives, with lists of these sizes."""
        num_sources = self.pair_starts_Q.shape[0] - 1
        return Chunks(self.table_FC, self.expert_starts_e, num_sources, num_rows, num_pairs, zeroed)


@dataclass(frozen=True, slots=True)
class PairBuffer:
    """What every row of the pair buffer computes, and where its pairs stand. Index lists are int32.

    row_of_pair_P: received row; padding repeats its chunk's last real pair. weights_P: weight, zero on padding.
    slot_V: pair-buffer row of each received pair, in arrival order. pairs_by_row_V, pair_starts_R: real pairs grouped
    by received row, ascending, and (R + 1) exclusive prefix sums.
    """

    row_of_pair_P: Tensor
    weights_P: Tensor
    slot_V: Tensor
    pairs_by_row_V: Tensor
    pair_starts_R: Tensor


def row_starts(chunks: Chunks, row_in_source_V: Tensor) -> Tensor:
    """(S + 1,) int32: the first received row of each source, and R. Rows are dense, so the largest of a source tells.

    row_in_source_V: (V,) int32, the row that each received pair computes on, by its source's count.
    """
    rows_S = row_in_source_V.new_zeros(chunks.num_sources)
    rows_S.scatter_reduce_(0, _source_of_pair(chunks), row_in_source_V + 1, reduce="amax")
    return torch.nn.functional.pad(rows_S.cumsum(0), (1, 0)).to(INDEX_DTYPE)


def pair_lists(
    chunks: Chunks, row_in_source_V: Tensor, weights_V: Tensor, row_starts_S: Tensor | None, num_rows: int
) -> PairBuffer:
    """The lists of a pair buffer from what was received.

    Shapes:  row_in_source_V (V,) int32 and weights_V (V,), any floating dtype, in arrival order; row_starts_S of
             `row_starts`, or None for a single source; num_rows is R.
    """
    rows_C, pairs_C, tiled_C, tiles_C, tail_C, first_pair_C = chunks.table_FC.long().unbind()
    device = weights_V.device
    chunk_P = torch.repeat_interleave(rows_C, output_size=chunks.num_rows)
    index_P = torch.arange(chunks.num_rows, device=device) - (rows_C.cumsum(0) - rows_C)[chunk_P]
    slot_P = index_P + torch.where(index_P < tiled_C[chunk_P], tiles_C[chunk_P], (tail_C - tiled_C)[chunk_P])
    # A padding row repeats a pair of its own chunk: it reads a row that its own source has sent.
    pair_P = first_pair_C[chunk_P] + torch.minimum(index_P, pairs_C[chunk_P] - 1)
    slot_V = slot_P[torch.nonzero_static(index_P < pairs_C[chunk_P], size=chunks.num_pairs).flatten()]
    row_V = row_in_source_V.long()
    if row_starts_S is not None:
        row_V = row_V + row_starts_S[_source_of_pair(chunks)]
    row_of_pair_P = torch.empty_like(slot_P, dtype=INDEX_DTYPE)
    row_of_pair_P[slot_P] = row_V[pair_P].to(INDEX_DTYPE)
    weights_P = weights_V.new_zeros(chunks.num_rows)
    weights_P[slot_V] = weights_V
    # A row's pairs arrive by expert, which is their order in the pair buffer too.
    sorted_rows_V, order_V = row_V.sort(stable=True)
    pair_starts_R = torch.searchsorted(sorted_rows_V, torch.arange(num_rows + 1, device=device))
    lists = (slot_V, slot_V[order_V], pair_starts_R)
    return PairBuffer(row_of_pair_P, weights_P, *(values.to(INDEX_DTYPE) for values in lists))


def _source_of_pair(chunks: Chunks) -> Tensor:
    pairs_S = chunks.table_FC[1].long().view(chunks.num_sources, chunks.num_experts).sum(1)
    return torch.repeat_interleave(pairs_S, output_size=chunks.num_pairs)
