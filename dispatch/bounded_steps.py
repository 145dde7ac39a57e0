"""Steps of a layer on several ranks whose sizes the host does not know when it launches them.

docs/how_a_step_runs.md#sizes-across-ranks says what a bound of sizes is, and what happens if it does not hold.

Running a program or the code is each rank's own choice. Either way it sends the same, in the same stages. All ranks
know the same sizes, so they have the same bound. Buffers that are too small for it are allocated by the code, once the
ranks have met in the exchange of counts, and know that they run the same layer in the same mode.

In a region of activation checkpointing, a recomputation has the bound of its forward, see checkpoint_regions.py. Each
rank tells the others that it is in one, see groups/order.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Self, TypeVar, final

import torch

from sonic_ep.dispatch.checkpoint_regions import Regions, compared_end, present_region
from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.groups import EPGroup
from sonic_ep.groups.order import NO_ORDER, Forward, Ran
from sonic_ep.kernels.program.mailbox import Mailbox
from sonic_ep.kernels.route.status.reference import HEADER
from sonic_ep.routing import AsyncSplitSizes, SplitSizes

Layer = TypeVar("Layer")
_MARGIN = 33 / 32  # bound / what the last steps needed
_UNIT = 128  # rows, of which a bound is a multiple: kernels are compiled for multiples of 16
_WINDOW = 64  # steps; the bound holds the largest of the last 64 to 127


class LayerTransport(NamedTuple):
    """The transport of a layer and its rows. is_static: whether the layer's present steps have static buffers."""

    transport: SymmetricTransport
    row_bytes: int
    device: torch.device
    is_static: bool


class Step(NamedTuple):
    """One call of a layer.

    bound: of its sizes; None with static buffers, which are large enough for every step. tokens: the most of any rank.
    """

    via: LayerTransport
    bound: SizeBound | None
    tokens: int

    def holds(self, sizes: SplitSizes) -> bool:
        """Returns True if this is enough."""
        return self.bound is None or self.bound.holds(SizeBound.needed_by(sizes))


@dataclass(slots=True)
class _Call:
    """What is decided for one call. least: see `SymmetricTransport`. as_code: whether the code runs for the router."""

    step: Step | None
    transport: SymmetricTransport | None
    least: SizeBound | None
    as_code: bool = False


