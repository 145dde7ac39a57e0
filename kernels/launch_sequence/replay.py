"""Launches a recording again: one call of C per segment of launches, and a few allocations between them.

The host's part of a pass is: allocate what the function allocated, in the same places; write the addresses of this
step's tensors into one array; hand it to driver.c. Small tensors share an allocation, because they are many.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sonic_ep.checks import ROW_ALIGNMENT
from sonic_ep.first_order import first_order
from sonic_ep.kernels.launch_sequence.addresses import BACKWARD, FORWARD, Launches
from sonic_ep.kernels.launch_sequence.driver import driver, raw_stream
from sonic_ep.kernels.launch_sequence.recorder import Place, Recording
from sonic_ep.kernels.launch_sequence.workspace import workspace_of_stream

# A buffer of that size, or of that share of the largest, has an allocation of its own.
_OWN_BYTES, _OWN_SHARE = 2**20, 1 / 16
_ALIGNMENT = 256  # bytes, as torch's allocator gives at least


class HasAddress(Protocol):
    """A tensor, or what stands for one in a repetition."""

    def data_ptr(self) -> int: ...


State = Callable[[], Sequence[HasAddress]]


def kind_of(state: HasAddress) -> tuple[torch.dtype, int] | None:
    """Returns the dtype and alignment that kernels were launched for, or None for what is no tensor."""
    return (state.dtype, state.data_ptr() % ROW_ALIGNMENT) if isinstance(state, Tensor) else None


@dataclass(slots=True)
class _Segment:
    """Launches first..end - 1, after freeing and allocating slots.

    allocate: slot, and the shape, stride and dtype of its tensor.
    """

    free: list[int] = field(default_factory=list)
    allocate: list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]] = field(default_factory=list)
    first: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor that a pass returns: a view of a slot, or the slot's tensor itself if `view` is None.

    view: offset in elements, shape, stride, dtype.
    """

    slot: int
    view: tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype] | None

    def of(self, slots: Sequence[Tensor | None]) -> Tensor:
        tensor = slots[self.slot]
        assert tensor is not None
        if self.view is None:
            return tensor
        offset, shape, stride, dtype = self.view
        typed = tensor if tensor.dtype == dtype else tensor.view(dtype)
        return typed.as_strided(shape, stride, offset)


class _Pass:
    """Forward or backward. A slot is an address that a step sets: an input, or memory that the pass allocates."""

    def __init__(self, launches: Launches, segments: list[_Segment], results: list[_Result | None]) -> None:
        self._launches, self._segments, self.results = launches, segments, results
        self._launch = driver().sequence_launch
        self._streams: dict[int, Any] = {}

    def run(self, slots: list[Tensor | None], device: torch.device) -> list[Tensor | None]:
        """Launches everything on the current stream. Returns the results; slots holds what has not been freed."""
        bases = (ctypes.c_uint64 * len(slots))()
        tensor = None
        for slot, tensor in enumerate(slots):
            if tensor is not None:
                bases[slot] = tensor.data_ptr()
        del tensor  # slots alone refers to tensors, so that they can be freed
        stream = raw_stream(device)
        streams = self._streams.get(stream) or self._lanes(stream, device)
        for segment in self._segments:
            for slot in segment.free:
                slots[slot] = None
            for slot, shape, stride, dtype in segment.allocate:
                slots[slot] = allocated = torch.empty_strided(shape, stride, dtype=dtype, device=device)
                bases[slot] = allocated.data_ptr()
                del allocated
            error = self._launch(self._launches.handle, segment.first, segment.end, bases, streams)
            if error:
                raise RuntimeError(f"the CUDA driver returned error {error} for a recorded launch")
        return [None if result is None else result.of(slots) for result in self.results]

    def _lanes(self, stream: int, device: torch.device) -> Any:
        """Returns the streams of all lanes, for calls on `stream`."""
        # torch's streams come from a pool and are never destroyed.
        others = [torch.cuda.Stream(device) for _ in range(1, self._launches.num_lanes)]
        lanes = (ctypes.c_void_p * (1 + len(others)))(stream, *(other.cuda_stream for other in others))
        self._streams[stream] = lanes
        return lanes


