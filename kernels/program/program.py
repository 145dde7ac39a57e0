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
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from sonic_ep.kernels.experts.tile_counter import tile_counter
from sonic_ep.kernels.program.foreign import Arguments
from sonic_ep.kernels.program.native import (
    ADDMM,
    ALLOCATE,
    CALL,
    COPY,
    FREE,
    ITEM,
    KERNEL,
    MAX_ARGUMENTS,
    MAX_DIMS,
    RECORD,
    SET,
    VIEW,
    WAIT,
    address_of,
    ensure_context,
    launcher,
    new_event,
    number_of_device_type,
    number_of_dtype,
    raw_stream,
    tensor_at,
    tensors_of,
)
from sonic_ep.kernels.program.sizes import Size
from sonic_ep.kernels.program.trace import Slot, Trace, contiguous_strides, product

_ALIGNMENT = 256  # bytes, of tensors that share an allocation, as torch's allocator gives at least
_INPUT_ALIGNMENT = 16  # bytes, that kernels need
_SHARED, _BLOCK, _PACK = -1, -2, -3  # the numbers of the tensors that others share: the last ones
# A tensor of as many bytes, or of that share of the largest, has an allocation of its own, and is freed when nobody
# needs it. Bytes are those of the trace's usual sizes.
_OWN_BYTES, _OWN_SHARE = 2**20, 1 / 16


@final
class Program:
    """trace: of a pass, finished. inputs: the numbers of its tensors that a run is given. outputs: the slots that a run
    returns. packed: small outputs of one dtype, which share an allocation. later: slots that another pass gets. A run
    returns those that are tensors of their own behind the outputs, and then the block, if there is one.

    in_block: for each later slot, where it starts in the block, in bytes; None for a tensor of its own.
    """

    def __init__(
        self,
        trace: Trace,
        inputs: Sequence[int],
        outputs: Sequence[Slot],
        later: Sequence[Slot] = (),
        packed: Sequence[Slot] = (),
    ) -> None:
        self.device, numbers, own_bytes = trace.device, _Numbers(), _own_bytes(trace)
        bytes_of = {what[0]: product(what[1]) * what[2].itemsize for kind, *what in trace.items if kind == "allocate"}
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
        items = _without(trace.items, small | set(pack))
        results, views, bases = list[int](), list[tuple[Any, ...]](), set[int]()
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
        self._streams: dict[int, tuple[Any, int]] = {}
        self._num_lanes = 1 + max((item[-1] for item in trace.items if item[0] in ("record", "wait")), default=0)
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
            others = [torch.cuda.Stream(self.device).cuda_stream for _ in range(1, self._num_lanes)]
            lanes = (ctypes.c_void_p * self._num_lanes)(stream, *others)
            self._streams[stream] = lanes, address_of(lanes)
        return self._streams[stream][1]

    def _values_for(self, sizes: tuple[int, ...]) -> Any:
        """Returns the values of a step with these sizes, without addresses."""
        values, derived = self._values[:], list(self._derive(*sizes))
        for index in self._floats:
            derived[index] = _bits(derived[index])
        values[self._first : self._end] = array("q", derived)
        self._last = sizes, values[:]
        return values

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
            for function, operands in calls:
                self._call(function, operands, values)
            for number in dropped:
                inputs[number] = None  # type: ignore[call-overload]
        inputs.clear()
        return tensors_of([values[place] for place in self._outputs])

    def _call(self, function: Callable[..., Tensor], operands: "list[_Tensor]", values: Any) -> None:
        try:
            out, *given = [
                tensor_at(values[each.address], *each.sizes_and_strides(values), each.dtype, self._device)
                for each in operands
            ]
            with torch.autocast(self.device.type, enabled=False):
                out.copy_(function(*given))
        except BaseException:
            self._free(values)
            raise

    def _free(self, values: Any) -> None:
        """Frees what has been allocated."""
        tensors_of([handle for handle in values[self._first_handle :] if handle])

    def _raise(self, error: int, item: int, values: Any) -> None:
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


