"""`Program`: a traced pass, run again for any sizes.

A run has one array of *values*, 8 bytes each: numbers, addresses of tensors, and handles of those that it allocates.
All sizes are computed at once, by one function that is made of their expressions. Then a run is one call of launch.c,
which allocates, launches and frees; it is cut where an input is dropped, so that the memory is free for what follows,
and where the pass calls a function of torch.
Tensors of which only kernels know share allocations: small temporary ones one, and those that another pass needs
another, the *block*.
"""

import ctypes
import math
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, cast, final

import torch
from torch import Tensor

from sonic_ep.kernels.experts.tile_counter import tile_counter
from sonic_ep.kernels.program.native import (
    ITEM,
    address_of,
    ensure_context,
    launcher,
    new_event,
    number_of_device_type,
    raw_stream,
    tensor_at,
    tensors_of,
)
from sonic_ep.kernels.program.sizes import Number, Size
from sonic_ep.kernels.program.trace import Item, Shape, Slot, Trace, contiguous_strides, product
from sonic_ep.kernels.program.values import Numbers, TensorOperand, TorchCall, bits_of

_ALIGNMENT = 256  # bytes, of tensors that share an allocation, as torch's allocator gives at least
_INPUT_ALIGNMENT = 16  # bytes, that kernels need
_SHARED, _BLOCK, _PACK = -1, -2, -3  # the numbers of the tensors that others share: the last ones
# A tensor of as many bytes, or of that share of the largest, has an allocation of its own, and is freed when nobody
# needs it. Bytes are counted with the trace's usual sizes.
_OWN_BYTES, _OWN_SHARE = 2**20, 1 / 16


