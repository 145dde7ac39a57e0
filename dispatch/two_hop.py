"""The transport across hosts: a row crosses once to each host that needs it, and is forwarded there.

    hop 1   one row per (token, destination host), to the rank of the same number on that host
    hop 2   that rank forwards the row to the ranks of its host that own chosen experts, over torch.distributed or
            through memory that they share (host_memory.py)

Combine goes back the same way. The ranks of a host send their sums to the rank that forwarded the row. It adds them, so
that one row crosses back. docs/transports.md#two-hops-across-hosts says what that does to bits.

The rows that come back go to their source rank directly if the transport is batch-invariant. In the exchange of lists
`prepare` also sends, to each rank that forwards, which ranks of its host need each token: a byte per (token, rank).

Example, two hosts of two ranks. A token of rank 0 has experts on ranks 1, 2 and 3. Its row goes to rank 0 itself, which
forwards it to rank 1, and to rank 2, which forwards it to rank 3 and itself: one row crosses, where all-to-all has two.

Legend: A hosts of the EP group, D ranks of a host, S ranks of the EP group, Q destination ranks, T tokens on this rank,
H hidden size, X rows this rank sends in hop 1, Y rows this rank receives in hop 1, f rows this rank forwards, R rows
this rank receives, V pairs this rank receives, P rows of the pair buffer, e local experts.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import NamedTuple, Self, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from sonic_ep.async_d2h import AsyncD2H
from sonic_ep.dispatch.host_memory import HostMemory
from sonic_ep.dispatch.protocol import DispatchHandle, Pending, PreparedDispatch, Splits
from sonic_ep.dispatch.row_exchange import CollectiveTransport, pack_lists, unpack_lists
from sonic_ep.dispatch.symmetric_buffers import Allocate
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
from sonic_ep.kernels.dispatch.recv_index.reference import Chunks, RankPlan
from sonic_ep.kernels.dispatch.send_index.reference import SentRows, TokenLists
from sonic_ep.kernels.dispatch.symmetric.signal_pad import Stage
from sonic_ep.kernels.program.trace import by_torch
from sonic_ep.routing import INDEX_DTYPE, Routing, SplitSizes


@dataclass(frozen=True, slots=True)
class _Ranks:
    """The ranks of both hops. Ranks of a host are consecutive: rank = host * per_host + number on the host."""

    rank: int
    size: int
    per_host: int

    @property
    def num_hosts(self) -> int:
        return self.size // self.per_host

    @property
    def same_number(self) -> range:
        """The ranks that have this rank's number on their host, by host: the ranks of hop 1."""
        return range(self.rank % self.per_host, self.size, self.per_host)

    @property
    def same_host(self) -> range:
        """The ranks of this host, which are the ranks of hop 2."""
        first = self.rank - self.rank % self.per_host
        return range(first, first + self.per_host)

    def spread(self, ranks: range, values: Sequence[int]) -> tuple[int, ...]:
        """Returns split sizes for all ranks: `values` for `ranks`, zero for the others."""
        by_rank = dict(zip(ranks, values, strict=True))
        return tuple(by_rank.get(rank, 0) for rank in range(self.size))

    def in_order_of_arrival(self, chunks: Chunks) -> Chunks:
        """Returns the chunks in the order in which rows arrive: by their source's number on its host, then by host."""
        by_source = chunks.table_FC.view(-1, self.num_hosts, self.per_host, chunks.num_experts)
        return replace(chunks, table_FC=by_source.transpose(1, 2).flatten(1))

    def most_forwarded(self, sizes: SplitSizes) -> int:
        """Returns a bound, from numbers that all ranks know, of the rows that any rank sends to another in hop 2."""
        most_S = [*map(min, sizes.tokens_S, map(max, sizes.pairs_SQ))]  # of a source, to any destination
        return max(sum(most_S[number :: self.per_host]) for number in range(self.per_host))

    def splits(self, counts: Sequence[int], pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> Splits:
        """Returns the split sizes of both hops.

        counts: prefix sums of the rows that this rank sends to each rank and receives from each, those in the order of
        arrival; of the rows of hop 1 that it sends to each host and receives from each; and, for each rank of this
        host, the rows of hop 2.
        """
        S, A, D = self.size, self.num_hosts, self.per_host
        left, prefixes = iter(counts), list[list[int]]()
        for number in (S, S, A, A):
            starts = list(itertools.islice(left, number + 1))
            prefixes.append([stop - start for start, stop in itertools.pairwise(starts)])
        rows_out, arriving, crossing_out, crossing_in = prefixes
        return Splits(
            tuple(rows_out),
            tuple(arriving[rank % D * A + rank // D] for rank in range(S)),
            *pairs,
            crossing_out=self.spread(self.same_number, crossing_out),
            crossing_in=self.spread(self.same_number, crossing_in),
            forwarded_out=self.spread(self.same_host, list(left)),
            forwarded_in=self.spread(self.same_host, [sum(arriving[first : first + A]) for first in range(0, S, A)]),
        )


class _Hops(NamedTuple):
    """The `transport_lists` of a handle.

    crossing: the rows of hop 1, by destination host and by token. forwarded: the rows of hop 2, by destination rank and
    by the row of hop 1 that they repeat.
    """

    crossing: TokenLists
    forwarded: TokenLists

    @property
    def lists(self) -> tuple[Tensor, ...]:
        return tuple(each for hop in self for each in (hop.token_of_sent_U, hop.sent_by_token_U, hop.sent_starts_T))

    @classmethod
    def of(cls, handle: DispatchHandle) -> Self:
        lists = handle.transport_lists
        return cls(TokenLists(*lists[:3]), TokenLists(*lists[3:6]))


@final
class TwoHopTransport(CollectiveTransport):
    """Sends each row once to each host, and forwards it there. Hosts are blocks of `ranks_per_host` consecutive ranks.

    A hop over torch.distributed is an all-to-all of the whole group, in which a rank sends to the ranks of its hop
    alone. So a rank that is lost is missed by all others. NCCL sends nothing to a rank that gets no rows.

    allocate: returns memory that the ranks of a host can write to, of so many bytes, for hop 2; a collective of the
    group. None where there is none; hop 2 then takes torch.distributed. timeout: seconds, with `allocate`.
    """

    def __init__(
        self,
        group: EPGroup,
        ranks_per_host: int,
        allocate: Allocate | None = None,
        *,
        timeout: float = 0,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__(group, f"two-hop {ranks_per_host}", ranks_per_host, batch_invariant=batch_invariant)
        self._ranks = _Ranks(group.rank, group.size, ranks_per_host)
        self._memory = None if allocate is None else HostMemory(group, self._ranks.same_host, allocate, timeout)

    def raise_if_lost(self) -> None:
        if self._memory is not None:
            self._memory.raise_if_lost()

    def prepare(self, routing: Routing, plan: RankPlan, x_TH: Tensor | None = None) -> PreparedDispatch:
        sent, ranks, T = None, self._ranks, routing.num_tokens
        if allows_spare_capacity(routing.token_ids_N):
            sent = sent_rows(routing.token_ids_N, plan.pair_starts_Q, T)  # while the sizes arrive
        sizes = self._sizes(routing, plan, "the two-hop transport")
        pairs = pairs_out, pairs_in = sizes.pairs_SQ[ranks.rank], sizes.pairs_in(ranks.rank)
        sent = sent or sent_rows(routing.token_ids_N[: sum(pairs_out)], plan.pair_starts_Q, T)
        is_needed_QT = sent.sent_before.diff().view(ranks.size, T)
        row_in_source_V, weights_V, is_needed_here = self._exchange_lists(routing, sent, is_needed_QT, sizes)
        chunks = ranks.in_order_of_arrival(plan.chunks(sizes.num_rows(ranks.rank), sum(pairs_in)))
        row_starts_S = row_starts(chunks, row_in_source_V)
        leaving = _marked(is_needed_QT.view(ranks.num_hosts, ranks.per_host, T).amax(1))
        is_arrived = is_needed_here.amax(0)
        arrived_before = pad(is_arrived.cumsum(0, dtype=INDEX_DTYPE), (1, 0))
        ends = itertools.accumulate(sizes.tokens_S[source] for source in ranks.same_number)
        counts = AsyncD2H(
            torch.cat(
                [
                    sent.row_starts_Q,
                    row_starts_S,
                    leaving.row_starts_Q,
                    torch.stack([arrived_before[end] for end in (0, *ends)]),
                    is_needed_here.sum(1, dtype=INDEX_DTYPE),
                ]
            )
        )
        # The device makes these lists while the host waits, for a bound of R.
        most = sum(map(min, sizes.tokens_S, pairs_in))
        buffer = pair_lists(chunks, row_in_source_V, weights_V, row_starts_S, most)
        self.group.wait_until(lambda: counts.is_ready, stage="lists")
        splits = ranks.splits(counts.read().tolist(), pairs)
        if self._memory is not None:
            self._memory.reserve(ranks.most_forwarded(sizes))
        buffer = replace(buffer, pair_starts_R=buffer.pair_starts_R[: sum(splits.rows_in) + 1])
        crossing = token_lists(leaving, sum(splits.crossing_out))
        token_of_arrived_Y = torch.nonzero_static(is_arrived, size=sum(splits.crossing_in)).flatten()
        forwarded = token_lists(_marked(is_needed_here[:, token_of_arrived_Y]), sum(splits.forwarded_out))
        return self._prepared(routing, buffer, chunks.expert_starts_e, _Hops(crossing, forwarded).lists, splits)

    def dispatch(self, x_TH: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        (crossing, forwarded), splits, layer = _Hops.of(handle), handle.splits, handle.forward.layer

        def exchange(x_XH: Tensor) -> Tensor:
            x_YH = self._across_hosts("dispatch", x_XH, splits.crossing_out, splits.crossing_in, layer)
            x_fH = gather_rows(x_YH, forwarded.token_of_sent_U)
            return self._within_host("dispatch", x_fH, splits.forwarded_out, splits.forwarded_in, layer)

        return self._start(exchange, gather_rows(x_TH, crossing.token_of_sent_U), overlap=overlap)

    def combine(
        self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle, *, overlap: bool = False
    ) -> Pending:
        if self.batch_invariant:
            return self._combine_pairs(values_PH, weights_P, handle, overlap=overlap)
        (crossing, forwarded), splits, layer = _Hops.of(handle), handle.splits, handle.forward.layer

        def exchange(sums_RH: Tensor) -> Tensor:
            sums_fH = self._within_host("combine", sums_RH, splits.forwarded_in, splits.forwarded_out, layer)
            sums_YH = gather_sum(sums_fH, forwarded.sent_by_token_U, forwarded.sent_starts_T)
            sums_XH = self._across_hosts("combine", sums_YH, splits.crossing_in, splits.crossing_out, layer)
            return gather_sum(sums_XH, crossing.sent_by_token_U, crossing.sent_starts_T)

        sums_RH = gather_sum(values_PH, handle.pairs_by_row_V, handle.pair_starts_R, weights_P)
        return self._start(exchange, sums_RH, overlap=overlap)

    def _across_hosts(
        self, kind: str, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], layer: int
    ) -> Tensor:
        return self._rows(kind, rows, send, receive, layer, " across hosts")

    def _within_host(
        self, kind: str, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], layer: int
    ) -> Tensor:
        if self._memory is None:
            return self._rows(kind, rows, send, receive, layer, " within a host")
        exchange, shape = functools.partial(self._by_memory, kind), (sum(receive), *rows.shape[1:])
        sizes = send[self._own_host], receive[self._own_host]
        return by_torch(exchange, shape, rows.dtype, rows, *sizes, into=True)

    def _by_memory(
        self, kind: str, rows: Tensor, send: Sequence[int], receive: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        assert self._memory is not None
        others = sum(send) - send[self._ranks.rank % self._ranks.per_host]
        self.wire_bytes[kind] += others * rows.shape[1:].numel() * rows.element_size()
        stage = Stage.DISPATCH if kind == "dispatch" else Stage.COMBINE
        return self._memory.exchange(stage, rows, send, receive, out)

    def _exchange_lists(
        self, routing: Routing, sent: SentRows, is_needed_QT: Tensor, sizes: SplitSizes
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sends the lists of pairs, and which ranks of a host need which tokens, in one exchange.

        is_needed_QT: (Q, T), 1 where destination rank q needs the row of token t, else 0.
        Returns the row index and the weight of each received pair, (V,), and for the tokens of the sources of hop 1,
        host by host, which ranks of this host need them: (D, tokens of all of them) uint8.
        """
        ranks, D, tokens_S = self._ranks, self._ranks.per_host, sizes.tokens_S
        num_pairs = sum(sizes.pairs_SQ[ranks.rank])
        packed = pack_lists(sent.row_of_pair_N[:num_pairs], routing.weights_N[:num_pairs])
        pair_bytes = packed.shape[1] * packed.element_size()
        # A message has two parts: pairs, and flags between ranks of hop 1.
        pairs_out = [pair_bytes * pairs for pairs in sizes.pairs_SQ[ranks.rank]]
        pairs_in = [pair_bytes * pairs for pairs in sizes.pairs_in(ranks.rank)]
        flags_out = ranks.spread(ranks.same_number, [D * routing.num_tokens] * ranks.num_hosts)
        flags_in = ranks.spread(ranks.same_number, [D * tokens_S[source] for source in ranks.same_number])
        pairs, flags = packed.view(torch.uint8).flatten(), is_needed_QT.to(torch.uint8).flatten()
        sent_parts = zip(pairs.split(pairs_out), flags.split(flags_out), strict=True)
        message = torch.cat([*itertools.chain.from_iterable(sent_parts)])
        send, receive = ([*map(add, *parts)] for parts in ((pairs_out, flags_out), (pairs_in, flags_in)))
        received = self._rows("lists", message, send, receive, self.group.layer)
        parts = received.split([*itertools.chain.from_iterable(zip(pairs_in, flags_in, strict=True))])
        pairs_V = torch.cat(parts[::2]).view(packed.dtype).view(-1, packed.shape[1])
        needed = [parts[2 * source + 1].view(D, tokens_S[source]) for source in ranks.same_number]
        return *unpack_lists(pairs_V, routing.weights_N.dtype), torch.cat(needed, 1)


def _marked(is_needed_QT: Tensor) -> SentRows:
    """Returns the rows of the cells (destination, token) that are 1, as `sent_rows` does for pairs."""
    sent_before = pad(is_needed_QT.flatten().cumsum(0, dtype=INDEX_DTYPE), (1, 0))
    copies_T = pad(is_needed_QT.sum(0, dtype=INDEX_DTYPE), (1, 0))
    return SentRows(sent_before[:0], sent_before, copies_T, is_needed_QT.shape[0])
