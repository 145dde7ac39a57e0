"""The transport over symmetric memory: ranks write into each other's memory over NVLink.

Lists, dispatch, combine and scalars are one *stage* each, a kernel that writes to peers
(kernels/dispatch/symmetric/signal_pad.py has the protocol). Copies by copy engines run between two kernels that
synchronize as such a kernel does, acquire_peers and release_peers. The all-gather of counts is a kernel that sends and
one that waits. No step uses a collective library; allocating buffers does.

Buffers are shared by all layers of a group: one for lists and scalars, and row buffers for each row width in bytes. In
a row buffer each sender has a region of `stride` rows, stride being the most tokens of any rank, or those of `least` if
that is more. The row of token t is row t of the region. So received rows have gaps, R = S * stride, and no rank needs
to number or count rows. docs/transports.md#memory has the bytes.

How sizes are known:

  exact        the host waits once in a forward for this step's sizes. Lists have these sizes.
  static       lists have capacity for the most rows that the router's capacity factor allows. The host waits for no
               size, so a CUDA graph can be captured.
  bounded      as static, with a bound from the caller (`bounded_by`), who finds out later whether it holds.

Dispatches of a step alternate between two row buffers, and every step begins with the same one. So what a dispatch
returns is valid until the second dispatch after it or the next step, and ranks that run programs agree with those that
run their code. All kernels must be launched on streams that wait for each other, as autograd's do.

Legend: T tokens on this rank, H hidden size, N pairs this rank sends, U rows this rank sends, S ranks of the EP group,
R rows this rank receives, V pairs this rank receives, P rows of the pair buffer, e local experts.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple, cast, final

import torch
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.config import Dispatch
from sonic_ep.dispatch.plan import split_sizes_async
from sonic_ep.dispatch.protocol import (
    DispatchHandle,
    HandleSizes,
    Pending,
    PreparedDispatch,
    Splits,
)
from sonic_ep.dispatch.side_stream import SideStream
from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.dispatch.symmetric_buffers import Allocate, PeerBuffers, RowBuffers, row_bytes
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import bounded_plan, gather_sum, is_token_in_rank, pair_lists, symmetric_kernels
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.kernels.dispatch.symmetric.signal_pad import SignalPad, Stage, num_signals
from sonic_ep.kernels.program.trace import current_trace
from sonic_ep.routing import INDEX_DTYPE, AsyncSplitSizes, Routing
from sonic_ep.symmetric_memory import PeerMemory

# Bytes of a region. For smaller ones, pushing before the GEMMs is as fast as copying during them (docs/transports.md).
_MIN_COPY_BYTES = 16 << 20


class _Sizes(NamedTuple):
    """The sizes that a step allocates.

    stride: rows of a source's region. num_rows, num_pairs: P and V of this rank. max_pairs: the most pairs that any
    rank sends or receives. may_exceed: True if P and V are upper bounds; the spare entries of lists are then zeroed.
    """

    stride: int
    num_rows: int
    num_pairs: int
    max_pairs: int
    may_exceed: bool


@final
class SymmetricTransport:
    """Writes into the other ranks' memory.

    allocate: returns symmetric memory of so many bytes; a collective. timeout: seconds to wait for a peer.
    static: for routings with an upper bound of the rows received (`Routing.max_received`), `prepare` does not wait for
    sizes. Every rank must then have the same number of tokens, in all such steps.
    dispatch: "push" sends rows with a kernel, "copy" with copy engines; "auto" copies where that can overlap GEMMs.

    Every method raises RuntimeError, with rank and stage, after a peer has timed out.
    """

    batch_invariant = False

    def __init__(
        self,
        group: EPGroup,
        allocate: Allocate,
        *,
        timeout: float,
        static: bool = False,
        dispatch: Dispatch = "auto",
    ) -> None:
        self.group = group
        self.name = f"{group.name} symmetric"
        self._buffers = PeerBuffers(group, allocate)
        self._timeout = timeout
        self.is_static = static
        self._dispatch = dispatch
        self._tokens: int | None = None  # of every rank and step, if static
        self._flags: PeerMemory | None = None
        self._pad: SignalPad | None = None
        self._regions: dict[int, Tensor] = {}
        self._row_buffer = 0
        self._bound: SizeBound | None = None
        self.least: SizeBound | None = None  # that buffers hold, on all ranks alike, whatever runs their steps
        self._side = SideStream()

    def problem_with(self, num_tokens: int) -> str | None:
        if self._tokens is None or num_tokens == self._tokens:
            return None
        return (
            f"T={num_tokens} tokens, but transport.buffers='static' keeps to the first step's {self._tokens}; "
            "pad the batch, or use buffers='exact'"
        )

    @property
    def can_be_bounded(self) -> bool:
        """True if the device can stop everything that a forward sends. Copy engines do not read counts."""
        return self._dispatch != "copy"

    @contextmanager
    def bounded_by(self, bound: SizeBound) -> Generator[None]:
        """A context in which steps have buffers for `bound`, and the host reads no sizes. Not for static steps.

        If the bound does not hold, the device sends nothing, and the results are undefined.
        """
        self._bound = bound
        try:
            yield
        finally:
            self._bound = None

    def holds(self, row_bytes: int, bound: SizeBound) -> bool:
        """Returns True if the present buffers are large enough for steps within `bound`."""
        return self._buffers.has_rows(row_bytes, max(1, bound.tokens)) and self._buffers.pair_capacity >= bound.pairs

    @property
    def generation(self) -> int:
        """Counts allocations of its buffers, whose addresses programs know."""
        return self._buffers.generation

    def all_gather(
        self, values: Tensor, meanwhile: Callable[[], None] | None = None, *, used: int | None = None
    ) -> Tensor:
        pad, kernels, values = self._signal_pad(), symmetric_kernels(), values[:used]
        count = values.numel()
        bound, memory = self._buffers.counts(count)
        kernels.all_gather_start(pad, values.contiguous(), memory.addresses_S, bound)
        if meanwhile is not None:
            meanwhile()
        return kernels.all_gather_wait(pad, memory.addresses_S, count, bound)

    def raise_if_lost(self) -> None:
        lost_peer = None if self._pad is None else self._pad.lost_peer()
        if lost_peer is not None:
            stage, rank = lost_peer
            limit = f"{self._timeout:g} s" + (f" (noticed in {self.group.running})" if self.group.running else "")
            raise RuntimeError(
                f"rank {rank} of the EP group did not come to {stage.name.lower()} within {limit}: "
                "it died, it is stuck, or it is slower than that; look at its log, or raise transport.timeout"
            )

    def prepare(self, routing: Routing, plan: RankPlan, x_TH: Tensor | None = None) -> PreparedDispatch:
        x_TH = None if x_TH is None else x_TH.contiguous()
        static = self.is_static and routing.max_received is not None
        arriving_sizes, bound = None if static else self._start_split_sizes(routing), self._bound
        in_rank = is_token_in_rank(routing.token_ids_N.contiguous(), plan.pair_starts_Q, routing.num_tokens)
        if arriving_sizes is None:
            sizes = self._static_sizes(routing, x_TH)
        elif bound is not None:
            sizes = _Sizes(max(1, bound.tokens), bound.rows, bound.pairs, bound.pairs, may_exceed=True)
            plan = bounded_plan(plan, arriving_sizes.on_device, *bound, bound.tokens)
        else:
            known, rank = arriving_sizes.read(), self.group.rank  # the host waits only here
            needed = SizeBound.needed_by(known).joined(self.least)
            P, V = known.num_rows(rank), sum(known.pairs_in(rank))
            sizes = _Sizes(max(1, needed.tokens), P, V, needed.pairs, may_exceed=False)
        return self._launch(routing, plan, in_rank, x_TH, sizes)

    def _launch(
        self, routing: Routing, plan: RankPlan, in_rank: Tensor, x_TH: Tensor | None, sizes: _Sizes
    ) -> PreparedDispatch:
        """Sends lists, and rows if there are any, into buffers of these sizes. in_rank: of `is_token_in_rank`."""
        self._row_buffer = 0
        S, pairs_SQ, token_ids_N = self.group.size, plan.pairs_SQ, routing.token_ids_N.contiguous()
        pad, pairs = self._signal_pad(), self._buffers.lists(sizes.max_pairs)
        rows_RH = None
        if x_TH is not None:
            # Rows do not need the lists, so they are sent concurrently. Apart from buffers the side stream allocates no
            # tensor that outlives this call, and it is joined before the return: no tensor of one stream is freed while
            # the other uses it.
            with self._side.fork(x_TH):
                rows_RH = self._send(x_TH, in_rank, pairs_SQ, sizes.stride)
        there = pairs.rows.addresses_S, pairs.weights.addresses_S
        symmetric_kernels().push_lists(pad, token_ids_N, routing.weights_N.contiguous(), pairs_SQ, *there)
        row_in_source_V = pairs.rows.view((sizes.num_pairs,), INDEX_DTYPE)
        weights_V = pairs.weights.view((sizes.num_pairs,), routing.weights_N.dtype)
        chunks = plan.chunks(sizes.num_rows, sizes.num_pairs, zeroed=sizes.may_exceed)
        row_starts_S = self.starts_of_regions(sizes.stride, weights_V.device)
        buffer = pair_lists(chunks, row_in_source_V, weights_V, row_starts_S, S * sizes.stride)
        handle_sizes = HandleSizes(
            splits=Splits.none(S),
            num_tokens=routing.num_tokens,
            num_rows=S * sizes.stride,
            num_listed=token_ids_N.shape[0],
            forward=routing.forward_in(self.group)._replace(waits=False),
        )
        handle = DispatchHandle.of(
            buffer, plan.expert_starts_e, (in_rank, routing.counts.tokens_S, pairs_SQ), handle_sizes
        )
        if x_TH is not None:
            self._side.join(x_TH)
        return PreparedDispatch(handle, buffer.weights_P, rows_RH)

    def dispatch(self, x_TH: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        in_rank, _, pairs_SQ = handle.transport_lists
        if overlap and self._dispatch != "push":
            return Pending(self._copy(x_TH.contiguous(), self._stride(handle)))
        return Pending.done(self._send(x_TH.contiguous(), in_rank, pairs_SQ, self._stride(handle)))

    def combine(
        self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle, *, overlap: bool = False
    ) -> Pending:
        stride = self._stride(handle)
        copies = self._dispatch == "copy" or stride * row_bytes(values_PH) >= _MIN_COPY_BYTES
        if overlap and self._dispatch != "push" and copies:
            return self._copy_sums(values_PH, weights_P, handle)
        return Pending.done(self._push_sums(values_PH, weights_P, handle))

    def _push_sums(self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle) -> Tensor:
        _, tokens_S, pairs_SQ = handle.transport_lists
        items, starts, stride = handle.pairs_by_row_V, handle.pair_starts_R, self._stride(handle)
        rows = self._buffers.rows(row_bytes(values_PH), stride)
        pad, kernels = self._signal_pad(), symmetric_kernels()
        there = rows.buffers[2].addresses_S
        kernels.combine_push(pad, values_PH, items, starts, weights_P, tokens_S, pairs_SQ, there, stride)
        back = rows.view(2, values_PH, handle.num_rows)
        return self._combine_reduce(back, back, handle)

    def _copy_sums(self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle) -> Pending:
        stride = self._stride(handle)
        sums_RH = gather_sum(values_PH, handle.pairs_by_row_V, handle.pair_starts_R, weights_P)
        rows = self._buffers.rows(row_bytes(sums_RH), stride)
        sent = {rank: sums_RH[rank * stride : (rank + 1) * stride] for rank in self._others()}
        arrive = self._start_copies(Stage.COMBINE, sent, rows, 2, stride)

        def wait() -> Tensor:
            arrive()
            return self._combine_reduce(rows.view(2, sums_RH, handle.num_rows), sums_RH, handle)

        return Pending(wait)

    def _combine_reduce(self, back: Tensor, own: Tensor, handle: DispatchHandle) -> Tensor:
        in_rank, _, _ = handle.transport_lists
        return symmetric_kernels().combine_reduce(
            self._signal_pad(), back, own, in_rank, handle.num_tokens, self._stride(handle)
        )

    def _stride(self, handle: DispatchHandle) -> int:
        """Returns the rows of a source's region."""
        return handle.num_rows // self.group.size

    def combine_scalars(self, parts_PZ: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        _, _, pairs_SQ = handle.transport_lists
        pad, pairs, kernels = self._signal_pad(), self._buffers.list_buffers, symmetric_kernels()
        assert pairs is not None
        kernels.push_scalars(pad, parts_PZ, handle.slot_V, pairs_SQ, pairs.values.addresses_S)
        buffer = pairs.values.view((pairs.capacity,), parts_PZ.dtype)
        return Pending.done(kernels.collect_scalars(pad, buffer, pairs_SQ, handle.num_listed))

    def _send(self, x_TH: Tensor, in_rank: Tensor, pairs_SQ: Tensor, stride: int) -> Tensor:
        if self._dispatch == "copy":
            return self._copy(x_TH, stride)()
        pad, rows = self._signal_pad(), self._next_rows(x_TH, stride)
        there = rows.buffers[self._row_buffer].addresses_S
        symmetric_kernels().push_rows(pad, x_TH, in_rank, pairs_SQ, there, stride)
        return rows.view(self._row_buffer, x_TH, self.group.size * stride)

    def _copy(self, x_TH: Tensor, stride: int) -> Callable[[], Tensor]:
        """Starts copies of x to all ranks on the side stream. Returns a function that waits for all ranks' copies."""
        rows = self._next_rows(x_TH, stride)
        # This rank's own copy is last: within a GPU, SMs copy instead of a copy engine, and they may be busy.
        sent = {rank: x_TH for rank in (*self._others(), self.group.rank)}
        arrive = self._start_copies(Stage.DISPATCH, sent, rows, self._row_buffer, stride)
        rows_RH = rows.view(self._row_buffer, x_TH, self.group.size * stride)

        def wait() -> Tensor:
            arrive()
            return rows_RH

        return wait

    def _others(self) -> list[int]:
        """Returns the peers, from the next rank on, so that not all ranks send to the same one at once."""
        return [(self.group.rank + offset) % self.group.size for offset in range(1, self.group.size)]

    def _start_copies(
        self, stage: Stage, sent: dict[int, Tensor], rows: RowBuffers, buffer: int, stride: int
    ) -> Callable[[], None]:
        """Starts copies to this rank's region on each rank in `sent`.

        Returns a function that waits, on the current stream, until the copies of all ranks have arrived. It holds the
        tensors in `sent` until then.
        """
        pad, kernels, like = self._signal_pad(), symmetric_kernels(), next(iter(sent.values()))
        kernels.acquire_peers(pad, stage)
        with self._side.fork(like):
            for rank, values in sent.items():
                rows.copy(values, buffer, rank, self.group.rank * stride)
            copied = self._side.event(like)

        def wait() -> None:
            self._side.wait(copied)  # the side stream may have later work by now
            sent.clear()  # from here on the current stream may reuse that memory
            kernels.release_peers(pad, stage)

        return wait

    def _next_rows(self, x_TH: Tensor, stride: int) -> RowBuffers:
        """Switches to the other dispatch buffer and returns the row buffers for x."""
        self._row_buffer = 1 - self._row_buffer
        return self._buffers.rows(row_bytes(x_TH), stride)

    def _start_split_sizes(self, routing: Routing) -> AsyncSplitSizes:
        if not host_may_wait(routing.token_ids_N):
            raise RuntimeError(
                "sizes of buffers are read on the host, which a CUDA graph cannot capture; set "
                "transport.buffers='static' and rounding.capacity_factor, and capture training steps"
            )
        return split_sizes_async(routing)

    def _static_sizes(self, routing: Routing, x_TH: Tensor | None) -> _Sizes:
        """Returns upper bounds that hold for every step.

        Checks the routing, unless all buffers exist and launching before the check is safe. Raises ValueError if the
        number of tokens differs between ranks or from earlier steps.
        """
        T, needed, split_sizes = routing.num_tokens, routing.max_received, routing.split_sizes
        assert needed is not None
        sizes = _Sizes(max(1, T), needed, needed, max(needed, routing.token_ids_N.shape[0]), may_exceed=True)
        ready = T == self._tokens and self._is_ready(x_TH, T, sizes.max_pairs)
        if ready and split_sizes is not None and split_sizes.may_launch_unchecked:
            return sizes
        routing.check()
        if self._tokens is None:
            tokens_S = self.group.all_gather_object(T)
            if len(set(tokens_S)) > 1:
                raise ValueError(
                    f"transport.buffers='static' wants as many tokens on every rank, not {tokens_S}; use 'exact'"
                )
            self._tokens = T
        problem = self.problem_with(T)
        if problem is not None:
            raise ValueError(problem)
        return sizes

    def _is_ready(self, x_TH: Tensor | None, stride: int, num_pairs: int) -> bool:
        """Returns True if rows can be sent before the routing is checked and its sizes are known.

        The buffers must exist, because allocation is a collective. Copy engines are excluded: they do not read the
        counts, so a bad status or a missed guess would not stop them.
        """
        if x_TH is None or self._pad is None or self._dispatch == "copy":
            return False
        return self._buffers.has_rows(row_bytes(x_TH), stride) and self._buffers.pair_capacity >= max(1, num_pairs)

    def starts_of_regions(self, stride: int, device: torch.device) -> Tensor:
        """Returns (S + 1,) int32: the first row of each source's region, and S * stride, of at least one row each.

        The tensor of a stride stays, because a CUDA graph may hold it.
        """
        if (trace := current_trace()) is not None:
            return cast(Tensor, trace.named("regions", (self.group.size + 1,), INDEX_DTYPE))
        stride = max(1, stride)
        if stride not in self._regions:
            ends = (self.group.size + 1) * stride
            self._regions[stride] = torch.arange(0, ends, stride, dtype=INDEX_DTYPE, device=device)
        return self._regions[stride]

    def _signal_pad(self) -> SignalPad:
        """Returns the group's signal pad, allocated at its first use. Raises RuntimeError if a peer is lost."""
        if self._pad is None:
            self._flags = self._buffers.signals(num_signals(self.group.size))
            self._pad = SignalPad.of(self.group.rank, self._flags.addresses_S, round(self._timeout * 1e9))
        self.raise_if_lost()
        if not host_may_wait(self._pad.state):
            self._buffers.retain_for_graphs()
        return self._pad
