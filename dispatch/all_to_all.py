"""The transport over any torch.distributed backend: dropless all-to-all of distinct rows.

Forward needs three all-to-alls: index lists with weights (their sizes follow from the plan), rows out, rows back.
Backward sends dO out and dX and dS back, and x out again unless `save_dispatched` is set. A source numbers the rows
that it sends to a destination rank from 0, so the largest index in the lists says how many rows will arrive. In a
forward the host waits twice: for the plan's sizes, then for the numbers of rows that this rank sends and receives.

Legend: T tokens on this rank, H hidden size, N pairs this rank sends, U rows this rank sends, S ranks of the EP group,
R rows this rank receives, V pairs this rank receives, P rows of the pair buffer, e local experts.
"""

from typing import final

import torch
from torch import Tensor

from sonic_ep.dispatch.protocol import DispatchHandle, Pending, PreparedDispatch, Splits
from sonic_ep.dispatch.row_exchange import CollectiveTransport
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import (
    allows_spare_capacity,
    gather_rows,
    gather_sum,
    pair_lists,
    row_starts,
    sent_rows,
    token_lists,
)
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.routing import Routing


@final
class AllToAllTransport(CollectiveTransport):
    """Variable-size all-to-all over `group`."""

    def __init__(self, group: EPGroup, *, batch_invariant: bool = False) -> None:
        super().__init__(group, "all-to-all", batch_invariant=batch_invariant)

    def prepare(self, routing: Routing, plan: RankPlan, x_TH: Tensor | None = None) -> PreparedDispatch:
        sent, rank, given = None, self.group.rank, (plan.pair_starts_Q, routing.num_tokens)
        if allows_spare_capacity(routing.token_ids_N):
            sent = sent_rows(routing.token_ids_N, *given)  # while the sizes arrive
        sizes = self._sizes(routing, plan, "the all-to-all")
        splits = pairs_out, pairs_in = sizes.pairs_SQ[rank], sizes.pairs_in(rank)
        num_pairs = sum(pairs_out)
        sent = sent or sent_rows(routing.token_ids_N[:num_pairs], *given)
        row_in_source_V, weights_V = self._lists(routing, sent.row_of_pair_N[:num_pairs], *splits)
        chunks = plan.chunks(sizes.num_rows(rank), sum(pairs_in))
        row_starts_S = row_starts(chunks, row_in_source_V)
        starts = self.group.to_host(torch.stack([sent.row_starts_Q, row_starts_S]), stage="lists")
        rows_out, rows_in = starts.diff().tolist()
        num_sent, num_rows = sum(rows_out), sum(rows_in)
        buffer = pair_lists(chunks, row_in_source_V, weights_V, row_starts_S, num_rows)
        tokens = token_lists(sent, num_sent)
        lists = tokens.token_of_sent_U, tokens.sent_by_token_U, tokens.sent_starts_T
        row_splits = Splits(tuple(rows_out), tuple(rows_in), *splits)
        return self._prepared(routing, buffer, chunks.expert_starts_e, lists, row_splits)

    def dispatch(self, x_TH: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        (token_of_sent_U, *_), splits = handle.transport_lists, handle.splits

        def exchange(packed_UH: Tensor) -> Tensor:
            return self._rows("dispatch", packed_UH, splits.rows_out, splits.rows_in, handle.forward.layer)

        return self._start(exchange, gather_rows(x_TH, token_of_sent_U), overlap=overlap)

    def combine(
        self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle, *, overlap: bool = False
    ) -> Pending:
        if self.batch_invariant:
            return self._combine_pairs(values_PH, weights_P, handle, overlap=overlap)
        (_, sent_by_token_U, sent_starts_T), splits = handle.transport_lists, handle.splits

        def exchange(sums_RH: Tensor) -> Tensor:
            back_UH = self._rows("combine", sums_RH, splits.rows_in, splits.rows_out, handle.forward.layer)
            return gather_sum(back_UH, sent_by_token_U, sent_starts_T)

        sums_RH = gather_sum(values_PH, handle.pairs_by_row_V, handle.pair_starts_R, weights_P)
        return self._start(exchange, sums_RH, overlap=overlap)
