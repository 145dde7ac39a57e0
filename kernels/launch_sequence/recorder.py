"""Records what a differentiable function launches, so that a step can launch the same without running the function.

The function runs at least three times under CUDA graph capture, which executes nothing: once on the given tensors, the
other times on tensors at other addresses. All runs must launch the same kernels. Where their parameters differ, the
address of exactly one tensor must explain the value in every run. Everything else is a constant. So the values of
parameters are not guessed: the recorder finds the only explanation, or refuses.

The moved runs allocate fillers of random sizes between tensors, so that each tensor moves by a distance of its own. No
run needs memory for its tensors (capture_memory.py).

Also recorded is when the function allocated and freed each tensor, counted in launches. A replay allocates and
frees in the same places, so it needs little more memory than the function.
"""

import functools
import gc
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sonic_ep.kernels.launch_sequence.addresses import (
    BACKWARD,
    FORWARD,
    Address,
    AmbiguousError,
    Launches,
    Run,
    UnrecordableError,
    find_addresses,
)
from sonic_ep.kernels.launch_sequence.capture_memory import memory_of_capture
from sonic_ep.kernels.launch_sequence.driver import driver
from sonic_ep.kernels.launch_sequence.workspace import Memory, workspace_of_capture

_MIN_RUNS, _MAX_RUNS = 2, 8  # with moved tensors
_NO_BUFFER = -1
# Bytes. torch's allocator rounds to the first. Tensors above the second are in other segments, those from the third on
# in segments of their own. The driver places these at multiples of the fourth.
_BLOCK, _LARGE, _ALONE, _SEGMENT = 512, 2**20, 10 * 2**20, 2**25

Function = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Buffer:
    """The memory of one tensor and its views. Positions are (pass, number of launches before).

    freed: None if the function left it alive.
    """

    num_bytes: int
    allocated: tuple[int, int]
    freed: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a buffer. offset: in bytes."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Recording:
    """The launches of forward and, if gradients were given, of backward.

    num_fixed: buffers 0..num_fixed - 1 exist before the pass: inputs, then gradients of outputs, then state, and last
    the workspace of cuBLAS. buffers: all of them. order: when each other buffer was allocated (True) and freed (False).
    passes: the captured graphs as handles of driver.c, which this object owns. addresses: of each pass. outputs,
    gradients: None for a gradient that does not exist.
    """

    num_inputs: int
    num_fixed: int
    buffers: list[Buffer]
    order: list[tuple[bool, int]]
    passes: list[Launches]
    addresses: list[list[Address]]
    outputs: list[Place]
    gradients: list[Place | None]

    @property
    def workspace_bytes(self) -> int:
        """The bytes of the workspace that the launches need."""
        index = self.num_fixed - 1
        is_used = any(address.buffer == index for of_pass in self.addresses for address in of_pass)
        return self.buffers[index].num_bytes if is_used else 0


