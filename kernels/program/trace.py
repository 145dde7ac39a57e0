"""`Trace`: runs the code of a pass once on placeholders, and notes what it allocates, launches, calls and frees.

The code is the one that runs on tensors. A `Slot` stands for a tensor: it has a shape, whose numbers may be `Size`s,
and the methods that the code of a pass uses. Kernels (kernels/common/launch.py) and GEMMs that get a slot are noted
instead of launched. A buffer is freed where the code drops its last slot, as its memory would be. So a program
(program.py) does what the code does, in the same order and with the same memory.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, cast, final

import torch

from sonic_ep.kernels.program.foreign import Address, Operand
from sonic_ep.kernels.program.mailbox import Mailbox
from sonic_ep.kernels.program.native import number_of_device_type, tensor_at
from sonic_ep.kernels.program.sizes import Guards, Number, Size, concrete, specialized

Shape = tuple[Number, ...]
Place = tuple[int | None, Number]  # a buffer, see `Operand`, and a byte of it
Item = (  # by its kind; the last number of some is the lane
    tuple[Literal["allocate"], int, Shape, torch.dtype]
    | tuple[Literal["free"], int]
    | tuple[Literal["view"], int, "Slot"]
    | tuple[Literal["addmm"], Operand, Operand, Operand]
    | tuple[Literal["set"], Place, Number, int, int]
    | tuple[Literal["copy"], Place, Place, Number, int]
    | tuple[Literal["record", "wait"], int, int]
    | tuple[Literal["torch"], Callable[..., torch.Tensor], bool, int, *tuple[object, ...]]
    | tuple[Literal["foreign"], "ForeignFunction", tuple[object, ...]]
    | tuple[Literal["launch"], "Variant", Shape, list[object], int]
)
_ALIGNMENT = 16  # bytes, for which Triton specializes kernels
_CURRENT: ContextVar["Trace | None"] = ContextVar("sonic_ep_trace", default=None)  # other threads launch meanwhile


@final
class Buffer:
    """The memory of one tensor of a pass. index: of the tensor. shape, dtype: it is allocated as."""

    __slots__ = ("__weakref__", "dtype", "index", "shape", "trace")

    def __init__(self, trace: "Trace", index: int, shape: Shape, dtype: torch.dtype) -> None:
        self.trace, self.index, self.shape, self.dtype = trace, index, shape, dtype

    def __del__(self) -> None:
        self.trace.free(self.index)


@final
class Fixed:
    """Memory that outlives the program, as a transport's does. It has an address instead of a number."""

    __slots__ = ("dtype", "index", "shape", "tensor", "trace")

    def __init__(self, trace: "Trace", tensor: torch.Tensor) -> None:
        self.trace, self.tensor, self.shape, self.dtype, self.index = trace, tensor, tensor.shape, tensor.dtype, None