def _place(index: int, members: dict[int, Any], numbers: "_Numbers") -> Any:
    """Gives each member a place in the tensor `index`. Returns the bytes that they need."""
    total: Any = 0
    for member, num_bytes in members.items():
        numbers.offset_in[member] = index, total
        total = total - (-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return total


def _allocation(index: int, members: dict[int, Any], dtype: torch.dtype, numbers: "_Numbers") -> list[tuple[Any, ...]]:
    size = _place(index, members, numbers)
    return [("allocate", index, (size // dtype.itemsize,), dtype)] if members else []


class _Later(NamedTuple):
    shape: tuple[Any, ...]
    dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def _at(size: Any, names: str, sizes: tuple[int, ...]) -> int:
    return eval(size.text, dict(zip(names.split(","), sizes, strict=True))) if type(size) is Size else size


def _usually(size: Any, trace: Trace) -> int:
    return eval(size.text, dict(trace.usual)) if type(size) is Size else size


def _own_bytes(trace: Trace) -> float:
    sizes = [product(what[1]) * what[2].itemsize for kind, *what in trace.items if kind == "allocate"]
    return max(_OWN_BYTES, _OWN_SHARE * max(_usually(size, trace) for size in sizes))


def _is_whole(slot: Slot) -> bool:
    """Returns True if a slot is all of its buffer."""
    described = (slot.offset, slot.dtype, *map(_text, (*slot.shape, *slot.strides)))
    buffer = slot.buffer
    return described == (0, buffer.dtype, *map(_text, (*buffer.shape, *contiguous_strides(buffer.shape))))


def _text(size: Any) -> str:
    return size.text if type(size) is Size else str(size)


def _without(items: list[tuple[Any, ...]], shared: set[int]) -> list[tuple[Any, ...]]:
    """Returns the items without allocations and frees of tensors that share one."""
    return [item for item in items if item[0] not in ("free", "allocate") or item[1] not in shared]


class _Native(NamedTuple):
    """An item of launch.c, but for its arguments."""

    kind: int
    lane: int = 0
    object: int = 0
    memory: int = 0
    grid: Sequence[Any] = (0, 0, 0)
    threads: int = 0
    shared_bytes: int = 0
    overlaps: bool = False


@final
class _Numbers:
    """The values of a program: constants, then sizes, addresses and handles. Until `finish`, a size is -1 - its number,
    an address a pair of a tensor and the text of an offset, and a handle a `_Handle`.

    segments: the first item of each, how many it has, and what is called and which inputs are dropped behind it.
    allocations: by item, the values of the shape, and the dtype. places: by tensor, pairs of values of an address and
    of an offset.
    """

    def __init__(self) -> None:
        self._constants: list[int] = [0, 1]
        self.expressions: list[str] = []
        self.floats: list[int] = []  # of the expressions
        self._sizes: dict[str, int] = {}
        self._addresses: dict[tuple[int, str], int] = {}
        self._handles: dict[int, int] = {}
        self._items: list[tuple[_Native, Any]] = []
        self._held: list[object] = []
        self._dropped: dict[int, list[int]] = {}  # by item, the inputs that are dropped in front of it
        self._calls: dict[int, list[tuple[Any, list[Any]]]] = {}  # by item, of torch, in front of it
        self.offset_in: dict[int, tuple[int, Any]] = {}  # of a tensor: which other one it shares, and where
        self.places: dict[int, list[tuple[int, int]]] = {}
        self.first_size = self.first_handle = 0
        self.segments: list[tuple[int, int, list[tuple[Any, list[_Tensor]]], list[int]]] = []
        self.allocations: dict[int, tuple[list[int], torch.dtype]] = {}
        self.values, self.native = array("q"), (0, 0, ())

    def number(self, value: Any) -> int:
        if type(value) is Size:
            if value.text not in self._sizes:
                self._sizes[value.text] = -1 - len(self.expressions)
                if type(value.value) is float:
                    self.floats.append(len(self.expressions))
                self.expressions.append(value.text)
            return self._sizes[value.text]
        value = _bits(value) if type(value) is float else value
        if value not in self._constants:
            self._constants.append(value)
        return self._constants.index(value)

    def address(self, index: int | None, offset: Any) -> Any:
        if index is None:  # of fixed memory
            return self.number(offset)
        if index in self.offset_in:
            index, first = self.offset_in[index]
            offset = first + offset
        number = self.number(offset)
        key = index, str(number)
        self._addresses.setdefault(key, len(self._addresses))
        return key

    def handle(self, index: int) -> "_Handle":
        return _Handle(self._handles.setdefault(index, len(self._handles)))

    def add(self, item: tuple[Any, ...], trace: Trace, events: list[int], inputs: Sequence[int]) -> None:
        """Adds an item of a trace. inputs: the numbers of tensors, which a run drops."""
        number, address, native = self.number, self.address, _Native
        given: Any
        match item:
            case "allocate", index, shape, dtype:
                dims = [number(size) for size in shape]
                self.allocations[len(self._items)] = dims, dtype
                native = _Native(ALLOCATE, grid=(len(dims), 0, 0), threads=number_of_dtype(dtype))
                given = [self.handle(index), *dims, index]  # the places of its addresses follow: `finish`
            case "free", index if index in inputs:
                self._dropped.setdefault(len(self._items), []).append(inputs.index(index))
                return
            case "free", index if index in self._handles:
                native, given = _Native(FREE), [self.handle(index)]
            case "free", _:
                return  # of further inputs, which a run keeps
            case "view", index, slot:
                base, first = self.offset_in.get(slot.buffer.index, (slot.buffer.index, 0))
                assert slot.dtype == slot.buffer.dtype
                offset = first // slot.itemsize + slot.offset
                given = [self.handle(base), self.handle(index), *map(number, (*slot.shape, *slot.strides, offset))]
                native = _Native(VIEW, grid=(slot.ndim, 0, 0))
            case "addmm", *operands:
                given = [
                    place
                    for each in operands
                    for place in (address(each.buffer, each.first_byte), *map(number, (*each.shape, *each.strides)))
                ]
                native = _Native(ADDMM, threads=number_of_dtype(operands[0].dtype))
            case "set", place, num_bytes, value, lane:
                native, given = _Native(SET, lane), [address(*place), number(num_bytes), number(value)]
            case "copy", into, of, num_bytes, lane:
                native, given = _Native(COPY, lane), [address(*into), address(*of), number(num_bytes)]
            case ("record" | "wait") as kind, event, lane:
                native, given = _Native(RECORD if kind == "record" else WAIT, lane, events[event]), []
            case "torch", function, *operands:
                views = [
                    (address(each.buffer, each.first_byte), [*map(number, (*each.shape, *each.strides))], each.dtype)
                    for each in operands
                ]
                self._calls.setdefault(len(self._items), []).append((function, views))
                return
            case "foreign", function, values:
                device = (2, trace.device.index) if trace.device.type == "cuda" else (1, 0)
                arguments = Arguments(values, number, address, device)
                self._held += [function, arguments]
                memory = address_of(arguments.memory)
                native = _Native(CALL, 0, function.__chandle__(), memory, (len(values), 0, 0))
                given = [each for byte, place in arguments.patches for each in (_Byte(byte), place)]
            case "launch", kernel, grid, places, lane:
                places = [address(*each) if type(each) is tuple else number(each) for each in places]
                given = [places[index] for index in kernel.passed] + [number(0)] * 2
                grid = [_Value(number(size)) for size in (*grid, 1, 1)[:3]]
                sizes = kernel.threads, kernel.shared_bytes, kernel.overlaps
                native = _Native(KERNEL, lane, kernel.function, 0, grid, *sizes)
            case _:
                raise AssertionError(item)
        assert native.kind != KERNEL or len(given) <= MAX_ARGUMENTS
        assert native.kind not in (ALLOCATE, VIEW) or native.grid[0] <= MAX_DIMS
        self._items.append((native, given))

    def finish(self) -> None:
        """Call it when all items have been added."""
        self.first_size = len(self._constants)
        first = self.first_size + len(self.expressions)
        self.first_handle = first + len(self._addresses)
        for (index, offset), number in self._addresses.items():
            self.places.setdefault(index, []).append((first + number, self._index(int(offset))))
        self.values = array("q", [*self._constants, *[0] * (self.first_handle + len(self._handles) - self.first_size)])
        native, arguments = bytearray(), list[int]()
        for item, given in self._items:
            if item.kind == ALLOCATE:
                given = [*given[:-1], *[_Byte(each) for pair in self.places.get(given[-1], []) for each in pair]]
            grid = [self._index(each.number) if type(each) is _Value else each for each in item.grid]
            sizes = item.threads, item.shared_bytes, item.overlaps
            native += ITEM.pack(
                item.object, item.memory, item.kind, item.lane, *grid, *sizes, len(arguments), len(given)
            )
            arguments += map(self._index, given)
        self.allocations = {
            number: ([self._index(size) for size in shape], dtype)
            for number, (shape, dtype) in self.allocations.items()
        }
        cuts = _late(self._dropped, set(self.allocations))
        calls = {
            item: [(function, [*map(self._tensor, views)]) for function, views in of_item]
            for item, of_item in self._calls.items()
        }
        ends = sorted({*cuts, *calls, len(self._items)} - {0})
        starts = [0, *ends[:-1]]
        self.segments = [
            (start, end - start, calls.get(end, []), cuts.get(end, [])) for start, end in zip(starts, ends, strict=True)
        ]
        blocks = ctypes.create_string_buffer(bytes(native), max(1, len(native)))
        places = (ctypes.c_uint32 * max(1, len(arguments)))(*arguments)
        self.native = address_of(blocks), address_of(places), (blocks, places, self._held)

    def handle_of(self, index: int) -> int:
        """Returns the value of the handle of a tensor, once finished."""
        return self._index(self.handle(index))

    def _tensor(self, view: tuple[Any, list[Any], torch.dtype]) -> "_Tensor":
        place, dims, dtype = view
        return _Tensor(self._index(place), [*map(self._index, dims)], dtype)

    def _index(self, number: Any) -> int:
        if type(number) is _Byte:
            return number.number
        if type(number) is _Handle:
            return self.first_handle + number.number
        if type(number) is tuple:
            return self.first_size + len(self.expressions) + self._addresses[number]
        return self.first_size - 1 - number if number < 0 else number


class _Tensor(NamedTuple):
    """What a function of torch gets. address: its value. dims: those of its sizes, then of its strides."""

    address: int
    dims: list[int]
    dtype: torch.dtype

    def sizes_and_strides(self, values: Any) -> tuple[list[int], list[int]]:
        dims = [values[place] for place in self.dims]
        return dims[: len(dims) // 2], dims[len(dims) // 2 :]


class _Handle(NamedTuple):
    number: int


class _Byte(NamedTuple):
    """What an item gets as it is."""

    number: int


class _Value(NamedTuple):
    number: int


def _late(dropped: dict[int, list[int]], allocations: set[int]) -> dict[int, list[int]]:
    """Returns the same inputs, each dropped in front of the next allocation. Those that none follows are left out."""
    late: dict[int, list[int]] = {}
    for item, inputs in dropped.items():
        following = [number for number in allocations if number >= item]
        if following:
            late.setdefault(min(following), []).extend(inputs)
    return late


def _bits(value: float) -> int:
    """Returns the bits of a number as a kernel's float32."""
    return struct.unpack("i", struct.pack("f", value))[0]
