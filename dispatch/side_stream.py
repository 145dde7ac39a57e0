"""`SideStream`: the CUDA stream on which a transport sends while the experts compute."""

from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias, final

import torch
from torch import Tensor

from sonic_ep.kernels.program.trace import current_trace

_Event: TypeAlias = "torch.cuda.Event | torch.Event | int | None"  # a number in a trace, None on the CPU


@final
class SideStream:
    """A stream of its own for work on the device of `like`. On the CPU nothing is concurrent.

    Memory of one stream that the other uses must be held until the other has waited.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def fork(self, like: Tensor) -> AbstractContextManager[object]:
        """Returns a context that launches on it, after what the current stream has so far."""
        if (trace := current_trace()) is not None:
            return trace.on_lane(1)
        if not like.is_cuda:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(like.device)
        self._stream.wait_stream(torch.cuda.current_stream(like.device))
        return torch.cuda.stream(self._stream)

    def join(self, like: Tensor) -> None:
        """Makes the current stream wait for all that was launched on it."""
        if (trace := current_trace()) is not None:
            with trace.at_lane(1):
                event = trace.event()
            trace.wait(event)
        elif self._stream is not None:
            torch.cuda.current_stream(like.device).wait_stream(self._stream)

    def event(self, like: Tensor) -> _Event:
        """Returns an event behind what the current stream has so far, for `wait`."""
        if (trace := current_trace()) is not None:
            return trace.event()
        return torch.cuda.current_stream().record_event() if like.is_cuda else None

    def hand_over(self, values: Tensor) -> None:
        """Lets the current stream use memory that was allocated on this one. Call it behind `wait`."""
        if values.is_cuda and current_trace() is None:
            values.record_stream(torch.cuda.current_stream(values.device))

    def wait(self, event: _Event) -> None:
        """Makes the current stream wait for an event."""
        if isinstance(event, int):
            trace = current_trace()
            assert trace is not None
            trace.wait(event)
        elif event is not None:
            torch.cuda.current_stream().wait_event(event)
