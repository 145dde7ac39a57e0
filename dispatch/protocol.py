"""The transport contract: what any way of moving token rows between ranks must do, and the receipt it works from.

    opened = transport.open(routing, plan, x)          index lists and weights out        (forward only)
    rows   = transport.dispatch(x, opened.receipt)     rows out: each distinct (token, owner rank) row once
    out    = transport.combine(y, gates, receipt)  rows back: pairs summed per received row, then per token
    values = transport.combine_scalars(values, receipt)   one number per pair back

Combine weights are applied on the owner's rank, so dispatch and combine are plain data movers and each other's
backward. All are collectives of the EP group.

Legend: T tokens on this rank, H hidden size, N pairs this rank sends, U rows this rank sends, R rows this rank
receives, V pairs this rank receives, P rows of the pair buffer, e local experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

from torch import Tensor

from sonic_ep.groups import Exchange
from sonic_ep.kernels.dispatch.recv_index.reference import PairBuffer, RankPlan
from sonic_ep.routing import Routing


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows and pairs exchanged with each rank, in rank order (host integers); zeros where a transport needs none."""

    rows_out: tuple[int, ...]
    rows_in: tuple[int, ...]
    pairs_out: tuple[int, ...]
    pairs_in: tuple[int, ...]

    @classmethod
    def none(cls, size: int) -> Self:
        zeros = (0,) * size
        return cls(zeros, zeros, zeros, zeros)


@dataclass(frozen=True, slots=True)
class DispatchHandle:
    """How received rows and pairs map onto each other and back to tokens. Index lists are int32.

    row_of_pair_P: received row that each pair-buffer row computes on (padding repeats a real pair's).
    pairs_by_row_V, pair_starts_R: real pairs grouped by received row, ascending, and (R + 1) exclusive prefix sums.
    slot_V: pair-buffer row of each received pair, in arrival order.
    expert_starts_e: (e + 1) exclusive prefix sums of pair-buffer rows per local expert.
    transport_lists: what the transport that made the receipt knows of the rows that it sends, and nobody else reads.
    num_tokens, num_rows: T and R. num_listed: N.
    """

    row_of_pair_P: Tensor
    pairs_by_row_V: Tensor
    pair_starts_R: Tensor
    slot_V: Tensor
    expert_starts_e: Tensor
    transport_lists: tuple[Tensor, ...]
    splits: Splits
    num_tokens: int
    num_rows: int
    num_listed: int

    @classmethod
    def of(
        cls,
        lists: PairBuffer,
        expert_starts_e: Tensor,
        transport_lists: tuple[Tensor, ...],
        splits: Splits,
        *,
        num_tokens: int,
        num_rows: int,
        num_listed: int,
    ) -> Self:
        """With the owner's lists."""
        return cls(
            lists.row_of_pair_P,
            lists.pairs_by_row_V,
            lists.pair_starts_R,
            lists.slot_V,
            expert_starts_e,
            transport_lists,
            splits,
            num_tokens,
            num_rows,
            num_listed,
        )

    def lists(self) -> tuple[Tensor, ...]:
        """The tensors, for saving; `with_lists` puts them back."""
        return *(getattr(self, name) for name in _LISTS), *self.transport_lists

    def without_lists(self) -> "HandleSizes":
        """The host-side part alone, which holds no tensor."""
        return HandleSizes(self.splits, self.num_tokens, self.num_rows, self.num_listed)


@dataclass(frozen=True, slots=True)
class HandleSizes:
    """The host-side part of a receipt."""

    splits: Splits
    num_tokens: int
    num_rows: int
    num_listed: int

    def with_lists(self, lists: Sequence[Tensor]) -> DispatchHandle:
        row_of_pair_P, pairs_by_row_V, pair_starts_R, slot_V, expert_starts_e, *own = lists
        return DispatchHandle(
            row_of_pair_P,
            pairs_by_row_V,
            pair_starts_R,
            slot_V,
            expert_starts_e,
            tuple(own),
            self.splits,
            self.num_tokens,
            self.num_rows,
            self.num_listed,
        )


_LISTS = tuple(f.name for f in fields(DispatchHandle) if f.type is Tensor)


