"""The destination rank's index lists in plain torch: where received pairs are in the pair buffer, and by received row.

Pairs arrive by *chunk* (source rank, local expert), and in a chunk by received row, ascending. A source numbers the
rows that it sends to this rank from 0. The pair buffer holds each chunk in two pieces, its full tiles (the head) and
the rest (the tail), at offsets of the plan. This is the CPU path, and the oracle of
kernels/dispatch/recv_index/triton.py.

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
    """The chunks that one rank receives, and where they are in its pair buffer.

    By source, then by expert. Sources may be in any order; received rows are in the same one, pairs in rank order.
    table_FC: (6, C) int32. For each chunk:
        0  rows
        1  real pairs, which come first; at least one in a chunk with rows
        2  rows of the head, the full tiles
        3  the pair-buffer row of the first row of the head
        4  the pair-buffer row of the first row of the tail, the rest
        5  the first pair, in arrival order
    expert_starts_e: (e + 1,) int32 exclusive prefix sums of pair-buffer rows per expert.
    num_sources: S.
    num_rows, num_pairs: Lengths of the lists: P and V, or more on a GPU, where lists may have spare capacity at the
    end. zeroed: Whether the kernels zero that spare capacity. A reader of it then reads row 0 with weight 0. Sources
    are then in rank order.
    """

    table_FC: Tensor
    expert_starts_e: Tensor
    num_sources: int
    num_rows: int
    num_pairs: int
    zeroed: bool = False

    @property
    def num_experts(self) -> int:
        """e."""
        return self.expert_starts_e.shape[0] - 1


class RankPlan(NamedTuple):
    """The part of a plan that one rank needs. All tensors are int32.

    table_FC, expert_starts_e: See Chunks.
    pair_starts_Q: (Q + 1,) the first pair that this rank sends to each destination rank, and the number that it sends.
    pairs_SQ: (S * Q,) the pairs from each rank to each destination rank, the same on all ranks.
    """

    table_FC: Tensor
    expert_starts_e: Tensor
    pair_starts_Q: Tensor
    pairs_SQ: Tensor

    def chunks(self, num_rows: int, num_pairs: int, *, zeroed: bool = False) -> Chunks:
        """Returns the chunks that this rank receives, for lists of these lengths."""
        num_sources = self.pair_starts_Q.shape[0] - 1
        return Chunks(self.table_FC, self.expert_starts_e, num_sources, num_rows, num_pairs, zeroed)


@dataclass(frozen=True, slots=True)
class PairBuffer:
    """The index lists of the pair buffer. Index lists are int32.

    row_of_pair_P: (P,) the received row of each pair-buffer row. A padding row repeats its chunk's last real pair.
    weights_P: (P,) the combine weight of each pair-buffer row, zero on padding rows.
    slot_V: (V,) the pair-buffer row of each received pair, in arrival order.
    pairs_by_row_V: (V,) the pair-buffer rows of real pairs, sorted by received row, then ascending.
    pair_starts_R: (R + 1,) exclusive prefix sums of the pairs per received row, into pairs_by_row_V.
    """

    row_of_pair_P: Tensor
    weights_P: Tensor
    slot_V: Tensor
    pairs_by_row_V: Tensor
    pair_starts_R: Tensor


def row_starts(chunks: Chunks, row_in_source_V: Tensor) -> Tensor:
    """Returns (S + 1,) int32: the first received row of each source, and R.

    A source numbers its rows without gaps, so the number of its rows is the largest row + 1.

    Shapes:  row_in_source_V (V,) int32, the row of each received pair in its source's numbering.
    Example: 2 sources with one expert. Source 0 sends rows 0, 1 and 2, source 1 sends rows 0 and 1.

        >>> import torch
        >>> from sonic_ep.kernels.dispatch.plan.reference import rank_plan
        >>> from sonic_ep.kernels.dispatch.recv_index.reference import row_starts
        >>> counts = torch.tensor([[3, 0], [2, 0]])
        >>> chunks = rank_plan(counts, counts, rank=0, tile_rows=4).chunks(num_rows=5, num_pairs=5)
        >>> row_starts(chunks, torch.tensor([0, 1, 2, 0, 1], dtype=torch.int32)).tolist()
        [0, 3, 5]
    """
    rows_S = row_in_source_V.new_zeros(chunks.num_sources)
    rows_S.scatter_reduce_(0, _source_of_pair(chunks), row_in_source_V + 1, reduce="amax")
    return torch.nn.functional.pad(rows_S.cumsum(0), (1, 0)).to(INDEX_DTYPE)


def pair_lists(
    chunks: Chunks, row_in_source_V: Tensor, weights_V: Tensor, row_starts_S: Tensor | None, num_rows: int
) -> PairBuffer:
    """Returns the lists of the pair buffer from what was received.

    Shapes:  row_in_source_V (V,) int32 and weights_V (V,) of any floating dtype, in arrival order. row_starts_S of
             `row_starts`, or of the regions of the sources, (S + 1,); None for a single source. num_rows is R.
    Example: the module's, with a padding row for expert 1.

        >>> import torch
        >>> from sonic_ep.kernels.dispatch.plan.reference import rank_plan
        >>> from sonic_ep.kernels.dispatch.recv_index.reference import pair_lists
        >>> plan = rank_plan(torch.tensor([[5, 2]]), torch.tensor([[5, 1]]), rank=0, tile_rows=4)
        >>> rows, weights = torch.tensor([0, 2, 3, 5, 6, 2], dtype=torch.int32), torch.ones(6)
        >>> lists = pair_lists(plan.chunks(num_rows=7, num_pairs=6), rows, weights, None, 7)
        >>> lists.row_of_pair_P.tolist(), lists.weights_P.tolist(), lists.slot_V.tolist()
        ([0, 2, 3, 5, 6, 2, 2], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0], [0, 1, 2, 3, 4, 5])
        >>> lists.pairs_by_row_V.tolist(), lists.pair_starts_R.tolist()
        ([0, 1, 5, 2, 3, 4], [0, 1, 1, 3, 4, 4, 5, 6])
    """
    rows_C, pairs_C, head_rows_C, head_starts_C, tail_starts_C, first_pair_C = chunks.table_FC.long().unbind()
    device = weights_V.device
    chunk_P = torch.repeat_interleave(rows_C, output_size=chunks.num_rows)
    index_P = torch.arange(chunks.num_rows, device=device) - (rows_C.cumsum(0) - rows_C)[chunk_P]
    in_head_P, before_tail_C = index_P < head_rows_C[chunk_P], tail_starts_C - head_rows_C
    slot_P = index_P + torch.where(in_head_P, head_starts_C[chunk_P], before_tail_C[chunk_P])
    # A padding row repeats a pair of its chunk, so it reads a row that its own source has sent.
    pair_P = first_pair_C[chunk_P] + torch.minimum(index_P, pairs_C[chunk_P] - 1)
    real_V = torch.nonzero_static(index_P < pairs_C[chunk_P], size=chunks.num_pairs).flatten()
    slot_V = torch.empty_like(real_V).index_put_((pair_P[real_V],), slot_P[real_V])
    row_V = row_in_source_V.long()
    if row_starts_S is not None:
        row_V = row_V + row_starts_S[_source_of_pair(chunks)]
    row_of_pair_P = torch.empty_like(slot_P, dtype=INDEX_DTYPE)
    row_of_pair_P[slot_P] = row_V[pair_P].to(INDEX_DTYPE)
    weights_P = weights_V.new_zeros(chunks.num_rows)
    weights_P[slot_V] = weights_V
    # The pairs of a row arrive by expert, which is also their order in the pair buffer.
    sorted_rows_V, order_V = row_V.sort(stable=True)
    pair_starts_R = torch.searchsorted(sorted_rows_V, torch.arange(num_rows + 1, device=device))
    lists = (slot_V, slot_V[order_V], pair_starts_R)
    return PairBuffer(row_of_pair_P, weights_P, *(values.to(INDEX_DTYPE) for values in lists))


def _source_of_pair(chunks: Chunks) -> Tensor:
    _, pairs_C, *_, first_pair_C = chunks.table_FC.long().unbind()
    by_pair_C = first_pair_C.argsort(stable=True)  # a chunk without pairs has the first pair of the next one
    return torch.repeat_interleave(by_pair_C, pairs_C[by_pair_C], output_size=chunks.num_pairs) // chunks.num_experts
