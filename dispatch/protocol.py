"""The transport contract: how token rows move between the ranks of one EP group, and the handle of a step.

    prepared = transport.prepare(routing, plan, x)        sends index lists and weights; forward only
    handle   = prepared.handle
    rows     = transport.dispatch(x, handle).result()     sends each distinct (token, destination rank) row once
    out      = transport.combine(y, prepared.weights_P, handle).result()
                                                          sums y by received row, sends the sums back, sums by token
    values   = transport.combine_scalars(parts, handle).result()
                                                          sends one number per pair back

The source rank holds a token, the destination rank an expert. The destination rank applies the combine weights. So
dispatch and combine of received rows only move and add rows, and each is the other's backward. All four are
collectives: every rank of the EP group calls them, in the same order. They launch work for the device; only `prepare`
may block the host until sizes arrive from the device.

Legend: T tokens on this rank, H hidden size, N pairs this rank sends, U rows this rank sends, R rows this rank
receives, V pairs this rank receives, P rows of the pair buffer, e local experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from torch import Tensor

from sonic_ep.groups import Exchange
from sonic_ep.groups.order import Forward
from sonic_ep.kernels.dispatch.recv_index.reference import PairBuffer, RankPlan
from sonic_ep.kernels.experts.tile_table import ReserveFor
from sonic_ep.routing import Routing

_NO_FORWARD = Forward()


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows and pairs that this rank sends to and receives from each rank: host integers, in rank order.

    Rows are distinct (token, destination rank) rows, by source and destination rank, whatever their way. With two_hop,
    crossing_out and crossing_in are the rows of the hop between hosts, and forwarded_out and forwarded_in the rows of
    the hop within a host; else the four are empty, or zero. All are zero with symmetric memory, which needs no split
    sizes.
    """

    rows_out: tuple[int, ...]
    rows_in: tuple[int, ...]
    pairs_out: tuple[int, ...]
    pairs_in: tuple[int, ...]
    crossing_out: tuple[int, ...] = ()
    crossing_in: tuple[int, ...] = ()
    forwarded_out: tuple[int, ...] = ()
    forwarded_in: tuple[int, ...] = ()

    @classmethod
    def none(cls, size: int) -> Self:
        """Returns zeros for `size` ranks."""
        zeros = (0,) * size
        return cls(zeros, zeros, zeros, zeros)


@dataclass(frozen=True, slots=True)
class HandleSizes:
    """The part of a DispatchHandle that is not on the device. It holds no tensor.

    splits: see Splits. num_tokens: T. num_rows: R. num_listed: N. forward: which one made the handle, for the order of
    backwards and for errors.
    """

    splits: Splits
    num_tokens: int
    num_rows: int
    num_listed: int
    forward: Forward = _NO_FORWARD

    def with_lists(self, lists: Sequence[Tensor]) -> "DispatchHandle":
        """Returns the handle with these tensors, in the order of `DispatchHandle.lists`."""
        row_of_pair_P, pairs_by_row_V, pair_starts_R, slot_V, expert_starts_e, *transport_lists = lists
        return DispatchHandle(
            *self._fields(),
            row_of_pair_P=row_of_pair_P,
            pairs_by_row_V=pairs_by_row_V,
            pair_starts_R=pair_starts_R,
            slot_V=slot_V,
            expert_starts_e=expert_starts_e,
            transport_lists=tuple(transport_lists),
        )

    def _fields(self) -> tuple[Splits, int, int, int, Forward]:
        return self.splits, self.num_tokens, self.num_rows, self.num_listed, self.forward


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchHandle(HandleSizes):
    """Maps received rows to pairs and back to tokens. Index lists are int32, on the device.

    row_of_pair_P: (P,) received row that each pair-buffer row computes on. A padding row repeats its chunk's last pair.
    pairs_by_row_V: (V,) pair-buffer rows of the real pairs, grouped by received row, ascending.
    pair_starts_R: (R + 1,) exclusive prefix sums of the number of pairs of each received row.
    slot_V: (V,) pair-buffer row of each received pair, in arrival order.
    expert_starts_e: (e + 1,) exclusive prefix sums of the number of pair-buffer rows of each local expert.
    transport_lists: private to the transport that made the handle.

    Lists of a step with static buffers, or without a wait for its sizes, have spare capacity: P and V are then upper
    bounds. The prefix sums do not count spare entries. They are zero, except in pairs_by_row_V, where nothing reads
    them.
    """

    row_of_pair_P: Tensor
    pairs_by_row_V: Tensor
    pair_starts_R: Tensor
    slot_V: Tensor
    expert_starts_e: Tensor
    transport_lists: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        lists: PairBuffer,
        expert_starts_e: Tensor,
        transport_lists: tuple[Tensor, ...],
        sizes: HandleSizes,
    ) -> "DispatchHandle":
        """Returns a handle with the lists of the pairs that this rank receives."""
        of_pairs = lists.row_of_pair_P, lists.pairs_by_row_V, lists.pair_starts_R, lists.slot_V
        return sizes.with_lists((*of_pairs, expert_starts_e, *transport_lists))

    @property
    def rows_are_reused(self) -> bool:
        """True if later dispatches overwrite the received rows: with symmetric memory, which needs no split sizes."""
        return len(self.splits.rows_in) > 1 and not any(self.splits.rows_in)

    def lists(self) -> tuple[Tensor, ...]:
        """Returns all tensors, to be saved for backward. `HandleSizes.with_lists` puts them back."""
        of_pairs = self.row_of_pair_P, self.pairs_by_row_V, self.pair_starts_R, self.slot_V
        return *of_pairs, self.expert_starts_e, *self.transport_lists

    def without_lists(self) -> HandleSizes:
        """Returns the part that holds no tensor."""
        return HandleSizes(*self._fields())


