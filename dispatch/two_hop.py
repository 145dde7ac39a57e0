"""The transport across hosts: a row crosses once to each host that needs it, and is forwarded there.

    hop 1   one row per (token, destination host), to the rank of the same number on that host
    hop 2   that rank forwards the row to the ranks of its host that own chosen experts

Combine goes back the same way. The ranks of a host send their sums to the rank that forwarded the row. It adds them, so
that one row crosses back. There are three sums: over the pairs of a received row, over the ranks of a host, over hosts.
Each accumulates in fp32 at least and is rounded once to the dtype of the rows. AllToAllTransport adds the ranks of all
hosts in one sum. Both give the same bits where sums are exact, or where a token has at most two destination ranks.
Elsewhere the order of additions differs, and for bf16 and fp16 the rounding of a host's sum is added.

Index lists, weights and values of pairs go to their destination rank directly: a pair has only one. So do the rows that
come back if the transport is batch-invariant. `prepare` also sends, to each rank that forwards, which ranks of its host
need each token: a byte per (token, rank).

Example, two hosts of two ranks. A token of rank 0 has experts on ranks 1, 2 and 3. Its row goes to rank 0 itself, which
forwards it to rank 1, and to rank 2, which forwards it to rank 3 and itself: one row crosses, where all-to-all has two.

Legend: A hosts of the EP group, D ranks of a host, S ranks of the EP group, Q destination ranks, T tokens on this rank,
H hidden size, X rows this rank sends in hop 1, Y rows this rank receives in hop 1, f rows this rank forwards, R rows
this rank receives, V pairs this rank receives, P rows of the pair buffer, e local experts.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from sonic_ep.dispatch.protocol import DispatchHandle, Pending, PreparedDispatch, Splits
from sonic_ep.dispatch.row_exchange import CollectiveTransport
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import gather_sum, pair_lists, row_starts, sent_rows, token_lists
from sonic_ep.kernels.dispatch.recv_index.reference import PairBuffer, RankPlan
from sonic_ep.kernels.dispatch.send_index.reference import SentRows, TokenLists
from sonic_ep.routing import INDEX_DTYPE, Routing


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

    @property
    def in_order_of_arrival(self) -> list[int]:
        """All ranks, as sources of received rows: by the rank of this host that forwards them, then by host."""
        return [source for number in range(self.per_host) for source in range(number, self.size, self.per_host)]

    def spread(self, ranks: range, values: Sequence[int]) -> tuple[int, ...]:
        """Returns split sizes for all ranks: `values` for `ranks`, zero for the others."""
        by_rank = dict(zip(ranks, values, strict=True))
        return tuple(by_rank.get(rank, 0) for rank in range(self.size))


class _Hops(NamedTuple):
    """The lists of both hops. A handle has them joined, because every transport has three `transport_lists`.

    crossing: the rows of hop 1, by destination host and by token. forwarded: the rows of hop 2, by destination rank and
    by the row of hop 1 that they repeat.
    """

    crossing: TokenLists
    forwarded: TokenLists

    def joined(self) -> tuple[Tensor, ...]:
        pairs = zip(
            *((lists.token_of_sent_U, lists.sent_by_token_U, lists.sent_starts_T) for lists in self), strict=True
        )
        return tuple(torch.cat(pair) for pair in pairs)

    @classmethod
    def of(cls, handle: DispatchHandle) -> Self:
        splits, rows = handle.splits, (sum(handle.splits.crossing_out), sum(handle.splits.forwarded_out))
        sizes = rows, rows, (handle.num_tokens + 1, sum(splits.crossing_in) + 1)
        parts = [joined.split(size) for joined, size in zip(handle.transport_lists, sizes, strict=True)]
        return cls(*(TokenLists(*lists) for lists in zip(*parts, strict=True)))


@final
class TwoHopTransport(CollectiveTransport):
    """Sends each row once to each host, and forwards it there. Hosts are blocks of `ranks_per_host` consecutive ranks.

    Both hops are all-to-alls of the whole group, in which a rank sends to the ranks of its hop alone. So a rank that is
    lost is missed by all others, whatever the hop. NCCL sends nothing to a rank that gets no rows. `_within_host` is
    the only place where rows move within a host.

    wire_bytes, bytes_across_hosts: see RowExchange.
    """

    def __init__(self, group: EPGroup, ranks_per_host: int, *, batch_invariant: bool = False) -> None:
        super().__init__(group, f"two-hop {ranks_per_host}", ranks_per_host, batch_invariant=batch_invariant)
        self._ranks = _Ranks(group.rank, group.size, ranks_per_host)

    @property
    def bytes_across_hosts(self) -> Counter[str]:
        return self._exchange.bytes_across_hosts

    def prepare(self, routing: Routing, plan: RankPlan, x_TH: Tensor | None = None) -> PreparedDispatch:
        sizes, ranks = self._exchange.sizes(routing, plan, "the two-hop transport"), self._ranks
        pairs = pairs_out, pairs_in = sizes.pairs_SQ[ranks.rank], sizes.pairs_in(ranks.rank)
        sent = sent_rows(routing.token_ids_N[: sum(pairs_out)], plan.pair_starts_Q, routing.num_tokens)
        row_in_source_V, weights_V = self._exchange.lists(routing, sent.row_of_pair_N, *pairs)
        is_needed_QT = sent.sent_before.diff().view(ranks.size, routing.num_tokens)
        is_needed_AT = is_needed_QT.view(ranks.num_hosts, ranks.per_host, routing.num_tokens).amax(1)
        here = self._exchange_needed(is_needed_QT, sizes.tokens_S)
        chunks = plan.chunks(sizes.num_rows(ranks.rank), sum(pairs_in))
        row_starts_S = row_starts(chunks, row_in_source_V)
        splits = self._splits(sent.row_starts_Q, row_starts_S, is_needed_AT, here, pairs)
        buffer = pair_lists(chunks, row_in_source_V, weights_V, row_starts_S, sum(splits.rows_in))
        crossing = token_lists(_marked(is_needed_AT), sum(splits.crossing_out))
        is_needed_here = torch.cat(here, 1)
        token_of_arrived_Y = torch.nonzero_static(is_needed_here.amax(0), size=sum(splits.crossing_in)).flatten()
        forwarded = token_lists(_marked(is_needed_here[:, token_of_arrived_Y]), sum(splits.forwarded_out))
        in_order = _in_order_of_arrival(buffer, ranks.in_order_of_arrival, splits)
        return self._prepared(routing, in_order, chunks.expert_starts_e, _Hops(crossing, forwarded).joined(), splits)

    def dispatch(self, x_TH: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        splits, layer = handle.splits, handle.forward.layer
        rows = sum(splits.crossing_out), sum(splits.forwarded_out)
        token_of_crossing_X, row_of_forwarded_f = handle.transport_lists[0].split(rows)

        def exchange(x_XH: Tensor) -> Tensor:
            x_YH = self._across_hosts("dispatch", x_XH, splits.crossing_out, splits.crossing_in, layer)
            x_fH = x_YH.index_select(0, row_of_forwarded_f)
            return self._within_host("dispatch", x_fH, splits.forwarded_out, splits.forwarded_in, layer)

        return self._exchange.start(exchange, x_TH.index_select(0, token_of_crossing_X), overlap=overlap)

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
        return self._exchange.start(exchange, sums_RH, overlap=overlap)

    def _across_hosts(
        self, kind: str, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], layer: int
    ) -> Tensor:
        return self._exchange.rows(kind, rows, send, receive, layer, " across hosts")

    def _within_host(
        self, kind: str, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], layer: int
    ) -> Tensor:
        return self._exchange.rows(kind, rows, send, receive, layer, " within a host")

    def _exchange_needed(self, is_needed_QT: Tensor, tokens_S: Sequence[int]) -> list[Tensor]:
        """Returns which ranks of this host need the tokens of each source of hop 1: (D, T) uint8, by host.

        is_needed_QT: (Q, T), 1 where destination rank q needs the row of token t, else 0.
        """
        ranks, D = self._ranks, self._ranks.per_host
        send = ranks.spread(ranks.same_number, [D * is_needed_QT.shape[1]] * len(ranks.same_number))
        receive = ranks.spread(ranks.same_number, [D * tokens_S[source] for source in ranks.same_number])
        flags = is_needed_QT.to(torch.uint8).flatten()
        received = self._across_hosts("lists", flags, send, receive, self.group.layer)
        parts = received.split([receive[source] for source in ranks.same_number])
        return [part.view(D, tokens_S[source]) for source, part in zip(ranks.same_number, parts, strict=True)]

    def _splits(
        self,
        sent_starts_Q: Tensor,
        received_starts_S: Tensor,
        is_needed_AT: Tensor,
        here: list[Tensor],
        pairs: tuple[tuple[int, ...], tuple[int, ...]],
    ) -> Splits:
        """Returns the split sizes of both hops. The host waits for them. here: see `_exchange_needed`."""
        ranks, counts = self._ranks, [sent_starts_Q.diff(), received_starts_S.diff(), is_needed_AT.sum(1)]
        counts += [torch.stack([is_needed.amax(0).sum() for is_needed in here]), torch.cat(here, 1).sum(1)]
        on_host = self.group.to_host(torch.cat(counts), stage="lists")
        rows_out, rows_in, crossing_out, crossing_in, forwarded_out = (
            values.tolist() for values in on_host.split([len(each) for each in counts])
        )
        forwarded_in = [sum(rows_in[number :: ranks.per_host]) for number in range(ranks.per_host)]
        hop_1, hop_2 = ranks.same_number, ranks.same_host
        return Splits(
            tuple(rows_out),
            tuple(rows_in),
            *pairs,
            crossing_out=ranks.spread(hop_1, crossing_out),
            crossing_in=ranks.spread(hop_1, crossing_in),
            forwarded_out=ranks.spread(hop_2, forwarded_out),
            forwarded_in=ranks.spread(hop_2, forwarded_in),
        )


def _marked(is_needed_QT: Tensor) -> SentRows:
    """Returns the rows of the cells (destination, token) that are 1, as `sent_rows` does for pairs."""
    sent_before = pad(is_needed_QT.flatten().cumsum(0, dtype=INDEX_DTYPE), (1, 0))
    copies_T = pad(is_needed_QT.sum(0, dtype=INDEX_DTYPE), (1, 0))
    return SentRows(sent_before[:0], sent_before, copies_T, is_needed_QT.shape[0])


def _in_order_of_arrival(buffer: PairBuffer, sources: Sequence[int], splits: Splits) -> PairBuffer:
    """Returns the lists for received rows in the order of `sources`, of lists for rows in the order of source ranks."""
    pairs_S = buffer.pairs_by_row_V.split(splits.pairs_in)
    counts_S = buffer.pair_starts_R.diff().split(splits.rows_in)
    in_order_R = torch.arange(sum(splits.rows_in), dtype=INDEX_DTYPE, device=buffer.row_of_pair_P.device)
    rows_S = in_order_R.split(splits.rows_in)
    arrival_R = torch.empty_like(in_order_R)
    arrival_R[torch.cat([rows_S[source] for source in sources])] = in_order_R
    counts_R = torch.cat([counts_S[source] for source in sources])
    return replace(
        buffer,
        row_of_pair_P=arrival_R.index_select(0, buffer.row_of_pair_P),
        pairs_by_row_V=torch.cat([pairs_S[source] for source in sources]),
        pair_starts_R=pad(counts_R.cumsum(0, dtype=INDEX_DTYPE), (1, 0)),
    )
