"""Recorded steps of a layer on several ranks: their sizes, when the ranks record one, and whether it was large enough.

A recorded step (kernels/launch_sequence/) has the sizes that it was recorded with. Across ranks, sizes change from step
to step. So a step is recorded with a bound: a little more than the largest of the last steps needed, rounded up to one
of a few levels. The bound grows at once and shrinks rarely, over several levels at once: otherwise a layer would record
every level that its routing passes, and a step slightly larger than the last ones would run twice.
If the true sizes exceed the bound, the devices send nothing. The host reads the sizes after it has launched everything,
and then runs the layer's code on the same routing.

Two rules keep the ranks together:

  Repeating launches or running the code is each rank's own choice. Either way it sends the same, in the same stages.
  Recording runs the step twice more, so all ranks do it in the same calls: they count calls alike, by sizes that all of
  them know, and exchange their problems first.

Legend: S ranks of the EP group, K experts per token.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Self, final

import torch

from sonic_ep.async_d2h import copies_recorded, recorded_order
from sonic_ep.dispatch.speculation import SizeBound
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.groups import EPGroup
from sonic_ep.groups.order import NO_ORDER, Forward
from sonic_ep.kernels.launch_sequence.mailbox import Mailbox
from sonic_ep.kernels.launch_sequence.recorded_calls import Steps, has_saved_tensor_hooks
from sonic_ep.kernels.launch_sequence.replay import HasAddress
from sonic_ep.kernels.route.status.reference import HEADER
from sonic_ep.routing import AsyncSplitSizes, SplitSizes

_LOG = logging.getLogger("sonic_ep.launches")
_MARGIN = 33 / 32  # bound / what the last steps needed
_WINDOW = 64  # steps; the bound holds the largest of the last 64 to 127
_LEVELS = 16  # below a balanced step, and in each doubling above it
_MIN_UNIT = 128  # rows
_MAX_BOUNDS = 8  # that are recorded; where the bound changes with every length, the code runs
_FIRST_CALLS = 3  # the ranks may record in the first three calls with a bound, then in the 4th, 8th, 16th, ...


class LayerTransport(NamedTuple):
    """The transport of a layer and its rows. is_static: whether the layer's present steps have static buffers."""

    transport: SymmetricTransport
    row_bytes: int
    device: torch.device
    is_static: bool


class Step(NamedTuple):
    """One call of a layer.

    bound: of its sizes; None with static buffers, which are large enough for every step. tokens: the most of any rank.
    may_record: whether the ranks may record in this call.
    """

    via: LayerTransport
    bound: SizeBound | None
    tokens: int
    may_record: bool

    @property
    def key(self) -> object:
        """What the launches of the step depend on."""
        return self.bound, self.tokens, self.via.transport.capacity_of_counts


class _Number(NamedTuple):
    """An integer of this step, in place of a tensor: launches that were recorded with its address get the integer.

    It must be below 2^57, as an address is (driver.c).
    """

    value: int

    def data_ptr(self) -> int:
        return self.value