def leaves_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors in the same memory that start a graph of their own."""
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]


def record(function: Function, inputs: Sequence[Tensor], state: Sequence[Tensor], given: Sequence[int]) -> Recording:
    """Records `function`, and its backward if any outputs are `given` a gradient.

    function: takes tensors like `inputs`. It must have run before with all of them, because nothing may be compiled
    during the capture.
    state: tensors that exist all the time and that the function knows without being given them.

    Raises:  UnrecordableError, with the reason.
    """
    workspace = workspace_of_capture(_capture_stream(torch.cuda.current_device()))
    one = _captured(_Capture(), function, inputs, state, workspace, given, None)
    others: list[_Capture] = []
    addresses: list[list[Address]] = []
    for seed in range(_MAX_RUNS):
        fillers = _Fillers(one.sizes, seed)
        moved = _Capture()
        with torch.cuda.use_mem_pool(moved.fixed_pool):
            copies = [fillers.empty_like(tensor) for tensor in inputs]
        _captured(moved, function, copies, state, workspace, given, fillers)
        del copies, fillers  # a pool gives back only what nothing uses
        moved.release()
        if one.order != moved.order or one.sizes != moved.sizes:
            raise UnrecordableError(f"two runs allocate different tensors: {_first_difference(one, moved)}")
        if one.outputs != moved.outputs or one.gradients != moved.gradients:
            raise UnrecordableError("two runs return different tensors")
        others.append(moved)
        if len(others) < _MIN_RUNS:
            continue
        try:
            addresses = [find_addresses(number, one, others) for number in range(len(one.passes))]
            break
        except AmbiguousError:
            if len(others) == _MAX_RUNS:
                raise
    one.release()
    return Recording(
        len(inputs), one.num_fixed, one.buffers(), one.order, one.passes, addresses, one.outputs, one.gradients
    )


def _first_difference(one: "_Capture", two: "_Capture") -> str:
    """Returns where the allocations of two runs differ."""
    pairs = [*zip_longest(one.order, two.order), *zip_longest(one.sizes, two.sizes)]
    number, (first, second) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"number {number} of {len(one.order)} is {first} in one, {second} in the other"


class _Fillers:
    """Allocations of random sizes between those of a moved run.

    sizes: in bytes, of the allocations of the first run in their order.
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self._sizes, self._random = sizes, random.Random(seed)
        self._held: list[Tensor] = []
        self._last = -1

    def before(self, index: int, device: torch.device) -> None:
        """Allocates a filler in front of allocation number `index`, once."""
        if index <= self._last:
            return
        self._last = index
        size = self._sizes[index] if index < len(self._sizes) else 0
        if size >= _ALONE:
            num_bytes = _ALONE + _SEGMENT * self._random.randint(0, 2)
        else:
            num_bytes = _BLOCK * self._random.randint(1, 12) + (_LARGE if size > _LARGE else 0)
        self._held.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Returns a tensor like an input, after a filler."""
        self.before(self._last + 1, tensor.device)
        return torch.empty_like(tensor).requires_grad_(tensor.requires_grad)


@dataclass
class _Capture(Run):
    """One run of the function under capture.

    order: when each buffer was allocated (True) and freed (False). pool, held: the memory of the run. That of the first
    run lives until all are compared, so that addresses differ. fixed_pool: the memory of what lives through the run,
    which must not be the memory that a tensor of the function had before.
    """

    order: list[tuple[bool, int]] = field(default_factory=list)
    pool: Any = field(default_factory=memory_of_capture)
    fixed_pool: Any = field(default_factory=memory_of_capture)
    held: list[Tensor] = field(default_factory=list)
    outputs: list[Place] = field(default_factory=list)
    gradients: list[Place | None] = field(default_factory=list)

    def release(self) -> None:
        """Frees the memory."""
        self.held = []
        self.pool = self.fixed_pool = None

    def buffers(self) -> list[Buffer]:
        return [
            Buffer(size, allocated, self.freed.get(index))
            for index, (size, allocated) in enumerate(zip(self.sizes, self.allocated, strict=True))
        ]


class _Allocations:
    """Notes when each tensor on the GPU is allocated and freed.

    That a tensor was freed is noticed at the next operation. No other tensor gets its memory before. This is no mode
    itself, because torch imports Dynamo at the first operation of a mode that defines `__torch_dispatch__`: seconds,
    and what it imports refers to the calls in progress, so that no tensor of theirs is freed.
    """

    def __init__(self, capture: _Capture, stream: int, fillers: "_Fillers | None") -> None:
        super().__init__()
        self.number = FORWARD  # of the pass
        self._fillers = fillers
        self._capture, self._stream, self._count = capture, stream, driver().sequence_captured_nodes
        self._known: dict[StorageWeakRef, int] = {}  # buffers

    def position(self) -> tuple[int, int]:
        return self.number, max(self._count(self._stream), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UnrecordableError(f"{func} draws random numbers")
        self._notice_freed()
        if self._fillers is not None:
            self._fillers.before(len(self._capture.starts), torch.device("cuda", torch.cuda.current_device()))
        before = self.position()  # an operation allocates its result before it launches its kernel
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                self.note(tensor, before)
        return result

    def note(self, tensor: Tensor, position: tuple[int, int], *, fixed: bool = False) -> int:
        """Returns the buffer of a tensor, a new one if it is unknown.

        fixed: it exists before the run. Such tensors may be parts of one storage, as weights under Megatron's DDP.
        Memory that torch did not allocate has no buffer: it is another tensor's, as split_gate_up.py makes operands.
        """
        storage = tensor.untyped_storage()
        if not (fixed or storage.resizable()):
            return _NO_BUFFER
        reference = StorageWeakRef(storage)
        known = self._known.get(reference)
        if known is not None and not fixed:
            return known
        capture = self._capture
        index = len(capture.starts)
        self._known.setdefault(reference, index)
        capture.starts.append(tensor.data_ptr() if fixed else storage.data_ptr())
        capture.sizes.append(tensor.nbytes if fixed else storage.nbytes())
        capture.allocated.append(position)
        if not fixed:
            capture.order.append((True, index))
        return index

    def replace(self, index: int, tensor: Tensor) -> None:
        """Makes a tensor that lives through the run the one of a buffer that was reserved for it."""
        self._known[StorageWeakRef(tensor.untyped_storage())] = index
        self._capture.starts[index], self._capture.sizes[index] = tensor.data_ptr(), tensor.nbytes

    def _notice_freed(self) -> None:
        position, capture = self.position(), self._capture
        for reference, index in list(self._known.items()):
            if index >= capture.num_fixed and reference.expired():
                del self._known[reference]
                capture.freed[index] = position
                capture.order.append((False, index))

    def place(self, tensor: Tensor) -> Place:
        """Returns the place of a tensor that the function returned."""
        index = self._known.get(StorageWeakRef(tensor.untyped_storage()))
        if index is None or index < self._capture.num_fixed:
            raise UnrecordableError("a result is no new tensor")
        offset = tensor.storage_offset() * tensor.element_size()
        return Place(index, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)


class _WatchAllocations(_Allocations, TorchDispatchMode):
    """Notes allocations in its context."""


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Returns a stream that nothing else uses. One of torch's pool may be one to which the function forks."""
    made = driver().sequence_make_stream()
    if made is None:
        raise UnrecordableError("the driver makes no stream")
    return torch.cuda.ExternalStream(made, device)


