"""The transport across hosts: a row crosses the network once for each host that needs it, and fans out there.

A rank has one peer on every host: the rank with the same number there. In a dispatch, a row takes two hops:

    across hosts     from its source to the peer on each host with an expert of the token, one row a (token, host)
    within a host    from that peer to each rank of the host with such an expert, one row a (token, rank)

A combine takes them back. The peer sums what the ranks of its host return for a token, in fp32 at least, rounds once,
and sends one row across. So sums over ranks have another order than with `AllToAllTransport`, and one more rounding for
each host. Everything else has the same bits: the rows, their order, and all lists of a handle but its own.

The hops are exchanges of torch.distributed. The second one is an exchange for each source host, in their order, so rows
and pairs arrive by source rank. In a forward the host waits three times: for the plan's sizes, for the rows that cross,
and for the rows that fan out.

Example: hosts {0, 1} and {2, 3}. Token t of rank 0 has experts on ranks 1, 2 and 3. Its row goes from 0 to 0 (itself)
and from 0 to 2, then from 0 to 1, and from 2 to 2 (itself) and 3. It crosses once instead of twice.

`splits` of a handle: of the exchange across hosts, by host; of those within the host, by source host and rank.

Legend: T tokens on this rank, N pairs this rank sends, S ranks of the EP group, V pairs this rank receives.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.dispatch.all_to_all import pack_pairs, unpack_pairs
from sonic_ep.dispatch.plan import split_sizes_async
from sonic_ep.dispatch.protocol import DispatchHandle, Pending, PreparedDispatch, Splits
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import gather_sum, pair_lists, row_starts, sent_rows, token_lists, values_of_pairs
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.routing import INDEX_DTYPE, Routing

_ACROSS, _WITHIN = "across hosts", "within the host"


@final
class TwoHopTransport:
    """Sends rows over `group`, the consecutive `ranks_per_host` ranks of which share a host. A collective.

    wire_bytes: bytes that this rank has sent to other ranks, by kind and hop: "dispatch across hosts", "dispatch within
    the host", and the same of "lists", "combine" and "combine_scalars".
    """

    def __init__(self, group: EPGroup, ranks_per_host: int) -> None:
        self.group, self.ranks_per_host = group, ranks_per_host
        self.num_hosts = group.size // ranks_per_host
        self.host, self._local = divmod(group.rank, ranks_per_host)
        first = self.host * ranks_per_host
        self._within = group.part(range(first, first + ranks_per_host))
        self._across = group.part(range(self._local, group.size, ranks_per_host))
        self.name = f"{group.name} two-hop"
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
                f"the two hops of ep_size={self.group.size} need their sizes on the host, which a CUDA graph cannot "
                "capture; leave the layer out of the graph, or use ep_size=1"
            )
        arriving_sizes, group = split_sizes_async(routing), self.group
        arriving_sizes.wait(group)
        pairs_SQ, num_rows = (sizes := arriving_sizes.read()).pairs_SQ, sizes.num_rows(group.rank)
        layer, on_host = group.layer, self._ranks_of_host(self.host)
        forwarded = [pairs_SQ[source][rank] for source in self._peers() for rank in on_host]
        pairs_in = [pairs_Q[group.rank] for pairs_Q in pairs_SQ]
        crossing = self._by_host(pairs_SQ[group.rank]), self._by_host(forwarded)

        # Across hosts: a list of the pairs of each host, with the rows that cross for them.
        N = sum(crossing[0])
        starts_of_hosts = plan.pair_starts_Q[:: self.ranks_per_host].contiguous()
        sent = sent_rows(routing.token_ids_N[:N], starts_of_hosts, routing.num_tokens)
        lists = pack_pairs(sent.row_of_pair_N, routing.weights_N[:N])
        crossed_row_W, weights_W = unpack_pairs(
            self._exchange_across("lists", lists, *crossing, layer), routing.weights_N.dtype
        )
        host_of_pair_W = _segment_of(crossing[1], crossed_row_W.device)
        arrived = _starts_of_rows(crossed_row_W, host_of_pair_W, self.num_hosts)
        starts = group.to_host(torch.stack([sent.row_starts_Q, arrived]), stage="lists")
        num_sent, num_crossed = starts[:, -1].tolist()
        rows_out, rows_in = map(tuple, starts.diff().tolist())
        across = Splits(rows_out, rows_in, *crossing)

        # Within the host: to this rank, the rows that crossed are tokens, and (source host, rank) is where they go.
        crossed_row_W = crossed_row_W + arrived[host_of_pair_W]
        starts_of_forwarded = torch.tensor([0, *accumulate(forwarded)], dtype=INDEX_DTYPE).to(crossed_row_W.device)
        fanned = sent_rows(crossed_row_W, starts_of_forwarded, num_crossed)
        lists = pack_pairs(fanned.row_of_pair_N, weights_W)
        row_in_source_V, weights_V = unpack_pairs(
            self._exchange_within("lists", lists, forwarded, pairs_in, layer), routing.weights_N.dtype
        )
        chunks = plan.chunks(num_rows, sum(pairs_in))
        row_starts_S = row_starts(chunks, row_in_source_V)
        starts = group.to_host(torch.stack([fanned.row_starts_Q, row_starts_S]), stage="lists")
        num_fanned, num_received = starts[:, -1].tolist()
        rows_out, rows_in = map(tuple, starts.diff().tolist())
        within = Splits(rows_out, rows_in, tuple(forwarded), tuple(pairs_in))

        buffer = pair_lists(chunks, row_in_source_V, weights_V, row_starts_S, num_received)
        by_hop = token_lists(sent, num_sent), token_lists(fanned, num_fanned)
        handle = DispatchHandle.of(
            buffer,
            chunks.expert_starts_e,
            tuple(values for of in by_hop for values in (of.token_of_sent_U, of.sent_by_token_U, of.sent_starts_T)),
            (across, within),
            num_tokens=routing.num_tokens,
            num_rows=num_received,
            num_listed=routing.token_ids_N.shape[0],
            layer=layer,
        )
        return PreparedDispatch(handle, buffer.weights_P)

    def dispatch(self, x_TH: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        token_of_crossing, _, _, crossed_of_fanned, _, _ = handle.transport_lists
        (across, within), layer = handle.splits, handle.layer
        rows = x_TH.index_select(0, token_of_crossing)
        rows = self._exchange_across("dispatch", rows, across.rows_out, across.rows_in, layer)
        rows = rows.index_select(0, crossed_of_fanned)
        return Pending.done(self._exchange_within("dispatch", rows, within.rows_out, within.rows_in, layer))

    def combine(
        self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle, *, overlap: bool = False
    ) -> Pending:
        _, *by_token, _, by_crossed, starts_of_crossed = handle.transport_lists
        (across, within), layer = handle.splits, handle.layer
        sums = gather_sum(values_PH, handle.pairs_by_row_V, handle.pair_starts_R, weights_P)
        sums = self._exchange_within("combine", sums, within.rows_in, within.rows_out, layer)
        sums = gather_sum(sums, by_crossed, starts_of_crossed)
        sums = self._exchange_across("combine", sums, across.rows_in, across.rows_out, layer)
        return Pending.done(gather_sum(sums, *by_token))

    def combine_scalars(self, parts_PZ: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        (across, within), layer = handle.splits, handle.layer
        values = values_of_pairs(parts_PZ, handle.slot_V, handle.pair_starts_R[-1:], handle.slot_V.shape[0])
        values = self._exchange_within("combine_scalars", values, within.pairs_in, within.pairs_out, layer)
        values = self._exchange_across("combine_scalars", values, across.pairs_in, across.pairs_out, layer)
        spare = handle.num_listed - values.shape[0]
        return Pending.done(pad(values, (0, spare)) if spare else values)

    def _peers(self) -> range:
        """The ranks with this rank's number on each host."""
        return range(self._local, self.group.size, self.ranks_per_host)

    def _ranks_of_host(self, host: int) -> range:
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)

    def _by_host(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Returns the sums of S numbers over the ranks of each host."""
        return tuple(sum(numbers[rank] for rank in self._ranks_of_host(host)) for host in range(self.num_hosts))

    def _exchange_across(
        self, kind: str, rows: Tensor, send: Sequence[int], receive: Sequence[int], layer: int
    ) -> Tensor:
        """send, receive: consecutive rows for and from each host."""
        self._count(f"{kind} {_ACROSS}", rows, sum(send) - send[self.host])
        return self._across.all_to_all(rows, send, receive, stage=f"{kind} {_ACROSS}", layer=layer)

    def _exchange_within(
        self, kind: str, rows: Tensor, send: Sequence[int], receive: Sequence[int], layer: int
    ) -> Tensor:
        """send, receive: consecutive rows for and from each rank of this host, for one source host after the other."""
        received, L = rows.new_empty((sum(receive), *rows.shape[1:])), self.ranks_per_host
        self._count(f"{kind} {_WITHIN}", rows, sum(send) - sum(send[self._local :: L]))
        from_, to = 0, 0
        for host in range(self.num_hosts):
            sizes = slice(host * L, (host + 1) * L)
            sent, arriving = sum(send[sizes]), sum(receive[sizes])
            self._within.all_to_all(
                rows[from_ : from_ + sent],
                send[sizes],
                receive[sizes],
                stage=f"{kind} {_WITHIN}",
                layer=layer,
                into=received[to : to + arriving],
            )
            from_, to = from_ + sent, to + arriving
        return received

    def _count(self, kind: str, rows: Tensor, number: int) -> None:
        row_bytes = rows[:1].numel() * rows.element_size() if rows.shape[0] else 0
        self.wire_bytes[kind] += number * row_bytes


def _segment_of(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Returns the number of the segment of each element, int64, for consecutive segments of these sizes."""
    return torch.repeat_interleave(torch.tensor(sizes), output_size=sum(sizes)).to(device)


def _starts_of_rows(row_W: Tensor, segment_W: Tensor, segments: int) -> Tensor:
    """Returns the first row of each segment, and the number of rows, (segments + 1,) int32.

    row_W: the rows of pairs, numbered without gaps in each segment.
    """
    rows = row_W.new_zeros(segments).scatter_reduce_(0, segment_W, row_W + 1, reduce="amax")
    return pad(rows.cumsum(0), (1, 0)).to(INDEX_DTYPE)