@final
class BoundedSteps(Steps):
    """The steps of a layer on several ranks.

    check: gets the status fields of all ranks, rank by rank, and raises if one has an error. transport_of: returns the
    transport of a layer, or None if it does not use symmetric memory.
    """

    def __init__(
        self,
        group: EPGroup,
        K: int,
        check: Callable[[list[int]], None],
        transport_of: Callable[[Any], LayerTransport | None],
    ) -> None:
        super().__init__()
        self._group, self._K, self._check, self._transport_of = group, K, check, transport_of
        self._window = _Window()
        self._calls: Counter[object] = Counter()
        self._recorded: set[object] = set()  # bounds
        self._mailbox: Mailbox | None = None
        self._order = _Number(NO_ORDER)

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self._group, self._K, self._check, self._transport_of)

    def begin(self, layer: Any) -> Step | None:
        """Counts a call. Returns None, on every rank, if the code has to run: the first call has no bound."""
        largest = self._window.largest()
        via = None if largest is None else self._transport_of(layer)
        if via is None or largest is None:
            return None
        bound = bound_of(largest, self._K)
        via.transport.least_tokens = bound.tokens  # so ranks that run their code send to the same places
        self._calls[bound] += 1
        number = self._calls[bound]
        in_time = number <= _FIRST_CALLS or number & (number - 1) == 0
        may_record = in_time and (bound in self._recorded or len(self._recorded) < _MAX_BOUNDS)
        if may_record:
            self._recorded.add(bound)
        return Step(via, None if via.is_static else bound, bound.tokens, may_record)

    def may_record(self, step: Step, signature: object, *, known: bool) -> bool:
        """Returns True, on every rank, if the ranks may record now, whatever each of them has recorded."""
        return step.may_record

    def agreed(self, layer: Any, problem: str | None, *, known: bool = False) -> bool:
        """Returns True, on every rank, if no rank has a problem and not all know this step. A collective."""
        replies = self._group.all_gather_object((problem, known, (layer.training, torch.is_grad_enabled())))
        problems = [f"rank {rank}: {text}" for rank, (text, _, _) in enumerate(replies) if text is not None]
        if problems:
            _LOG.info("launches are not recorded now: %s", "; ".join(problems))
        all_known, alike = all(known for _, known, _ in replies), len({mode for _, _, mode in replies}) == 1
        return alike and not problems and not all_known

    def problem_with_call(self, step: Step, num_tokens: int) -> str | None:
        """Returns why a call cannot repeat launches."""
        if num_tokens > step.tokens:
            return f"there are {num_tokens} tokens, and buffers for {step.tokens}"
        # Activation checkpointing compares the shapes that its two calls save, and the bound can change between them.
        return "saved-tensor hooks" if has_saved_tensor_hooks() else None

    def bounded(self, step: Step) -> AbstractContextManager[object]:
        """Returns a context in which the code runs with the sizes of the step. A collective."""
        if self._mailbox is None:
            self._mailbox = Mailbox(SplitSizes.num_values(self._group.size, HEADER))
        if step.bound is None:
            return nullcontext()
        step.via.transport.reserve(step.via.row_bytes, step.bound)
        return step.via.transport.bounded_by(step.bound)

    @property
    def sizes(self) -> torch.Tensor:
        """Pinned memory from which `finish` reads the sizes of a step."""
        assert self._mailbox is not None
        return self._mailbox.values

    @property
    def order_of_step(self) -> int:
        """The order of backwards that the exchange of counts sends, from `start` on."""
        return self._order.value

    def captured(self) -> AbstractContextManager[object]:
        """Returns a context in which copies of sizes go to where `finish` reads them."""
        assert self._mailbox is not None
        return copies_recorded(self._mailbox.values, self._mailbox.order)

    def state(self, step: Step) -> Sequence[HasAddress]:
        """Returns the tensors of the transport that launches refer to, the destination of sizes, and the order."""
        transport, row_bytes, device, _ = step.via
        transport.raise_if_lost()
        assert self._mailbox is not None
        order = recorded_order()
        memory = transport.memory(row_bytes, step.tokens, device)
        return [self._mailbox.values, self._order if order is None else order, *memory]

    def start(self) -> Callable[[], None]:
        """Call it before launches are repeated. Their exchange of counts sends the order of backwards."""
        assert self._mailbox is not None
        self._mailbox.empty()
        order = self._group.order
        self._order = _Number(order.send())
        return partial(order.add, Forward(self._group.layer, order.exchange))

    def finish(self, step: Step) -> SplitSizes | None:
        """Blocks until the sizes of the repeated step have arrived. Returns None if they are within the bound.

        Raises what `check` raises.
        """
        assert self._mailbox is not None
        sizes, status_fields = SplitSizes.unpacked(self._mailbox.read(), self._group.size)
        self._check(status_fields)
        needed = self._learn(sizes)
        fits = step.bound is None or step.bound.holds(needed.with_tokens(step.bound.tokens))
        return None if fits else sizes

    def observe(self, split_sizes: AsyncSplitSizes | None) -> None:
        """Learns from a step that the code ran. Every rank calls it, or `finish`, in every step."""
        sizes = None if split_sizes is None else split_sizes.sizes_read
        if sizes is not None:
            self._learn(sizes)

    def _learn(self, sizes: SplitSizes) -> SizeBound:
        """Returns what a step needed."""
        needed = SizeBound.needed_by(sizes)
        self._window.add(needed)
        return needed


class _Window:
    """What the largest of the last `_WINDOW` to 2 * `_WINDOW` - 1 steps needed: of this window and the one before."""

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


def bound_of(needed: SizeBound, K: int) -> SizeBound:
    """Returns the bound of a step after steps of which the largest needed this."""
    rows, pairs = (_rounded_up(round(size * _MARGIN), needed.tokens * K) for size in needed[1:])
    return SizeBound(needed.tokens, rows, max(rows, pairs))


def _rounded_up(size: int, balanced: int) -> int:
    """Returns the level that holds so many rows. balanced: those of a balanced step. (8193, 8192) gives 8704."""
    below = max(balanced, 1)
    while 2 * below <= size:
        below *= 2
    unit = max(_MIN_UNIT, -(-below // (_LEVELS * _MIN_UNIT)) * _MIN_UNIT)
    return -(-size // unit) * unit