@dataclass(frozen=True, slots=True)
class PreparedDispatch:
    """What `prepare` brings: the receipt and weights_P (P,), the weight of each pair-buffer row, zero on padding.

    rows_RH: what `dispatch` of the rows that it was given would bring, if they are on their way already.
    settle: None where P and V are known. Else these are lists to compute on meanwhile, and it waits for the sizes: what
    was opened, its sizes being known, and whether it is this, narrowed. To be called before anything else is asked of
    the transport.
    """

    handle: DispatchHandle
    weights_P: Tensor
    rows_RH: Tensor | None = None
    resolve_sizes: "Callable[[], tuple[PreparedDispatch, bool]] | None" = None

    def cut_to(self, num_rows: int, num_pairs: int) -> "PreparedDispatch":
        """The same, P and V being known, where lists were made with room to spare."""
        handle = replace(
            self.handle,
            row_of_pair_P=self.handle.row_of_pair_P[:num_rows],
            pairs_by_row_V=self.handle.pairs_by_row_V[:num_pairs],
            slot_V=self.handle.slot_V[:num_pairs],
        )
        return PreparedDispatch(handle, self.weights_P[:num_rows], self.rows_RH)

    def speculative(
        self, num_rows: int, resolve_sizes: "Callable[[], tuple[PreparedDispatch, bool]]"
    ) -> "PreparedDispatch":
        """The same with this many rows at most, before the host knows P. Experts have none if P is more: nothing may
        be written behind `num_rows`. Lists must have room that is zero."""
        weights_P, starts_e = self.weights_P[:num_rows], self.handle.expert_starts_e
        starts_e = starts_e * (starts_e[-1:] <= weights_P.shape[0])
        handle = replace(self.handle, row_of_pair_P=self.handle.row_of_pair_P[:num_rows], expert_starts_e=starts_e)
        return PreparedDispatch(handle, weights_P, self.rows_RH, resolve_sizes)


class Transport(Exchange, Protocol):
    """Moves rows and pair values between the ranks of one EP group. Between calls it holds buffers and byte counts."""

    def prepare(
        self, routing: Routing, plan: RankPlan, x_TH: Tensor | None = None, layer_key: int | None = None
    ) -> PreparedDispatch:
        """Tell every owner which rows its pairs need and how they weigh. plan: this rank's, of the routing's counts.

        x_TH: rows to dispatch next, which need not wait for the lists. Every rank gives some, or none does. With them
        the routing may be unchecked still: call `routing.check` when all has been launched.
        whose: a number of the experts that compute on these rows, the same in every step, see speculation.py. With it
        sizes may be unknown: call `resolve_sizes` of what comes, if it has one, when the experts have been launched.
        """
        ...

    def dispatch(self, x_TH: Tensor, handle: DispatchHandle) -> Tensor:
        """Rows (R, H) as received: by source rank, then token. x_TH (T, H), any dtype. Backward: `combine_rows`."""
        ...

    def dispatch_async(self, x_TH: Tensor, handle: DispatchHandle) -> Callable[[], Tensor]:
        """`dispatch` of rows that are not needed yet: they travel beside what is launched next. What it returns gives
        them, must be called, and keeps x until then."""
        ...

    def clone_rows(self, rows_RH: Tensor) -> Tensor:
        """The rows of a dispatch, so that they last; otherwise they do until the second dispatch after it."""
        ...

    def combine_rows(self, rows_RH: Tensor, handle: DispatchHandle) -> Tensor:
        """Sum over ranks of each token's row (T, H), accumulated in fp32 at least. Backward: `dispatch`."""
        ...

    def combine(self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle) -> Tensor:
        """`combine_rows` of the (weighted) sums of each received row's pairs; these are rounded too. values_PH (P,
        H)."""
        ...

    def combine_async(self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle) -> "PendingCombine":
        """`combine_rows` of what is not needed yet: sums are made or travel beside what is launched next."""
        ...

    def combine_scalars(self, values_P: Tensor, handle: DispatchHandle) -> Tensor:
        """The value of each pair (N,) back on its token's rank, in the routing's order; padding is left out.

        Zero for what a routing lists behind its pairs.
        """
        ...

    def combine_scalars_async(self, parts_PZ: Tensor, handle: DispatchHandle) -> Callable[[], Tensor]:
        """`combine_scalars` of the sums of rows. The result must be called, right after something was launched that
        does not need it: a rank alone adds and returns beside that."""
        ...


@dataclass(frozen=True, slots=True)
class PendingCombine:
    """A combine under way. `result` must be called, right after what runs beside it was launched; until then nothing
    else may be combined. beside: are sums made on multiprocessors, which what runs beside must leave to them?"""

    result: Callable[[], Tensor]
    reserve_sms: bool = False


def combine_now(
    transport: Transport, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle
) -> PendingCombine:
    """`combine_async` where sums have nothing to run beside, or no way to."""
    out_TH = transport.combine(values_PH, weights_P, handle)
    return PendingCombine(lambda: out_TH)


def combine_scalars_now(transport: Transport, parts_PZ: Tensor, handle: DispatchHandle) -> Callable[[], Tensor]:
    """`combine_scalars_async`, likewise."""
    values_N = transport.combine_scalars(parts_PZ.sum(1), handle)
    return lambda: values_N