def _captured(
    capture: _Capture,
    function: Function,
    inputs: Sequence[Tensor],
    state: Sequence[Tensor],
    workspace: Memory,
    given: Sequence[int],
    fillers: _Fillers | None,
) -> _Capture:
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    collects = gc.isenabled()
    gc.disable()  # a collection could free memory of the GPU during the capture
    try:
        with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
            _run(capture, function, inputs, state, workspace, given, stream, fillers)
    except UnrecordableError:
        raise
    except Exception as error:
        raise UnrecordableError(f"{type(error).__name__}: {error}") from error
    finally:
        if collects:
            gc.enable()
    return capture


def _run(
    capture: _Capture,
    function: Function,
    inputs: Sequence[Tensor],
    state: Sequence[Tensor],
    workspace: Memory,
    given: Sequence[int],
    stream: torch.cuda.Stream,
    fillers: _Fillers | None,
) -> None:
    leaves = leaves_of(inputs)
    watch = _WatchAllocations(capture, stream.cuda_stream, fillers)
    before = (FORWARD, 0)
    for leaf in leaves:
        watch.note(leaf, before, fixed=True)
    # Gradients of outputs come next. Their shapes are known only after forward, but their buffers get numbers here.
    capture.held = reserved = [torch.empty(1, dtype=torch.uint8, device=leaves[0].device) for _ in given]
    first_gradient = len(capture.starts)
    for tensor in (*reserved, *state):
        watch.note(tensor, before, fixed=True)
    ranges = sorted(zip(capture.starts, capture.sizes, strict=True))
    if any(start + size > behind for (start, size), (behind, _) in pairwise(ranges)):
        raise UnrecordableError("two inputs share memory")
    capture.starts.append(workspace.address)
    capture.sizes.append(workspace.num_bytes)
    capture.allocated.append(before)
    capture.num_fixed = len(capture.starts)
    with _capturing(capture, stream), watch:
        outputs = function(leaves)
    capture.outputs.extend(map(watch.place, outputs))
    if not given:
        return
    watch.number = BACKWARD
    with torch.cuda.use_mem_pool(capture.fixed_pool):
        grads = [torch.empty_like(outputs[index], memory_format=torch.contiguous_format) for index in given]
    capture.held = [*reserved, *grads]
    for index, grad in enumerate(grads, first_gradient):
        watch.replace(index, grad)
    differentiable = [outputs[index] for index in given]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    del outputs
    with _capturing(capture, stream), watch, torch.autocast("cuda", enabled=False):
        gradients = torch.autograd.grad(differentiable, wanted, grads, allow_unused=True)
    capture.gradients.extend(None if gradient is None else watch.place(gradient) for gradient in gradients)


@contextmanager
def _capturing(capture: _Capture, stream: torch.cuda.Stream) -> Generator[None]:
    """Captures what runs in the context as the next pass.

    torch.cuda.graph does more, and what it does to random generators it does not undo after an error.
    """
    library = driver()
    with torch.cuda.use_mem_pool(capture.pool):
        error = library.sequence_begin_capture(stream.cuda_stream)
        if error:
            raise UnrecordableError(f"the CUDA driver returned error {error} at the start of a capture")
        graph = None
        try:
            yield
        finally:
            graph = library.sequence_end_capture(stream.cuda_stream)
    if graph is None:
        raise UnrecordableError("an operation cannot be captured")
    try:
        capture.passes.append(Launches(graph))
    finally:
        library.sequence_destroy_graph(graph)
