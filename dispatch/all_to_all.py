"""The transport over any torch.distributed backend: dropless all-to-all of distinct rows.

Forward needs three all-to-alls: index lists with weights (their sizes follow from the plan), rows out, rows back.
Backward sends dO out and dX and dS back, and x out again unless `save_dispatched` is set. A source numbers the rows
that it sends to a destination rank from 0, so the largest index in the lists says how many rows will arrive. In a
forward the host waits twice: for the plan's sizes, then for the numbers of rows that this rank sends and receives.

Legend: T tokens on this rank, H hidden size, N pairs this rank sends, U rows this rank sends, S ranks of the EP group,
R rows this rank receives, V pairs this rank receives, P rows of the pair buffer, e local experts.
"""

from collections import Counter
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.dispatch.plan import split_sizes_async
from sonic_ep.dispatch.protocol import DispatchHandle, Pending, PreparedDispatch, Splits
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import gather_sum, pair_lists, row_starts, sent_rows, token_lists, values_of_pairs
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.routing import INDEX_DTYPE, Routing


@final
class AllToAllTransport:
    """Variable-size all-to-all over `group`.

    wire_bytes: bytes that this rank has sent to other ranks, by kind: "lists", "dispatch", "combine",
    "combine_scalars".
    """

    def __init__(self, group: EPGroup) -> None:
        self.group = group
        self.name = f"{group.name} all-to-all"
        self.wire_bytes: Counter[str] = Counter()

    def problem_with(self, num_tokens: int) -> str | None:
        return None

    def all_gather(self, values: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        return self.group.all_gather(values, meanwhile)

    def raise_if_lost(self) -> None:
        pass

    def prepare(
        self, routing: Routing, plan: RankPlan, x_TH: Tensor | None = None, layer_key: int | None = None
    ) -> PreparedDispatch:
        if not host_may_wait(plan.pairs_SQ):
            raise RuntimeError(
                f"the all-to-all of ep_size={self.group.size} needs its sizes on the host, which a CUDA graph cannot "
                "capture; leave the layer out of the graph, or use ep_size=1"
            )
        arriving_sizes, rank = split_sizes_async(routing), self.group.rank
        arriving_sizes.wait(self.group)
        sizes = arriving_sizes.read()
        pairs_out, pairs_in = sizes.pairs_SQ[rank], sizes.pairs_in(rank)
        splits, num_pairs = (pairs_out, pairs_in), sum(pairs_out)
        sent = sent_rows(routing.token_ids_N[:num_pairs], plan.pair_starts_Q, routing.num_tokens)
        received = self._exchange(
            "lists", _pack(sent.row_of_pair_N, routing.weights_N[:num_pairs]), *splits, self.group.layer
        )
        row_in_source_V, weights_V = _unpack(received, routing.weights_N.dtype)
        chunks = plan.chunks(sizes.num_rows(rank), sum(pairs_in))
        row_starts_S = row_starts(chunks, row_in_source_V)
        starts = self.group.to_host(torch.stack([sent.row_starts_Q, row_starts_S]), stage="lists")
        num_sent, num_rows = starts[:, -1].tolist()
        rows_out, rows_in = starts.diff().tolist()
        buffer = pair_lists(chunks, row_in_source_V, weights_V, row_starts_S, num_rows)
        tokens = token_lists(sent, num_sent)
        handle = DispatchHandle.of(
            buffer,
            chunks.expert_starts_e,
            (tokens.token_of_sent_U, tokens.sent_by_token_U, tokens.sent_starts_T),
            Splits(tuple(rows_out), tuple(rows_in), *splits),
            num_tokens=routing.num_tokens,
            num_rows=num_rows,
            num_listed=routing.token_ids_N.shape[0],
            layer=self.group.layer,
        )
        return PreparedDispatch(handle, buffer.weights_P)

    def dispatch(self, x_TH: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        (token_of_sent_U, _, _), splits = handle.transport_lists, handle.splits
        packed_UH = x_TH.index_select(0, token_of_sent_U)
        return Pending.done(self._exchange("dispatch", packed_UH, splits.rows_out, splits.rows_in, handle.layer))

    def combine(
        self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle, *, overlap: bool = False
    ) -> Pending:
        (_, sent_by_token_U, sent_starts_T), splits = handle.transport_lists, handle.splits
        sums_RH = gather_sum(values_PH, handle.pairs_by_row_V, handle.pair_starts_R, weights_P)
        back_UH = self._exchange("combine", sums_RH, splits.rows_in, splits.rows_out, handle.layer)
        return Pending.done(gather_sum(back_UH, sent_by_token_U, sent_starts_T))

    def combine_scalars(self, parts_PZ: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        num_pairs, splits = handle.slot_V.shape[0], handle.splits
        values_V = values_of_pairs(parts_PZ, handle.slot_V, handle.pair_starts_R[-1:], num_pairs)
        values_N = self._exchange("combine_scalars", values_V, splits.pairs_in, splits.pairs_out, handle.layer)
        spare = handle.num_listed - values_N.shape[0]
        return Pending.done(pad(values_N, (0, spare)) if spare else values_N)

    def _exchange(self, kind: str, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], layer: int) -> Tensor:
        row_bytes = rows[:1].numel() * rows.element_size() if rows.shape[0] else 0
        self.wire_bytes[kind] += (sum(send) - send[self.group.rank]) * row_bytes
        return self.group.all_to_all(rows, send, receive, stage=kind, layer=layer)


def _pack(row_ids_N: Tensor, weights_N: Tensor) -> Tensor:
    """Returns (N, units): row index and weight of each pair side by side, so that one exchange sends both."""
    parts, unit = (row_ids_N, weights_N), _unit(weights_N.dtype)
    return torch.cat([part[:, None].contiguous().view(unit) for part in parts], dim=1)


def _unpack(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the row indices (V,) and the weights (V,), of `dtype`, that `_pack` joined."""

    def column(first: int, last: int, kind: torch.dtype) -> Tensor:
        # clone: a view with another item size needs an aligned start.
        return message[:, first:last].clone(memory_format=torch.contiguous_format).view(kind).flatten()

    index_units = INDEX_DTYPE.itemsize // message.element_size()
    return column(0, index_units, INDEX_DTYPE), column(index_units, message.shape[1], dtype)


def _unit(dtype: torch.dtype) -> torch.dtype:
    """Returns the widest integer dtype that divides an index and a weight, of those that every backend can send."""
    return torch.int32 if dtype.itemsize % INDEX_DTYPE.itemsize == 0 else torch.uint8