@dataclass(frozen=True, slots=True)
class PreparedDispatch:
    """The result of `prepare`.

    handle: the DispatchHandle of this step.
    weights_P: (P,) combine weight of each pair-buffer row, zero on padding rows.
    rows_RH: (R, H) received rows, if `prepare` already sent the x_TH that it got; else None, and `dispatch` sends them.
    """

    handle: DispatchHandle
    weights_P: Tensor
    rows_RH: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """The result of a collective that has started.

    result: returns it; call it once, on every rank. The current stream waits for it, the host does not.
    reserve_for: what the kernels launched before `result` must leave SMs to, if anything (`reserved_clusters`).

    A collective that was called with `overlap` may run at the same time as a kernel that the caller launches between
    the two calls. Call `result` right after that launch.
    """

    result: Callable[[], Tensor]
    reserve_for: ReserveFor | None = None

    @classmethod
    def done(cls, values: Tensor) -> Self:
        """Returns what has nothing to wait for."""
        return cls(lambda: values)


class Transport(Exchange, Protocol):
    """Moves rows and values of pairs between the ranks of one EP group.

    A transport's state is its buffers, byte counts and the sizes of previous steps. All that belongs to one step is in
    its handle. Every method is a collective. Each raises RuntimeError if the transport knows that a peer is lost.
    """

    @property
    def batch_invariant(self) -> bool:
        """True if one row goes back for each pair, and the token's rank adds them, by expert."""
        ...

    def prepare(self, routing: Routing, plan: RankPlan, x_TH: Tensor | None = None) -> PreparedDispatch:
        """Sends the row index and the weight of each pair to its destination rank, and returns the step's handle.

        plan: this rank's plan of the routing's counts (dispatch/plan.py).
        x_TH: the (T, H) rows to dispatch next, if the transport may send them already. All ranks pass rows, or none.
            The call may then return before the rank status has been checked: call `routing.check` after all launches.

        Blocks the host until this step's sizes arrive, unless they follow from T and K, or buffers are static or
        bounded.
        Raises:  ValueError or RuntimeError of `routing.check`. RuntimeError while a CUDA graph is captured, if the host
                 must read sizes. ValueError if buffers are static and the number of tokens changes or differs by rank.
        """
        ...

    def dispatch(self, x_TH: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        """Sends each row of x to every destination rank that needs it. The result is the received rows (R, H).

        Received rows are ordered by source rank, then token. With two_hop the source ranks are ordered by their number
        on their host, then by host. With symmetric memory there are gaps of undefined content between rows. They are
        valid until the second dispatch after this one or the next `prepare`, see `DispatchHandle.rows_are_reused`.
        x_TH is (T, H), any dtype, and must not change before the call of `result`.
        """
        ...

    def combine(
        self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle, *, overlap: bool = False
    ) -> Pending:
        """Sums the pairs of each received row, and sends the sums back. The result is each token's sum over destination
        ranks (T, H).

        values_PH: (P, H). weights_P: (P,) combine weights, or None for a plain sum. Both sums are accumulated in fp32
        at least and rounded to the dtype of values_PH, the first before it is sent. If the transport is batch-invariant
        there is one sum, on the token's rank: that of a single rank, bit for bit.
        With `overlap` no other combine may start before the call of `result`; `combine_scalars` is allowed.
        """
        ...

    def combine_scalars(self, parts_PZ: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        """Sends the value of each received pair to its source rank. The result is (N,) in the routing's order.

        parts_PZ: (P, Z), partial sums of each value, which are added. Padding rows are not sent. The spare entries of a
        routing, after its pairs, get zero.
        """
        ...