class Replay:
    """A recorded function. Call it with inputs like the recorded ones, on the same stream."""

    def __init__(
        self,
        recording: Recording,
        differentiable: Sequence[int],
        device: torch.device,
        constants: Sequence[Tensor] = (),
        state_kinds: Sequence[object] | None = None,
    ) -> None:
        """differentiable: the outputs that got a gradient when the function was recorded. constants: the last tensors
        of the state that it was recorded with, which never move. state_kinds: `kind_of` of the others; None for any.
        """
        self._state_kinds = state_kinds
        workspace = workspace_of_stream(device, raw_stream(device), recording.workspace_bytes)
        self._constants, self._device = [*constants, workspace], device
        self._zeros: dict[int, Tensor] = {}
        self._layout = layout = _Layout(recording, differentiable)
        self._differentiable = list(differentiable)
        self._places = [recording.outputs[index] for index in differentiable]
        self._forward = layout.forward()
        self._backward = layout.backward() if differentiable else None

    def __call__(
        self, inputs: Sequence[Tensor], state: State, begin_backward: Callable[[], None] | None = None
    ) -> list[Tensor]:
        """Returns the outputs of the function.

        state: returns it as `record` got it, without constants, each time. begin_backward: called before each backward.
        """
        if self._backward is None:
            return self.launch_forward(inputs, state)[0]
        others: list[Tensor] = []
        results = _Replayed.apply(self, state, begin_backward, others, *inputs)
        ordered: list[Tensor] = list(others)
        for index, result in zip(self._differentiable, results, strict=True):
            ordered.insert(index, result)
        return ordered

    def zeros(self, number: int) -> Tensor:
        """Returns the gradient of differentiable output `number` if it has none. It is only read."""
        if number not in self._zeros:
            place = self._places[number]
            self._zeros[number] = torch.zeros(place.shape, dtype=place.dtype, device=self._device)
        return self._zeros[number]

    def _current(self, state: State) -> list[HasAddress]:
        found = state()
        kinds, wanted = [*map(kind_of, found)], self._state_kinds
        # A number may take the place of a tensor: its launches get the number.
        if wanted is not None and any(a != b for a, b in zip(kinds, wanted, strict=True) if a and b):
            raise RuntimeError(
                "main_grad or a buffer of the layer was replaced between forward and backward by one of another dtype "
                f"or alignment: now (dtype, address modulo {ROW_ALIGNMENT}) are {kinds}, before {wanted}; replace it "
                "after backward"
            )
        return [*found, *self._constants]

    def launch_forward(self, inputs: Sequence[Tensor], state: State) -> tuple[list[Tensor], list[Tensor]]:
        """Returns all outputs, and what backward needs."""
        layout, current = self._layout, self._current(state)
        slots: list[Any] = [None] * layout.num_slots
        slots[: len(inputs)] = inputs
        slots[layout.first_state : layout.first_state + len(current)] = current
        outputs = self._forward.run(slots, self._device)
        return outputs, [slots[slot] for slot in layout.saved]  # pyright: ignore[reportReturnType]

    def launch_backward(self, saved: list[Tensor], grads: Sequence[Tensor], state: State) -> list[Tensor | None]:
        """Returns the gradient of each input that required one. saved: is emptied, so that memory can be freed."""
        layout, current = self._layout, self._current(state)
        slots: list[Any] = [None] * layout.num_slots
        for slot in reversed(layout.saved):
            slots[slot] = saved.pop()
        slots[layout.num_inputs : layout.num_inputs + len(grads)] = grads
        slots[layout.first_state : layout.first_state + len(current)] = current
        assert self._backward is not None
        return self._backward.run(slots, self._device)


def _as_recorded(tensor: Tensor) -> Tensor:
    """Returns a tensor where kernels may read it, whose launches were recorded with aligned ones."""
    return tensor.clone() if tensor.data_ptr() % ROW_ALIGNMENT else tensor


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        replay: Replay,
        state: State,
        begin_backward: Callable[[], None] | None,
        others: list[Tensor],
        *inputs: Tensor,
    ) -> Any:
        outputs, saved = replay.launch_forward(inputs, state)
        ctx.replay, ctx.state, ctx.begin_backward = replay, state, begin_backward
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        wanted = replay._differentiable
        others.extend([output for index, output in enumerate(outputs) if index not in wanted])
        return tuple([outputs[index] for index in wanted])

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.begin_backward is not None:
            ctx.begin_backward()
        saved = [_as_recorded(tensor) for tensor in ctx.saved_tensors]
        ctx.maybe_clear_saved_tensors()  # has no effect if the graph is retained
        grads = [
            ctx.replay.zeros(number) if grad is None else _as_recorded(grad.contiguous())
            for number, grad in enumerate(grad_outputs)
        ]
        found = iter(ctx.replay.launch_backward(saved, grads, ctx.state))
        return None, None, None, None, *[next(found) if needed else None for needed in ctx.needs_input_grad[4:]]


