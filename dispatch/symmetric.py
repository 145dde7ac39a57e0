"""The transport of ranks that write into each other's memory: NVLink, no collective of a library.

Every stage is one kernel (kernels/peers.py): it meets the other ranks, writes where they read, and ends when theirs
have ended.

Buffers are shared by all that use the transport: index lists and returned values once, rows by the width of a row. A
source owns a region of `stride` rows in each of them, stride being the most tokens of any rank, where the row of its
token t is t: rows are received with gaps, `num_rows` is S * stride, and nobody numbers rows or counts them.

    bytes of a rank  =  3 * S * stride * row_bytes, for each row width, + 20 a pair, + flags and counts

Sizes are *exact*, when the host waits for them once in a forward, with rows on their way already where steps are alike
(room.py); or *static*: lists have room for the most rows that the router's capacity allows, the host waits for no size,
and a CUDA graph can be captured.

A dispatch alternates between two row buffers, so what it returns stays valid until the second dispatch after it. All
kernels must be launched on streams that wait for each other, as autograd does.

Legend: see protocol.py; S ranks of the group.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, final

import torch
from torch import Tensor

from sonic_ep.config import Dispatch
from sonic_ep.dispatch.peer_buffers import Allocate, PeerBuffers, RowBuffers, row_bytes
from sonic_ep.dispatch.plan import sizes_on_host
from sonic_ep.dispatch.protocol import Combining, Opened, Receipt, Splits, combine_at_once, return_at_once
from sonic_ep.dispatch.room import Forecast, Room, RowsForecast, plan_within
from sonic_ep.groups import EPGroup
from sonic_ep.host_copy import host_may_wait
from sonic_ep.kernels.operations import gather_sum, needed_rows, pair_lists, peer_kernels
from sonic_ep.kernels.pair_lists import RankPlan
from sonic_ep.kernels.peers import Meeting, Stage, flags_of
from sonic_ep.peer_memory import PeerMemory
from sonic_ep.routing import INDEX_DTYPE, Routing, SizesOnHost

# Bytes of a region. Sums of fewer are pushed before the GEMMs as fast as copied beside them (docs/transports.md).
_WORTH_COPYING = 16 << 20


class _Sizes(NamedTuple):
    """What a step needs room for: stride, P and V of this rank, and the most pairs that any rank sends or receives.
    more: it may be more than is needed, and what is left of lists is zero then."""

    stride: int
    num_rows: int
    num_pairs: int
    most_pairs: int
    more: bool


@final
class SymmetricTransport:
    """Writes into the other ranks' memory. `allocate` gives that memory; patience: seconds to wait for a rank.

    static: routings that say what no rank can exceed (Routing.most_received) are opened without a wait of the host.
    Every rank must then have as many tokens as all had at the first one.

    Every call raises RuntimeError, with rank and stage, once a rank has been waited for in vain.
    """

    sends_unchecked = True

    def __init__(
        self,
        group: EPGroup,
        allocate: Allocate,
        *,
        patience: float,
        static: bool = False,
        dispatch: Dispatch = "auto",
    ) -> None:
        self.group = group
        self.name = f"{group.name} symmetric"
        self._buffers = PeerBuffers(group, allocate)
        self._patience = patience
        self._static = static
        self._dispatch = dispatch
        self._tokens: int | None = None  # of every rank, if static
        self._forecast, self._own_rows = Forecast(), RowsForecast()  # of exact steps
        self._flags: PeerMemory | None = None
        self._meeting: Meeting | None = None
        self._regions: dict[bool, tuple[int, Tensor]] = {}
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None

    def problem_with(self, num_tokens: int) -> str | None:
        if self._tokens is None or num_tokens == self._tokens:
            return None
        return (
            f"T={num_tokens} tokens, but transport.buffers='static' keeps to the first step's {self._tokens}; "
            "pad the batch, or use buffers='exact'"
        )

    def all_gather(self, values: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        meeting, kernels, count = self._meet(), peer_kernels(), values.numel()
        room, memory = self._buffers.counts(count)
        kernels.announce(meeting, values.contiguous(), memory.addresses_S, room)
        if meanwhile is not None:
            meanwhile()
        return kernels.take_all(meeting, memory.addresses_S, count, room)

    def raise_if_lost(self) -> None:
        missing = None if self._meeting is None else self._meeting.missing()
        if missing is not None:
            stage, rank = missing
            raise RuntimeError(
                f"rank {rank} of the EP group did not come to {stage.name.lower()} within {self._patience:g} s: it "
                "died, it is stuck, or it is slower than that; look at its log, or raise transport.timeout"
            )

    def open(self, routing: Routing, plan: RankPlan, x_TH: Tensor | None = None, whose: int | None = None) -> Opened:
        x_TH, turn = None if x_TH is None else x_TH.contiguous(), self._turn
        if routing.on_host is not None:
            routing.on_host.on_failure(functools.partial(setattr, self, "_turn", turn))
        static = self._static and routing.most_received is not None
        arriving = None if static else self._arriving_sizes(routing)
        needed = needed_rows(routing.token_ids_N.contiguous(), plan.pair_starts_Q, routing.num_tokens)
        if arriving is None:
            return self._open(routing, plan, needed, x_TH, self._static_sizes(routing, x_TH), static=True)
        room, ahead = self._room_ahead(arriving, routing.num_tokens, x_TH), None
        if room is not None:
            sizes = _Sizes(max(1, room.tokens), room.rows, room.pairs, room.pairs, more=True)
            ahead = self._open(routing, plan_within(plan, arriving.on_device, room), needed, x_TH, sizes)

        def settle() -> tuple[Opened, bool]:
            # Here the host waits, and not before: the device goes on with what was launched meanwhile.
            known = arriving.read()
            most = Room.needed_by(known)
            P, V = known.num_rows(self.group.rank), sum(known.pairs_in(self.group.rank))
            self._forecast.note(most, routing.num_tokens)
            self._own_rows.note(whose, P, routing.num_tokens)
            if room is not None and ahead is not None and room.holds(most):
                return ahead.with_lists_of(P, V), True
            self._turn = turn
            sizes = _Sizes(max(1, most.tokens), P, V, most.pairs, more=False)
            return self._open(routing, plan, needed, x_TH, sizes), False

        rows = self._own_rows.rows(whose, routing.num_tokens)
        if ahead is None or rows is None or arriving.arrived:
            return settle()[0]
        return ahead.ahead(rows, settle)

    def _open(
        self,
        routing: Routing,
        plan: RankPlan,
        needed: Tensor,
        x_TH: Tensor | None,
        sizes: _Sizes,
        *,
        static: bool = False,
    ) -> Opened:
        S, pairs_SQ, token_ids_N = self.group.size, plan.pairs_SQ, routing.token_ids_N.contiguous()
        meeting, pairs = self._meet(), self._buffers.lists(sizes.most_pairs)
        rows_RH = None
        if x_TH is not None:
            # Beside the lists, which it does not need. It allocates no tensor that lives on, and is waited for before
            # this returns: no tensor of one stream is freed while the other uses it.
            with self._aside(x_TH):
                rows_RH = self._send(x_TH, needed, pairs_SQ, sizes.stride)
        rows_at, gates_at, _ = pairs.addresses
        peer_kernels().push_lists(meeting, token_ids_N, routing.gates_N.contiguous(), pairs_SQ, rows_at, gates_at)
        row_in_source_V = pairs.memory.view(pairs.starts[0], (sizes.num_pairs,), INDEX_DTYPE)
        gates_V = pairs.memory.view(pairs.starts[1], (sizes.num_pairs,), routing.gates_N.dtype)
        chunks = plan.chunks(sizes.num_rows, sizes.num_pairs, zeroed=sizes.more)
        row_starts_S = self._starts_of_regions(sizes.stride, gates_V, static=static)
        buffer = pair_lists(chunks, row_in_source_V, gates_V, row_starts_S, S * sizes.stride)
        receipt = Receipt.of(
            buffer,
            plan.expert_starts_e,
            (needed, routing.counts.tokens_S.to(INDEX_DTYPE), pairs_SQ),
            Splits.none(S),
            num_tokens=routing.num_tokens,
            num_rows=S * sizes.stride,
            num_listed=token_ids_N.shape[0],
        )
        if x_TH is not None:
            self._join(x_TH)
        return Opened(receipt, buffer.gates_P, rows_RH)

    def dispatch(self, x_TH: Tensor, receipt: Receipt) -> Tensor:
        needed, _, pairs_SQ = receipt.own_lists
        return self._send(x_TH.contiguous(), needed, pairs_SQ, self._stride(receipt))

    def prefetch(self, x_TH: Tensor, receipt: Receipt) -> Callable[[], Tensor]:
        if self._dispatch == "push":
            rows_RH = self.dispatch(x_TH, receipt)
            return lambda: rows_RH
        return self._copy(x_TH.contiguous(), self._stride(receipt))

    def keep(self, rows_RH: Tensor) -> Tensor:
        return rows_RH.clone()

    def combine(self, rows_RH: Tensor, receipt: Receipt) -> Tensor:
        every_row = torch.arange(rows_RH.shape[0] + 1, dtype=INDEX_DTYPE, device=rows_RH.device)
        return self._combine(rows_RH, every_row, every_row, None, receipt)

    def combine_pairs(self, values_PH: Tensor, weights_P: Tensor | None, receipt: Receipt) -> Tensor:
        return self._combine(values_PH, receipt.pairs_by_row_V, receipt.pair_starts_R, weights_P, receipt)

    def _combine(
        self, values_PH: Tensor, items: Tensor, starts: Tensor, weights_P: Tensor | None, receipt: Receipt
    ) -> Tensor:
        _, tokens_S, pairs_SQ = receipt.own_lists
        stride = self._stride(receipt)
        rows = self._buffers.rows(values_PH, stride)
        meeting, kernels = self._meet(), peer_kernels()
        there = rows.addresses[2]
        kernels.push_sums(meeting, values_PH, items, starts, weights_P, tokens_S, pairs_SQ, there, stride)
        back = rows.view(2, values_PH, receipt.num_rows)
        return self._sum_sent(back, back, receipt)

    def start_combine_pairs(self, values_PH: Tensor, weights_P: Tensor | None, receipt: Receipt) -> Combining:
        stride = self._stride(receipt)
        few = stride * row_bytes(values_PH) < _WORTH_COPYING
        if self._dispatch == "push" or (self._dispatch == "auto" and few):
            return combine_at_once(self, values_PH, weights_P, receipt)
        sums_RH = gather_sum(values_PH, receipt.pairs_by_row_V, receipt.pair_starts_R, weights_P)
        rows, sums_of = self._buffers.rows(sums_RH, stride), sums_RH.split(stride)
        sent = {rank: sums_of[rank] for rank in self._others()}
        arrive = self._start_copies(Stage.COMBINE, sent, rows, 2, stride)

        def wait() -> Tensor:
            arrive()
            return self._sum_sent(rows.view(2, sums_RH, receipt.num_rows), sums_RH, receipt)

        return Combining(wait)

    def _sum_sent(self, back: Tensor, own: Tensor, receipt: Receipt) -> Tensor:
        needed, _, _ = receipt.own_lists
        return peer_kernels().sum_sent(self._meet(), back, own, needed, receipt.num_tokens, self._stride(receipt))

    def _stride(self, receipt: Receipt) -> int:
        """Rows of a source's region."""
        return receipt.num_rows // self.group.size

    def return_pairs(self, values_P: Tensor, receipt: Receipt) -> Tensor:
        _, _, pairs_SQ = receipt.own_lists
        meeting, pairs, kernels = self._meet(), self._buffers.lists_there, peer_kernels()
        assert pairs is not None
        kernels.push_values(meeting, values_P.contiguous(), receipt.slot_V, pairs_SQ, pairs.addresses[2])
        buffer = pairs.memory.view(pairs.starts[2], (pairs.capacity,), values_P.dtype)
        return kernels.take_values(meeting, buffer, pairs_SQ, receipt.num_listed)

    def start_return_pairs(self, parts_PN: Tensor, receipt: Receipt) -> Callable[[], Tensor]:
        return return_at_once(self, parts_PN, receipt)

    def _send(self, x_TH: Tensor, needed: Tensor, pairs_SQ: Tensor, stride: int) -> Tensor:
        if self._dispatch == "copy":
            return self._copy(x_TH, stride)()
        meeting, rows = self._meet(), self._next_rows(x_TH, stride)
        peer_kernels().push_rows(meeting, x_TH, needed, pairs_SQ, rows.addresses[self._turn], stride)
        return rows.view(self._turn, x_TH, self.group.size * stride)

    def _copy(self, x_TH: Tensor, stride: int) -> Callable[[], Tensor]:
        """Start copies to all ranks, beside what is launched next; what it returns waits for all of theirs."""
        rows = self._next_rows(x_TH, stride)
        # This rank's last: on one GPU the SMs copy, when they find time.
        sent = {rank: x_TH for rank in (*self._others(), self.group.rank)}
        arrive = self._start_copies(Stage.DISPATCH, sent, rows, self._turn, stride)
        rows_RH = rows.view(self._turn, x_TH, self.group.size * stride)

        def wait() -> Tensor:
            arrive()
            return rows_RH

        return wait

    def _others(self) -> list[int]:
        """From the next rank on, so that no rank is sent to by all at once."""
        return [(self.group.rank + turn) % self.group.size for turn in range(1, self.group.size)]

    def _start_copies(
        self, stage: Stage, sent: dict[int, Tensor], rows: RowBuffers, buffer: int, stride: int
    ) -> Callable[[], None]:
        """Copies to these ranks, to this rank's region. What this returns holds what is sent, and waits until what all
        ranks send has arrived."""
        meeting, kernels, like = self._meet(), peer_kernels(), next(iter(sent.values()))
        kernels.come(meeting, stage)
        with self._aside(like):
            for rank, values in sent.items():
                rows.copy(values, buffer, rank, self.group.rank * stride)
            copied = torch.cuda.current_stream().record_event() if like.is_cuda else None

        def wait() -> None:
            if copied is not None:  # not all that the other stream has been given since
                torch.cuda.current_stream().wait_event(copied)
            sent.clear()  # it had to live until then
            kernels.go(meeting, stage)

        return wait

    def _next_rows(self, x_TH: Tensor, stride: int) -> RowBuffers:
        """Where to send x: the buffer whose turn it is."""
        self._turn = 1 - self._turn
        return self._buffers.rows(x_TH, stride)

    def _aside(self, like: Tensor) -> AbstractContextManager[object]:
        """Launches beside the current stream, behind what is on it so far; `_join` makes it wait for them all."""
        if not like.is_cuda:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(like.device)
        self._stream.wait_stream(torch.cuda.current_stream(like.device))
        return torch.cuda.stream(self._stream)

    def _join(self, like: Tensor) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(like.device).wait_stream(self._stream)

    def _arriving_sizes(self, routing: Routing) -> SizesOnHost:
        if not host_may_wait(routing.token_ids_N):
            raise RuntimeError(
                "sizes of buffers are read on the host, which a CUDA graph cannot capture; set "
                "transport.buffers='static' and rounding.capacity_factor, and capture training steps"
            )
        return sizes_on_host(routing)

    def _room_ahead(self, arriving: SizesOnHost, num_tokens: int, x_TH: Tensor | None) -> Room | None:
        """For which a step can be launched before its sizes are known; None where they are known, or it cannot."""
        if arriving.arrived or not arriving.may_go_unchecked:
            return None
        room = self._forecast.room(num_tokens, self._buffers.room_for_pairs)
        return room if room is not None and self._is_ready(x_TH, room.tokens, room.pairs) else None

    def _static_sizes(self, routing: Routing, x_TH: Tensor | None) -> _Sizes:
        """What no step exceeds. Checks the routing, unless it can be checked when all has been launched."""
        T, most, on_host = routing.num_tokens, routing.most_received, routing.on_host
        assert most is not None
        sizes = _Sizes(max(1, T), most, most, max(most, routing.token_ids_N.shape[0]), more=True)
        ready = T == self._tokens and self._is_ready(x_TH, T, sizes.most_pairs)
        if ready and on_host is not None and on_host.may_go_unchecked:
            return sizes
        routing.check()
        if self._tokens is None:
            everyones = self.group.all_gather_object(T)
            if len(set(everyones)) > 1:
                raise ValueError(
                    f"transport.buffers='static' wants as many tokens on every rank, not {everyones}; use 'exact'"
                )
            self._tokens = T
        problem = self.problem_with(T)
        if problem is not None:
            raise ValueError(problem)
        return sizes

    def _is_ready(self, x_TH: Tensor | None, stride: int, num_pairs: int) -> bool:
        """Can rows be sent without the host's taking part in anything with other ranks? Buffers must be there. Copies
        cannot: engines ask no counts."""
        if x_TH is None or self._meeting is None or self._dispatch == "copy":
            return False
        return self._buffers.has_rows(x_TH, stride) and self._buffers.room_for_pairs >= max(1, num_pairs)

    def _starts_of_regions(self, stride: int, like: Tensor, *, static: bool) -> Tensor:
        """(S + 1,). That of static buffers never changes, so a graph may have it."""
        stride_before, starts_S = self._regions.get(static, (None, like))
        if stride_before != stride:
            ends = (self.group.size + 1) * stride
            starts_S = torch.arange(0, ends, stride, dtype=INDEX_DTYPE, device=like.device)
            self._regions[static] = stride, starts_S
        return starts_S

    def _meet(self) -> Meeting:
        """The meeting of this group, made at its first use. Raises RuntimeError if a rank is missing."""
        if self._meeting is None:
            self._flags = self._buffers.flags(flags_of(self.group.size))
            self._meeting = Meeting.of(self.group.rank, self._flags.addresses_S, round(self._patience * 1e9))
        self.raise_if_lost()
        if not host_may_wait(self._meeting.state):
            self._buffers.keep_for_graphs()
        return self._meeting