@final
class Program:
    """trace: of a pass, finished. inputs: the numbers of its tensors that a run is given. outputs: the slots that a run
    returns. packed: small outputs of one dtype, which share an allocation. later: slots that another pass gets. A run
    returns those that are tensors of their own behind the outputs, and then the block, if there is one.

    has_output: if False, a run leaves out what `begin_output` has marked.
    in_block: for each later slot, where it starts in the block, in bytes; None for a tensor of its own.
    """

    def __init__(
        self,
        trace: Trace,
        inputs: Sequence[int],
        outputs: Sequence[Slot],
        later: Sequence[Slot] = (),
        packed: Sequence[Slot] = (),
        *,
        has_output: bool = True,
    ) -> None:
        self._without_output: Program | None = None
        self._make = None if trace.output_start is None else partial(Program, trace, inputs, outputs, later, packed)
        self.device, numbers, bytes_of = trace.device, Numbers(), _bytes_of(trace)
        own_bytes = max(_OWN_BYTES, _OWN_SHARE * max(_usually(size, trace) for size in bytes_of.values()))
        pack = {slot.buffer.index: bytes_of[slot.buffer.index] for slot in packed}
        own = {slot.buffer.index for slot in outputs} | set(pack)
        small = {index for index, num_bytes in bytes_of.items() if _usually(num_bytes, trace) < own_bytes} - own
        block = {slot.buffer.index: bytes_of[slot.buffer.index] for slot in later if slot.buffer.index in small}
        shared = {index: bytes_of[index] for index in small if index not in block}
        of_pack = packed[0].dtype if packed else torch.uint8
        together = [(_PACK, pack, of_pack), (_BLOCK, block, torch.uint8), (_SHARED, shared, torch.uint8)]
        allocate = [each for group in together for each in _allocation(*group, numbers)]
        self.in_block = [
            numbers.offset_in[slot.buffer.index][1] + slot.offset * slot.itemsize
            if slot.buffer.index in block
            else None
            for slot in later
        ]
        events = [new_event() if event is None else event for event in trace.events]
        items = _without(trace.items if has_output else _without_output(trace), small | set(pack))
        results, views, bases = list[int](), list[Item](), set[int]()
        own_later = [slot for slot in later if slot.buffer.index not in block]
        for slot in (*outputs, *packed, *own_later):
            if _is_whole(slot) and slot.buffer.index not in pack:
                results.append(slot.buffer.index)
            else:
                results.append(-10 - len(views))  # the number of a view
                views.append(("view", results[-1], slot))
                bases.add(_PACK if slot.buffer.index in pack else slot.buffer.index)
        results += [_BLOCK] if block else []
        freed = {item[1] for item in items if item[0] == "free"}
        left = bytes_of.keys() - small - set(pack) - freed  # what the pass still had at its end
        frees = [("free", index) for index in (left | ({_SHARED} if shared else set()) | bases) - set(results)]
        self._num_inputs = len(inputs)
        for item in (*allocate, *items, *views, *frees):
            numbers.add(item, trace, events, inputs)
        numbers.finish()
        self._segments, self._outputs = numbers.segments, [numbers.handle_of(index) for index in results]
        self._allocations, self._first_handle = numbers.allocations, numbers.first_handle
        self.extra = list(trace.extra)  # names of further inputs
        extra = [slot.buffer.index for slot in trace.extra.values()]
        counter = [] if trace.counter_index is None else [trace.counter_index]
        self._has_counter = bool(counter)
        self._on_input = [numbers.places.get(index, []) for index in (*inputs, *extra, *counter)]
        self._values, self._floats, self._last = numbers.values, numbers.floats, ((), numbers.values)
        self._first, self._end = numbers.first_size, numbers.first_size + len(numbers.expressions)
        self._native = numbers.native
        self._streams: dict[int, tuple[object, int]] = {}
        self._others: list[torch.cuda.Stream] = []  # of the lanes behind the first
        self._num_lanes = 1 + max(
            (item[2] for item in trace.items if item[0] == "record" or item[0] == "wait"), default=0
        )
        self._device = number_of_device_type(self.device.type), self.device.index or 0
        self._held, self._later = trace.held, [_Later(tuple(slot.shape), slot.dtype) for slot in later]
        names = ",".join(trace.names)
        self._derive = eval(f"lambda {names}: ({''.join(each + ',' for each in numbers.expressions)})", {})
        self._trace_guards, self._names = trace.guards, names
        self._guards: Callable[..., tuple[object, ...]] | None = None  # once the other passes have been traced
        self._expected: tuple[object, ...] = ()

    def fits(self, *sizes: int) -> bool:
        """Returns True if a run with these sizes does what the traced pass does, and those that share its guards."""
        guards = self._guards
        if guards is None:
            guards = self._guards = eval(
                f"lambda {self._names}: ({''.join(each + ',' for each in self._trace_guards)})", {}
            )
            self._expected = tuple(self._trace_guards.values())
        return guards(*sizes) == self._expected

    def part_of_block(self, number: int, block: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Returns the tensor of a later slot that is in the block of a run with these sizes."""
        slot, first = self._later[number], self.in_block[number]
        first, *shape = (_at(size, self._names, sizes) for size in (first, *slot.shape))
        return block[first : first + math.prod(shape) * slot.itemsize].view(slot.dtype).view(shape)

    def _streams_of(self, stream: int) -> int:
        """Returns the address of the streams of all lanes, where this one is current."""
        if stream not in self._streams:
            # torch's streams come from a pool and are never destroyed.
            while len(self._others) < self._num_lanes - 1:
                self._others.append(torch.cuda.Stream(self.device))
            lanes = (ctypes.c_void_p * self._num_lanes)(stream, *[each.cuda_stream for each in self._others])
            self._streams[stream] = lanes, address_of(lanes)
        return self._streams[stream][1]

    def _values_for(self, sizes: tuple[int, ...]) -> "array[int]":
        """Returns the values of a step with these sizes, without addresses."""
        values, derived = self._values[:], list(self._derive(*sizes))
        for index in self._floats:
            derived[index] = bits_of(derived[index])
        values[self._first : self._end] = array("q", derived)
        self._last = sizes, values[:]
        return values

    def run_without_output(self, sizes: tuple[int, ...], inputs: list[Tensor]) -> list[Tensor]:
        """Likewise, with zeros in place of the first output, which the pass has to mark."""
        if self._without_output is None:
            assert self._make is not None
            self._without_output = self._make(has_output=False)
        outputs = self._without_output.run(sizes, inputs)
        outputs[0].zero_()
        return outputs

    def run(self, sizes: tuple[int, ...], inputs: list[Tensor]) -> list[Tensor]:
        """Launches the pass on the current stream. Returns the outputs. inputs: is emptied, so that memory is freed."""
        last_sizes, last = self._last
        values = last[:] if sizes == last_sizes else self._values_for(sizes)
        if self._has_counter:
            inputs.append(tile_counter(inputs[0], self_resetting=True))
        for number, places in enumerate(self._on_input):
            address = inputs[number].data_ptr()
            if address % _INPUT_ALIGNMENT:
                inputs[number] = inputs[number].clone()
                address = inputs[number].data_ptr()
            for place, offset in places:
                values[place] = address + values[offset]
        launch, streams, where = launcher(), self._streams_of(raw_stream(self.device)), values.buffer_info()[0]
        items, arguments = self._native[:2]
        ensure_context(self.device)
        for first, count, calls, dropped in self._segments:
            error = launch(items + first * ITEM.size, count, arguments, where, streams, *self._device)
            if error:
                self._raise(error, first - 1 - error, values)
            for call in calls:
                self._call(call, values)
            for number in dropped:
                inputs[number] = None  # type: ignore[call-overload]
        inputs.clear()
        return tensors_of([values[place] for place in self._outputs])

    def _call(self, call: "TorchCall", values: "array[int]") -> None:
        stream = torch.cuda.stream(self._others[call.lane - 1]) if call.lane else nullcontext()
        operands = [
            tensor_at(values[each.address], *each.sizes_and_strides(values), each.dtype, self._device)
            if isinstance(each, TensorOperand)
            else [values[place] for place in each]
            for each in call.operands
        ]
        out, *given = cast(list[Tensor], operands)
        try:
            with without_autocast(self.device.type), stream:
                if call.into:
                    call.function(*given, out=out)
                else:
                    out.copy_(call.function(*given))
        except BaseException:
            self._free(values)
            raise

    def _free(self, values: "array[int]") -> None:
        """Frees what has been allocated."""
        tensors_of([handle for handle in values[self._first_handle :] if handle])

    def _raise(self, error: int, item: int, values: "array[int]") -> None:
        """Raises what an item's error means, and frees what has been allocated."""
        self._free(values)
        if error > 0:
            raise RuntimeError(f"CUDA returned error {error}")
        if item in self._allocations:
            places, dtype = self._allocations[item]
            shape = [values[place] for place in places]
            torch.empty(shape, dtype=dtype, device=self.device)  # raises the error again, with all that torch says
            raise torch.OutOfMemoryError(f"no memory for a tensor of shape {shape} and dtype {dtype}")
        raise RuntimeError(f"item {item} failed")


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Returns a context without autocast, which would change the dtypes of operands and sums in plain torch."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _place(index: int, members: dict[int, Number], numbers: Numbers) -> Number:
    """Gives each member a place in the tensor `index`. Returns the bytes that they need."""
    total: Number = 0
    for member, num_bytes in members.items():
        numbers.offset_in[member] = index, total
        total = total - (-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return total


def _allocation(index: int, members: dict[int, Number], dtype: torch.dtype, numbers: Numbers) -> list[Item]:
    size = _place(index, members, numbers)
    return [("allocate", index, (size // dtype.itemsize,), dtype)] if members else []


class _Later(NamedTuple):
    shape: Shape
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def _at(size: Number, names: str, sizes: tuple[int, ...]) -> int:
    return eval(size.text, dict(zip(names.split(","), sizes, strict=True))) if type(size) is Size else size


def _usually(size: Number, trace: Trace) -> int:
    return eval(size.text, dict(trace.usual)) if type(size) is Size else size


def _bytes_of(trace: Trace) -> dict[int, Number]:
    """Returns the bytes of what a pass allocates, by the numbers of its tensors."""
    items = cast(list[tuple[str, int, Shape, torch.dtype]], [item for item in trace.items if item[0] == "allocate"])
    return {index: product(shape) * dtype.itemsize for _, index, shape, dtype in items}


def _is_whole(slot: Slot) -> bool:
    """Returns True if a slot is all of its buffer."""
    described = (slot.offset, slot.dtype, *map(_text, (*slot.shape, *slot.strides)))
    buffer = slot.buffer
    return described == (0, buffer.dtype, *map(_text, (*buffer.shape, *contiguous_strides(buffer.shape))))


def _text(size: Number) -> str:
    return size.text if type(size) is Size else str(size)


def _without_output(trace: Trace) -> list[Item]:
    """Returns the items of a trace without the work that makes the first output."""
    start = trace.output_start
    assert start is not None
    return [
        *trace.items[:start],
        *[item for item in trace.items[start:] if item[0] in ("allocate", "free", "record", "wait")],
    ]


def _without(items: list[Item], shared: set[int]) -> list[Item]:
    """Returns the items without allocations and frees of tensors that share one."""
    return [item for item in items if item[0] not in ("free", "allocate") or item[1] not in shared]
