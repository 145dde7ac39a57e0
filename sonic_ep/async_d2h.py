"""`AsyncD2H`: an asynchronous copy of integers from the device to the host.

While a CUDA graph is captured the host cannot read from the device: call `host_may_wait` first. While launches are
recorded (kernels/launch_sequence/) it cannot either, but their repetitions copy again, to memory of the recorder.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import final

import torch
from torch import Tensor

_RECORDED: ContextVar[tuple[Tensor, Tensor] | None] = ContextVar("sonic_ep_recorded", default=None)


@contextmanager
def copies_recorded(into: Tensor, order: Tensor) -> Generator[None]:
    """A context in which an AsyncD2H copies to `into`, pinned memory of the same size, and is not read.

    order: see `recorded_order`.
    """
    token = _RECORDED.set((into, order))
    try:
        yield
    finally:
        _RECORDED.reset(token)


def recorded_order() -> Tensor | None:
    """Returns the tensor of which a launch is recorded with the address, where it gets an integer in each repetition.

    The integer is the order of backwards (groups/order.py). None elsewhere than in `copies_recorded`.
    """
    recorded = _RECORDED.get()
    return None if recorded is None else recorded[1]


@final
class AsyncD2H:
    """A copy of `values` to pinned memory. It starts when the object is made, on the current stream.

    `read` blocks until the copy has arrived, but does not wait for kernels that were launched after its start. Values
    on the CPU are not copied. is_recorded: made in `copies_recorded`, so that `read` cannot be called.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values, recorded = values, _RECORDED.get()
        self.is_recorded = recorded is not None
        if recorded is not None:
            recorded[0].copy_(values, non_blocking=True)
        elif values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    @property
    def is_ready(self) -> bool:
        """True if `read` would not block."""
        return not self.is_recorded and (self._event is None or self._event.query())

    def read(self) -> Tensor:
        """Blocks until the values arrive and returns them, on the CPU."""
        assert not self.is_recorded
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


def host_may_wait(values: Tensor) -> bool:
    """Returns True if the host may wait for the device of `values`: not while a CUDA graph is captured."""
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())


def host_can_read(values: Tensor) -> bool:
    """Returns True if the host may wait, or in `copies_recorded`, where it reads the copies of the repetitions."""
    return host_may_wait(values) or _RECORDED.get() is not None