@final
class Slot:
    """Stands for a tensor: a view of a buffer, which starts `offset` elements (of its own dtype) behind it."""

    is_cuda, is_meta, is_nested, requires_grad, layout = True, False, False, False, torch.strided

    def __init__(
        self,
        buffer: "Buffer | Fixed",
        shape: Shape,
        strides: Shape | None = None,
        offset: Number = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.buffer, self.shape, self.offset = buffer, shape, offset
        self.dtype = buffer.dtype if dtype is None else dtype
        self.strides = contiguous_strides(shape) if strides is None else strides

    @property
    def trace(self) -> "Trace":
        return self.buffer.trace

    @property
    def device(self) -> torch.device:
        return self.trace.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def mT(self) -> "Slot":
        shape, strides = list(self.shape), list(self.strides)
        shape[-2:], strides[-2:] = shape[:-3:-1], strides[:-3:-1]
        return self.as_strided(tuple(shape), tuple(strides), self.offset)

    @property
    def T(self) -> "Slot":
        return self.mT

    def get_device(self) -> int:
        return self.device.index

    def dim(self) -> int:
        return len(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize

    def numel(self) -> Number:
        return product(self.shape)

    def stride(self, dim: int) -> Number:
        return self.strides[dim]

    def storage_offset(self) -> int:
        return 0  # of an input: a program gets aligned ones

    @property
    def first_byte(self) -> Number:
        """Behind the start of the buffer, or the address of fixed memory."""
        base = self.buffer.tensor.data_ptr() if type(self.buffer) is Fixed else 0
        return base + self.offset * self.itemsize

    def data_ptr(self) -> Address:
        return Address(self.buffer.index, self.first_byte)

    def detach(self) -> "Slot":
        return self

    def contiguous(self) -> "Slot":
        if not self.is_contiguous():
            raise NotImplementedError(f"a copy of strides {self.strides} in a traced pass")
        return self

    def is_contiguous(self) -> bool:
        return [concrete(s) for s in self.strides] == [concrete(s) for s in contiguous_strides(self.shape)]

    def to(self, dtype: torch.dtype) -> "Slot":
        if dtype != self.dtype:
            raise NotImplementedError(f"{self.dtype} to {dtype} in a traced pass")
        return self

    def float(self) -> "Slot":
        return self.to(torch.float32)

    def clone(self) -> "Slot":
        return self.new_empty(self.shape).copy_(self)

    def split(self, sizes: Sequence[Number]) -> "list[Slot]":
        """Returns parts of these sizes along the first dimension."""
        parts, start = list[Slot](), 0
        for size in sizes:
            parts.append(self[start : start + size])
            start = start + size
        return parts

    def chunk(self, number: int, dim: int) -> "list[Slot]":
        """Returns equal parts of it along a dimension."""
        size = self.shape[dim] // number
        before = (slice(None),) * dim
        return [self[(*before, slice(part * size, (part + 1) * size))] for part in range(number)]

    def new_empty(self, *shape: Number | Shape, dtype: torch.dtype | None = None) -> "Slot":
        size = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return self.trace.empty(tuple(size), self.dtype if dtype is None else dtype)

    def new_zeros(self, *shape: Number | Shape, dtype: torch.dtype | None = None) -> "Slot":
        return self.new_empty(*shape, dtype=dtype).zero_()

    def new_ones(self, *shape: Number | Shape, dtype: torch.dtype | None = None) -> "Slot":
        """Returns one, as an integer: the byte at its address is its last one."""
        one = self.new_zeros(*shape, dtype=dtype)
        assert one.shape == ()
        assert not one.dtype.is_floating_point
        self.trace.items.append(("set", (one.buffer.index, one.first_byte), 1, 1, self.trace.lane))
        return one

    def zero_(self) -> "Slot":
        self.contiguous()
        place = self.buffer.index, self.first_byte
        self.trace.items.append(("set", place, self.numel() * self.itemsize, 0, self.trace.lane))
        return self

    def addmm_(self, left: "Slot", right: "Slot") -> "Slot":
        self.trace.items.append(("addmm", *map(_operands, (self, left, right))))
        return self

    def as_strided(self, shape: Shape, strides: Shape, offset: Number = 0) -> "Slot":
        return Slot(self.buffer, shape, strides, offset, self.dtype)

    def view(self, dtype: torch.dtype) -> "Slot":
        if dtype.itemsize != self.dtype.itemsize:
            raise NotImplementedError(f"{self.dtype} as {dtype} in a traced pass")
        return Slot(self.buffer, self.shape, self.strides, self.offset, dtype)

    def copy_(self, values: "Slot", non_blocking: bool = False) -> "Slot":
        """Both contiguous; one may be memory of the host."""
        self.contiguous()
        values.contiguous()
        places = [(each.buffer.index, each.first_byte) for each in (self, values)]
        self.trace.items.append(("copy", *places, values.numel() * values.itemsize, self.trace.lane))
        return self

    def bring_to_host(self) -> None:
        """Notes a copy of these integers to the trace's mailbox."""
        assert self.trace.mailbox is not None
        self.trace.mailbox.receive(self, self.trace)

    def __getitem__(self, items: Number | slice | tuple[Number | slice, ...]) -> "Slot":
        """Returns a view by numbers and slices without a step."""
        shape, strides, offset = list[Number](), list[Number](), self.offset
        items = items if isinstance(items, tuple) else (items,)
        for dim, item in enumerate((*items, *[slice(None)] * (self.ndim - len(items)))):
            size, stride = self.shape[dim], self.strides[dim]
            if isinstance(item, slice):
                assert item.step is None
                first, end = item.start or 0, size if item.stop is None else item.stop
                shape.append(end - first)
                strides.append(stride)
            else:
                first = item
            first = size + first if concrete(first) < 0 else first
            offset = offset + first * stride
        return Slot(self.buffer, tuple(shape), tuple(strides), offset, self.dtype)

    def sample(self) -> torch.Tensor:
        """Returns a tensor like this one, for what is compiled by the kind of a tensor. Its memory must not be used."""
        shape, strides = (list(map(concrete, each)) for each in (self.shape, self.strides))
        memory = torch.empty(_ALIGNMENT, dtype=torch.uint8, device=self.device)
        device = number_of_device_type(self.device.type), self.device.index or 0
        return tensor_at(memory.data_ptr(), shape, strides, self.dtype, device)


def _operands(argument: object) -> object:
    """Returns the argument with operands in place of its slots, so that it keeps no memory."""
    if isinstance(argument, Slot):
        return Operand(argument.buffer.index, argument.first_byte, argument.shape, argument.strides, argument.dtype)
    if isinstance(argument, tuple | list) and not isinstance(argument, Address):
        return tuple([_operands(each) for each in argument])
    return argument


def contiguous_strides(shape: Sequence[Number]) -> Shape:
    """Returns the strides of a contiguous tensor."""
    strides: list[Number] = []
    step: Number = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step = size * step
    return tuple(strides)


def product(sizes: Sequence[Number]) -> Number:
    """Returns the product of sizes."""
    result: Number = 1
    for size in sizes:
        result = size * result
    return result


@dataclass(frozen=True)
class Unaligned:
    """For Triton, a tensor that does not start at a multiple of `_ALIGNMENT`."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 1


def current_trace() -> "Trace | None":
    """Returns the trace that runs on this thread."""
    return _CURRENT.get()


def begin_output() -> None:
    """Notes in a traced pass, if one runs, that what it launches from here on makes its first output, and no other."""
    trace = current_trace()
    if trace is not None:
        trace.output_start = len(trace.items)


def by_torch(
    function: Callable[..., torch.Tensor],
    shape: Shape,
    dtype: torch.dtype,
    *inputs: object,
    into: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns function(*inputs), a contiguous tensor of this shape and dtype. A program calls the function in each run.

    inputs: tensors, and tuples of numbers. The result must not depend on strides of the tensors. into: the function
    takes `out`, to which it writes; otherwise a program copies its result. out: in place of a new tensor, with `into`.
    """
    trace = current_trace()
    if trace is None:
        return function(*inputs) if out is None else function(*inputs, out=out)
    result = trace.empty(shape, dtype) if out is None else out
    trace.items.append(("torch", function, into, trace.lane, *map(_operands, (result, *inputs))))
    return cast(torch.Tensor, result)


def new_empty(like: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """Returns a new tensor on the device of `like`, which is no slot even in a traced pass."""
    trace = current_trace()
    return like.new_empty(shape, dtype=dtype) if trace is None else cast(torch.Tensor, trace.empty(shape, dtype))


class Variant(NamedTuple):
    """A compiled kernel. launch: called with grid, stream, `head`, the run-time arguments and `tail`.

    The rest is for programs. function: CUDA's. passed: the indices of the run-time arguments that it takes. overlaps:
    whether it may start before the kernel in front of it ends.
    """

    launch: Callable[..., None]
    head: tuple[object, ...]
    tail: tuple[object, ...]
    function: int = 0
    passed: tuple[int, ...] = ()
    threads: int = 0
    shared_bytes: int = 0
    overlaps: bool = False


VariantOf = Callable[[list[object], dict[str, object]], Variant]  # by dtypes and numbers, and constants


class ForeignFunction(Protocol):
    """A function of tvm-ffi."""

    def __chandle__(self) -> int: ...


@final
class Trace:
    """The record of a pass. items: in order, see program.py. guards: see sizes.py. output_start: see `begin_output`.

    sizes: of the traced step, by name. usual: of a large one, for the choice of tensors that share memory.
    """

    def __init__(self, device: torch.device, sizes: dict[str, int], usual: dict[str, int]) -> None:
        self.device, self.guards = device, Guards()
        self.names, self.usual = list(sizes), usual
        self.sizes = [Size(name, value, self.guards) for name, value in sizes.items()]
        self.items: list[Item] = []
        self.output_start: int | None = None
        self.num_buffers, self._done = 0, False
        # Buffers that another lane has dropped. They are freed once lane 0 has waited for an event behind that.
        self._dropped: list[int] = []
        self._dropped_before: dict[int, list[int]] = {}
        self._counter: Slot | None = None
        self.lane = 0
        self.events: list[int | None] = []  # CUDA's, or None for one that the program makes
        self.mailbox: Mailbox | None = None  # of what code brings to the host
        self.extra: dict[str, Slot] = {}  # inputs that code asks for by name
        self.held: list[object] = []  # fixed memory

    @classmethod
    def like(cls, other: "Trace") -> "Trace":
        """Returns a trace of another pass of the same step: with the same sizes and guards."""
        trace = cls(other.device, {}, other.usual)
        trace.guards, trace.names, trace.sizes = other.guards, other.names, other.sizes
        return trace

    def input(self, shape: Shape, dtype: torch.dtype, strides: Shape | None = None) -> Slot:
        """Returns a slot for a tensor that the pass gets, at an aligned address. strides: None if contiguous."""
        buffer = Buffer(self, self.num_buffers, shape, dtype)
        self.num_buffers += 1
        return Slot(buffer, shape, strides)

    def part(
        self, block: Slot, first_byte: Number, shape: Shape, dtype: torch.dtype, strides: Shape | None = None
    ) -> Slot:
        """Returns a slot for what starts at this byte of a block."""
        return Slot(block.buffer, shape, strides, first_byte // dtype.itemsize, dtype)

    def empty(self, shape: Shape, dtype: torch.dtype) -> Slot:
        slot = self.input(shape, dtype)
        self.items.append(("allocate", slot.buffer.index, shape, dtype))
        return slot

    def launch(self, variant: VariantOf, grid: Shape, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        places, dtypes = list[object](), list[object]()
        for each in arguments:
            if isinstance(each, Slot | torch.Tensor):
                slot = each if isinstance(each, Slot) else self.fixed(each)
                places.append((slot.buffer.index, slot.first_byte))
                dtypes.append(Unaligned(slot.dtype) if concrete(slot.first_byte) % _ALIGNMENT else slot.dtype)
            else:
                places.append(0 if each is None else each)
                dtypes.append(each)
        named = {name: specialized(value) if type(value) is Size else value for name, value in named.items()}
        self.items.append(("launch", variant(dtypes, named), grid, places, self.lane))

    def foreign(self, function: ForeignFunction, arguments: tuple[object, ...]) -> None:
        """Notes a call of a function of tvm-ffi."""
        self.items.append(("foreign", function, _operands(arguments)))

    def fixed(self, tensor: torch.Tensor) -> Slot:
        """Returns a slot for a tensor that lives as long as the program, at one address. It may be on the host."""
        self.held.append(tensor)
        return Slot(Fixed(self, tensor), tuple(tensor.shape), tuple(tensor.stride()), 0, tensor.dtype)

    def fixed_part(self, memory: torch.Tensor, first_byte: Number, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Returns a slot for what starts at this byte of such a tensor."""
        return cast(torch.Tensor, Slot(self.fixed(memory).buffer, shape, None, first_byte // dtype.itemsize, dtype))

    def named(self, name: str, shape: Shape, dtype: torch.dtype) -> Slot:
        """Returns the slot of an input that whoever runs the program gives under this name."""
        if name not in self.extra:
            self.extra[name] = self.input(shape, dtype)
        return self.extra[name]

    def event(self, event: int | None = None) -> int:
        """Notes an event on the current lane, a stream. Returns its number. event: of CUDA; None for a new one."""
        self.events.append(event)
        number = len(self.events) - 1
        self.items.append(("record", number, self.lane))
        if self.lane:
            self._dropped_before[number], self._dropped = self._dropped, []
        return number

    def size(self, name: str) -> int:
        """Returns the size of this name, for code that takes numbers."""
        return cast(int, self.sizes[self.names.index(name)])

    def wait(self, event: int) -> None:
        """Makes the current lane wait for an event."""
        self.items.append(("wait", event, self.lane))
        if self.lane == 0:
            for number in [each for each in self._dropped_before if each <= event]:
                self.items.extend(("free", index) for index in self._dropped_before.pop(number))

    @contextmanager
    def at_lane(self, lane: int) -> Generator[None]:
        """A context in which launches, copies and events are on another lane."""
        before, self.lane = self.lane, lane
        try:
            yield
        finally:
            self.lane = before

    @contextmanager
    def on_lane(self, lane: int) -> Generator[None]:
        """Likewise, behind what the current lane has so far."""
        event = self.event()
        with self.at_lane(lane):
            self.wait(event)
            yield

    def counter(self) -> Slot:
        """Returns the slot of the stream's tile counter (kernels/experts/tile_counter.py)."""
        if self._counter is None:
            self._counter = self.input((2,), torch.int32)
        return self._counter

    @property
    def counter_index(self) -> int | None:
        return None if self._counter is None else self._counter.buffer.index

    def free(self, index: int) -> None:
        if self.lane:
            self._dropped.append(index)
        elif not self._done:
            self.items.append(("free", index))

    def finish(self) -> None:
        """Call it while all slots that the pass returns exist."""
        self._done = True

    def __enter__(self) -> "Trace":
        self._before = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._before)
        self._done = True
