"""`CollectiveTransport`: all-to-alls of rows, of index lists, and of one value a pair. The host knows their sizes.

Index lists and values of pairs go from the source rank to the destination rank directly, with every transport that uses
torch.distributed: a pair has one destination rank, so no way is shorter.

Legend: T tokens on this rank, H hidden size, N pairs this rank sends, V pairs this rank receives, P rows of the pair
buffer.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.dispatch.plan import split_sizes_async
from sonic_ep.dispatch.protocol import DispatchHandle, HandleSizes, Pending, PreparedDispatch, Splits
from sonic_ep.dispatch.side_stream import SideStream
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import gather_rows, gather_sum, values_of_pairs
from sonic_ep.kernels.common.sizes import INDEX_ALIGNMENT
from sonic_ep.kernels.dispatch.recv_index.reference import PairBuffer, RankPlan
from sonic_ep.kernels.program.trace import by_torch, current_trace
from sonic_ep.routing import INDEX_DTYPE, Routing, SplitSizes


class CollectiveTransport:
    """What transports over torch.distributed share. They take any number of tokens, and the group reports lost peers.

    kind: follows the group in the name. ranks_per_host: how many consecutive ranks of the group share a host; by
    default all. batch_invariant: see Transport. The last two of the `transport_lists` are then the pairs of each token
    by expert, and their prefix sums.
    wire_bytes: bytes that this rank has sent to other ranks, by kind: "lists", "dispatch", "combine",
    "combine_scalars". bytes_across_hosts: the part of them that went to other hosts.
    """

    def __init__(
        self, group: EPGroup, kind: str, ranks_per_host: int | None = None, *, batch_invariant: bool = False
    ) -> None:
        self.group, self.batch_invariant = group, batch_invariant
        self.name = f"{group.name} {kind}"
        self.wire_bytes: Counter[str] = Counter()
        self.bytes_across_hosts: Counter[str] = Counter()
        per_host = ranks_per_host or group.size
        first = group.rank - group.rank % per_host
        self._own_host = slice(first, first + per_host)
        self._side = SideStream()

    def problem_with(self, num_tokens: int) -> str | None:
        return None

    def all_gather(
        self, values: Tensor, meanwhile: Callable[[], None] | None = None, *, used: int | None = None
    ) -> Tensor:
        if current_trace() is None:
            return self.group.all_gather(values, meanwhile, used=used)
        if meanwhile is not None:
            meanwhile()  # first, because a program gathers on its own stream
        gather = functools.partial(_gather, self.group, used)
        return by_torch(gather, (self.group.size, *values.shape), values.dtype, values, into=True)

    def raise_if_lost(self) -> None:
        pass

    def combine_scalars(self, parts_PZ: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        num_pairs, splits = handle.slot_V.shape[0], handle.splits
        values_V = values_of_pairs(parts_PZ, handle.slot_V, handle.pair_starts_R[-1:], num_pairs)

        def exchange(values_V: Tensor) -> Tensor:
            sizes, num_pairs = (splits.pairs_in, splits.pairs_out), sum(splits.pairs_out)
            values_N = values_V.new_zeros(handle.num_listed)  # zero behind the pairs
            self._rows("combine_scalars", values_V, *sizes, handle.forward.layer, out=values_N[:num_pairs])
            return values_N

        return self._start(exchange, values_V, overlap=overlap)

    def _start(self, exchange: Callable[[Tensor], Tensor], values: Tensor, *, overlap: bool) -> Pending:
        """Starts `exchange(values)`, which calls `_rows` and launches kernels.

        overlap: on a GPU, it runs on a stream of its own, at the same time as what the caller launches before `result`.
        Every rank starts its exchanges in the same order, so their order on the wire stays the same.
        """
        if not (overlap and values.is_cuda):
            return Pending.done(exchange(values))
        with self._side.fork(values):
            exchanged = exchange(values)
            done = self._side.event(values)
        held = [values, exchanged]  # in memory that the current stream may not reuse before it has waited

        def result() -> Tensor:
            self._side.wait(done)  # the side stream may have later work by now
            found = held.pop()
            self._side.hand_over(found)
            held.clear()
            return found

        del values, exchanged

        return Pending(result, reserve_for="exchange")

    def _sizes(self, routing: Routing, plan: RankPlan, transport: str) -> SplitSizes:
        """Returns the split sizes of a routing. Blocks the host until they arrive.

        transport: what needs them, for the error: RuntimeError while a CUDA graph is captured.
        """
        if not host_may_wait(plan.pairs_SQ):
            raise RuntimeError(
                f"{transport} of ep_size={self.group.size} needs its sizes on the host, which a CUDA graph cannot "
                "capture; leave the layer out of the graph, or use ep_size=1"
            )
        arriving = split_sizes_async(routing)
        arriving.wait(self.group)
        return arriving.read()

    def _rows(
        self,
        kind: str,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        layer: int,
        hop: str = "",
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns the received rows, `receive[s]` from each rank s, in order of s.

        rows: (sum(send), ...), `send[q]` for each rank q, in order of q. kind: see `wire_bytes`. layer: its number.
        hop: follows the kind in errors. out: in place of a new tensor.
        """
        shape = sum(receive), *rows.shape[1:]
        exchange = functools.partial(self._send_rows, kind, layer, hop)
        return by_torch(exchange, shape, rows.dtype, rows, tuple(send), tuple(receive), into=True, out=out)

    def _send_rows(
        self,
        kind: str,
        layer: int,
        hop: str,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        out: Tensor | None = None,
    ) -> Tensor:
        row_bytes = rows[:1].numel() * rows.element_size() if rows.shape[0] else 0
        total = sum(send)
        self.wire_bytes[kind] += (total - send[self.group.rank]) * row_bytes
        self.bytes_across_hosts[kind] += (total - sum(send[self._own_host])) * row_bytes
        return self.group.all_to_all(rows, send, receive, stage=f"{kind}{hop}", layer=layer, out=out)

    def _lists(
        self, routing: Routing, row_of_pair_N: Tensor, pairs_out: Sequence[int], pairs_in: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Sends row index and weight of each pair. Returns both for the received pairs, (V,), in arrival order."""
        weights_N = routing.weights_N[: row_of_pair_N.shape[0]]
        received = self._rows("lists", pack_lists(row_of_pair_N, weights_N), pairs_out, pairs_in, self.group.layer)
        return unpack_lists(received, weights_N.dtype)

    def _combine_pairs(
        self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle, *, overlap: bool
    ) -> Pending:
        """Returns the same sums as `combine` of a rank that is alone, in one `gather_sum` on the token's rank."""
        (*_, pairs_by_token_N, pair_starts_T), splits = handle.transport_lists, handle.splits
        weights_N = None
        if weights_P is not None:
            parts_PZ = weights_P.as_strided((weights_P.shape[0], 1), (1, 1))
            weights_N = self.combine_scalars(parts_PZ, handle).result()

        def exchange(values_VH: Tensor) -> Tensor:
            sizes = splits.pairs_in, splits.pairs_out
            values_NH = self._rows("combine", values_VH, *sizes, handle.forward.layer)
            return gather_sum(values_NH, pairs_by_token_N, pair_starts_T, weights_N)

        return self._start(exchange, gather_rows(values_PH, handle.slot_V), overlap=overlap)

    def _prepared(
        self,
        routing: Routing,
        buffer: PairBuffer,
        expert_starts_e: Tensor,
        transport_lists: tuple[Tensor, ...],
        splits: Splits,
    ) -> PreparedDispatch:
        if self.batch_invariant:
            # Routed pairs are in the order of experts, so a stable sort by token keeps it.
            sorted_N, pairs_by_token_N = routing.token_ids_N[: sum(splits.pairs_out)].sort(stable=True)
            tokens_T = torch.arange(routing.num_tokens + 1, dtype=sorted_N.dtype, device=sorted_N.device)
            pair_starts_T = torch.searchsorted(sorted_N, tokens_T, out_int32=True)
            transport_lists = *transport_lists, pairs_by_token_N.to(INDEX_DTYPE), pair_starts_T
        sizes = HandleSizes(
            splits=splits,
            num_tokens=routing.num_tokens,
            num_rows=sum(splits.rows_in),
            num_listed=routing.token_ids_N.shape[0],
            forward=routing.forward_in(self.group),
        )
        return PreparedDispatch(DispatchHandle.of(buffer, expert_starts_e, transport_lists, sizes), buffer.weights_P)


def _gather(group: EPGroup, used: int | None, values: Tensor, out: Tensor | None = None) -> Tensor:
    return group.all_gather(values, used=used, out=out)


def pack_lists(row_ids_N: Tensor, weights_N: Tensor) -> Tensor:
    """Returns (N, units): row index and weight of each pair side by side, so that one exchange sends both."""
    parts, unit = (row_ids_N, weights_N), _unit(weights_N.dtype)
    if weights_N.dtype.itemsize == unit.itemsize == INDEX_DTYPE.itemsize:
        return torch.stack([row_ids_N, weights_N.view(unit)], 1)
    return torch.cat([part[:, None].contiguous().view(unit) for part in parts], dim=1)


def unpack_lists(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the row indices (V,) and the weights (V,), of `dtype`, that `pack_lists` joined."""

    if message.dtype == INDEX_DTYPE and message.shape[1] == 2:
        V = message.shape[0]
        columns = message.new_empty(2, V + -V % INDEX_ALIGNMENT)[:, :V]
        ids_V, weights_V = columns.copy_(message.t())
        return ids_V, weights_V.view(dtype)

    def column(first: int, last: int, kind: torch.dtype) -> Tensor:
        # clone: a view with another item size needs an aligned start.
        return message[:, first:last].clone(memory_format=torch.contiguous_format).view(kind).flatten()

    index_units = INDEX_DTYPE.itemsize // message.element_size()
    return column(0, index_units, INDEX_DTYPE), column(index_units, message.shape[1], dtype)


def _unit(dtype: torch.dtype) -> torch.dtype:
    """Returns the widest integer dtype that divides an index and a weight, of those that every backend can send."""
    return torch.int32 if dtype.itemsize % INDEX_DTYPE.itemsize == 0 else torch.uint8