class _Layout:
    """Gives every buffer of a recording a slot, and an offset in it."""

    def __init__(self, recording: Recording, differentiable: Sequence[int]) -> None:
        self._recording = recording
        self.num_inputs, num_fixed = recording.num_inputs, recording.num_fixed
        self.first_state = self.num_inputs + len(differentiable)
        read_by_backward = {a.buffer for a in recording.addresses[BACKWARD]} if len(recording.passes) > 1 else set()
        gradients = [place for place in recording.gradients if place is not None]
        returned = {place.buffer for place in (*recording.outputs, *gradients)}
        own_results = {recording.outputs[index].buffer for index in differentiable} | {p.buffer for p in gradients}
        self._slot, self._offset = {index: index for index in range(num_fixed)}, dict.fromkeys(range(num_fixed), 0)
        # Blocks for what is small: what outlives forward, and what is only needed in forward or in backward.
        lasting, *temporary = range(num_fixed, num_fixed + 3)
        self.num_slots, self._block_bytes = num_fixed + 3, dict.fromkeys((lasting, *temporary), 0)
        self._own: set[int] = set()
        own_bytes = max(_OWN_BYTES, _OWN_SHARE * max(buffer.num_bytes for buffer in recording.buffers[num_fixed:]))
        for index, buffer in list(enumerate(recording.buffers))[num_fixed:]:
            if buffer.num_bytes >= own_bytes or index in own_results:
                self._slot[index], self._offset[index] = self.num_slots, 0
                self._own.add(index)
                self.num_slots += 1
                continue
            born = buffer.allocated[0]
            outlives = born == FORWARD and (index in returned or index in read_by_backward)
            block = lasting if outlives else temporary[born]
            self._slot[index], self._offset[index] = block, self._block_bytes[block]
            self._block_bytes[block] += -(-buffer.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._blocks = {FORWARD: (lasting, temporary[FORWARD]), BACKWARD: (temporary[BACKWARD],)}
        needed = {self._slot[index] for index in read_by_backward if recording.buffers[index].allocated[0] == FORWARD}
        state = range(self.first_state, num_fixed)
        passed = {*range(self.num_inputs, self.first_state), *state}
        self.saved = sorted(needed - passed)
        for number, launches in enumerate(recording.passes):
            for a in recording.addresses[number]:
                launches.relocate(a.node, a.word, self._slot[a.buffer], a.offset + self._offset[a.buffer])

    def forward(self) -> _Pass:
        return self._pass(FORWARD, self._recording.outputs)

    def backward(self) -> _Pass:
        return self._pass(BACKWARD, self._recording.gradients)

    def _pass(self, number: int, places: Sequence[Place | None]) -> _Pass:
        results = [None if place is None else self._result(place) for place in places]
        typed = {
            place.buffer: (place.shape, place.stride, place.dtype)
            for place, result in zip(places, results, strict=True)
            if place is not None and result is not None and result.view is None
        }
        launches = self._recording.passes[number]
        current = _Segment()
        segments = [current]
        for block in self._blocks[number]:
            if self._block_bytes[block]:
                current.allocate.append((block, (self._block_bytes[block] // 8,), (1,), torch.int64))
        to_free: list[int] = []
        for is_new, index in self._recording.order:
            buffer = self._recording.buffers[index]
            position = buffer.allocated if is_new else buffer.freed
            assert position is not None
            if position[0] != number or index not in self._own:
                continue
            slot = self._slot[index]
            if not is_new:
                if number == BACKWARD or slot not in self.saved:
                    to_free.append(slot)
                continue
            if position[1] > current.first or (to_free and current.allocate):
                current.end = position[1]
                current = _Segment(first=position[1])
                segments.append(current)
            # Freed late, just before something is allocated: that is always safe, and saves segments.
            current.free.extend(to_free)
            to_free.clear()
            shape, stride, dtype = typed.get(index, ((buffer.num_bytes,), (1,), torch.uint8))
            current.allocate.append((slot, shape, stride, dtype))
        current.end = launches.num_nodes
        return _Pass(launches, segments, results)

    def _result(self, place: Place) -> _Result:
        slot, size = self._slot[place.buffer], place.dtype.itemsize
        covers = place.offset == 0 and self._recording.buffers[place.buffer].num_bytes == size * math.prod(place.shape)
        if place.buffer in self._own and covers:
            return _Result(slot, None)
        offset = place.offset + self._offset[place.buffer]
        assert offset % size == 0
        return _Result(slot, (offset // size, place.shape, place.stride, place.dtype))
