"""The values of a program, and its items as launch.c reads them. See program.py."""

import ctypes
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast, final

import torch
from torch import Tensor

from sonic_ep.kernels.program.foreign import Arguments, Operand, Value
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
    number_of_dtype,
)
from sonic_ep.kernels.program.sizes import Number, Real, Size
from sonic_ep.kernels.program.trace import Item, Trace


class _Native(NamedTuple):
    """An item of launch.c, but for its arguments."""

    kind: int
    lane: int = 0
    object: int = 0
    memory: int = 0
    grid: "Sequence[int | _Value]" = (0, 0, 0)
    threads: int = 0
    shared_bytes: int = 0
    overlaps: bool = False


@final
class Numbers:
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
        self._items: list[tuple[_Native, Sequence[_Given]]] = []
        self._held: list[object] = []
        self._dropped: dict[int, list[int]] = {}  # by item, the inputs that are dropped in front of it
        self._calls: dict[int, list[_TorchGiven]] = {}  # by item, of torch, in front of it
        self.offset_in: dict[int, tuple[int, Number]] = {}  # of a tensor: which other one it shares, and where
        self.places: dict[int, list[tuple[int, int]]] = {}
        self.first_size = self.first_handle = 0
        self.segments: list[tuple[int, int, list[TorchCall], list[int]]] = []
        self.allocations: dict[int, tuple[list[int], torch.dtype]] = {}
        self.values, self.native = array("q"), (0, 0, ())

    def number(self, value: Real) -> int:
        if type(value) is Size:
            if value.text not in self._sizes:
                self._sizes[value.text] = -1 - len(self.expressions)
                if type(value.value) is float:
                    self.floats.append(len(self.expressions))
                self.expressions.append(value.text)
            return self._sizes[value.text]
        value = bits_of(value) if type(value) is float else value
        if value not in self._constants:
            self._constants.append(value)
        return self._constants.index(value)

    def address(self, index: int | None, offset: Number) -> Value:
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

    def add(self, item: Item, trace: Trace, events: list[int], inputs: Sequence[int]) -> None:
        """Adds an item of a trace. inputs: the numbers of tensors, which a run drops."""
        number, address, native = self.number, self.address, _Native
        given: Sequence[_Given]
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
            case "torch", function, into, lane, *operands:
                tensors = [
                    (address(each.buffer, each.first_byte), [*map(number, (*each.shape, *each.strides))], each.dtype)
                    if isinstance(each, Operand)
                    else [*map(number, each)]
                    for each in operands
                ]
                self._calls.setdefault(len(self._items), []).append((function, into, lane, tensors))
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
        assert native.kind not in (ALLOCATE, VIEW) or cast(int, native.grid[0]) <= MAX_DIMS
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
            item: [TorchCall(*call, [*map(self._operand, given)]) for *call, given in of_item]
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

    def _operand(self, given: "_TensorGiven | list[int]") -> "TensorOperand | list[int]":
        if isinstance(given, list):
            return [*map(self._index, given)]
        place, dims, dtype = given
        return TensorOperand(self._index(place), [*map(self._index, dims)], dtype)

    def _index(self, number: "_Given") -> int:
        if isinstance(number, _Byte):
            return number.number
        if isinstance(number, _Handle):
            return self.first_handle + number.number
        if isinstance(number, tuple):
            return self.first_size + len(self.expressions) + self._addresses[number]
        return self.first_size - 1 - number if number < 0 else number


class TorchCall(NamedTuple):
    """Of a function of torch. into: it takes `out`. lane: of the stream. operands: the result, then tensors, and
    numbers by the index of their values."""

    function: Callable[..., Tensor]
    into: bool
    lane: int
    operands: "list[TensorOperand | list[int]]"


class TensorOperand(NamedTuple):
    """A tensor as a function of torch gets it. address: its value. dims: its sizes, then its strides."""

    address: int
    dims: list[int]
    dtype: torch.dtype

    def sizes_and_strides(self, values: "array[int]") -> tuple[list[int], list[int]]:
        dims = [values[place] for place in self.dims]
        return dims[: len(dims) // 2], dims[len(dims) // 2 :]


class _Handle(NamedTuple):
    number: int


class _Byte(NamedTuple):
    """A byte that an item gets as it is."""

    number: int


class _Value(NamedTuple):
    number: int


_Given = Value | _Handle | _Byte
_TensorGiven = tuple[Value, list[int], torch.dtype]
_TorchGiven = tuple[Callable[..., Tensor], bool, int, list[_TensorGiven | list[int]]]


def _late(dropped: dict[int, list[int]], allocations: set[int]) -> dict[int, list[int]]:
    """Returns the same inputs, each dropped in front of the next allocation. Those that none follows are left out."""
    late: dict[int, list[int]] = {}
    for item, inputs in dropped.items():
        following = [number for number in allocations if number >= item]
        if following:
            late.setdefault(min(following), []).extend(inputs)
    return late


def bits_of(value: float) -> int:
    """Returns the bits of a number as a kernel's float32."""
    return struct.unpack("i", struct.pack("f", value))[0]