@final
class BoundedSteps(Generic[Layer]):
    """The steps of a layer on several ranks. A copy starts without any.

    check: gets the status fields of all ranks, rank by rank, and what this rank has sent with its own, see `Order`.
    Raises if one has an error. transport_of: returns the transport of a layer, or None if it does not use symmetric
    memory.
    """

    def __init__(
        self,
        group: EPGroup,
        check: Callable[[list[int], list[Ran]], None],
        transport_of: Callable[[Layer], LayerTransport | None],
    ) -> None:
        self._group, self._check, self._transport_of = group, check, transport_of
        self._window = _Window()
        self._regions, self._call = Regions[_Call](), _Call(None, None, None)
        self._mailbox: Mailbox | None = None
        self._pending: list[Ran] | None = None  # what was sent with the statuses that nobody has read, if there are any
        self.repeats_code = False  # whether the present call recomputes one of which the router ran its code
        self.order_of_step = NO_ORDER  # of backwards, which the exchange of counts sends, from `start` on

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), (self._group, self._check, self._transport_of)

    def begin(self, layer: Layer, *, is_replayed: bool = False) -> Step | None:
        """Returns the next step. None if the code has to run: the first call has no bound, or no buffers for it yet.

        That is so on every rank whose layer is in the same mode. A collective at the first use of the transport;
        buffers are never allocated here. is_replayed: whether its routing is, without an exchange of counts.
        """
        region, is_repeated = present_region(), False
        if region is None:
            call = self._new_call(layer, in_region=False)
        else:
            call, is_repeated = self._regions.call(region, lambda: self._new_call(layer, in_region=True))
        self._call, self.repeats_code = call, is_repeated and call.as_code
        if call.transport is not None:
            call.transport.least = call.least  # so ranks that run their code send to the same places
        if region is not None:
            is_last = not is_replayed and compared_end(region)
            self._group.order.add_region(self._group.layer, is_last=is_last)
        return call.step

    def _new_call(self, layer: Layer, *, in_region: bool) -> _Call:
        largest = self._window.largest()
        via = self._transport_of(layer) if in_region or largest is not None else None
        if via is None or largest is None:
            return _Call(None, None if via is None else via.transport, None)
        bound, step = bound_of(largest), None
        if via.device.type == "cuda" and (via.is_static or via.transport.holds(via.row_bytes, bound)):
            step = Step(via, None if via.is_static else bound, bound.tokens)
        return _Call(step, via.transport, bound)

    def decided(self, *, as_code: bool) -> None:
        """Notes whether the code runs for the router in the present call, for its recomputation."""
        self._call.as_code = as_code

    @property
    def mailbox(self) -> Mailbox:
        """Where the exchange of counts of a program brings the sizes of a step."""
        if self._mailbox is None:
            self._mailbox = Mailbox(SplitSizes.num_values(self._group.size, HEADER))
        return self._mailbox

    def start(self) -> Callable[[], None]:
        """Call it before a program runs that exchanges counts. Returns what to call when its backward begins.

        Raises what `check` raises of the program before, if that was recomputed: torch stops there ahead of `finish`.
        """
        if self._pending is not None:
            self._read()
        order = self._group.order
        self.order_of_step = order.send()
        self._pending = order.sent
        return partial(order.add, Forward(self._group.layer, order.exchange))

    def finish(self, step: Step) -> SplitSizes | None:
        """Blocks until the sizes of that program have arrived. Returns None if they are within the bound.

        Raises what `check` raises.
        """
        sizes = self._read()
        self.learn(sizes)
        return None if step.holds(sizes) else sizes

    def _read(self) -> SplitSizes:
        sent, self._pending = self._pending, None
        assert sent is not None
        sizes, status_fields = SplitSizes.unpacked(self.mailbox.read().tolist(), self._group.size)
        self._check(status_fields, sent)
        return sizes

    def arriving(self, on_device: torch.Tensor | None = None) -> AsyncSplitSizes:
        """Returns the sizes of a program that is no step with a bound. Read them before the next step.

        on_device: the same on the device, for a program that is launched before they are read.
        """
        self._pending, sent = None, self._group.order.sent
        return AsyncSplitSizes(
            torch.empty(0, device="cpu") if on_device is None else on_device,
            self._group.size,
            lambda status_fields: self._check(status_fields, sent),
            zeroed_on_error=on_device is not None,
            copy=self.mailbox,
            exchange=self._group.order.exchange,
        )

    def observe(self, split_sizes: AsyncSplitSizes | None) -> None:
        """Learns from a step that the code ran. Every rank calls it, `learn` or `finish` in every step."""
        sizes = None if split_sizes is None else split_sizes.sizes_read
        if sizes is not None:
            self.learn(sizes)

    def learn(self, sizes: SplitSizes) -> None:
        """Learns what a step needed."""
        self._window.add(SizeBound.needed_by(sizes))


class _Window:
    """The needs of the largest of the last `_WINDOW` to 2 * `_WINDOW` - 1 steps: of this window and the one before."""

    def __init__(self) -> None:
        self._recent: SizeBound | None = None
        self._before: SizeBound | None = None
        self._steps = 0  # of this window

    def largest(self) -> SizeBound | None:
        return self._before if self._recent is None else self._recent.joined(self._before)

    def add(self, needed: SizeBound) -> None:
        self._recent = needed.joined(self._recent)
        self._steps += 1
        if self._steps == _WINDOW:
            self._recent, self._before, self._steps = None, self._recent, 0


def bound_of(needed: SizeBound) -> SizeBound:
    """Returns the bound of a step after steps of which the largest needed this."""
    rows, pairs = (_whole_units(round(size * _MARGIN)) for size in needed[1:])
    return SizeBound(needed.tokens, rows, max(rows, pairs))


def _whole_units(rows: int) -> int:
    return -(-rows // _UNIT) * _UNIT
