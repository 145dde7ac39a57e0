"""`AsyncD2H`: an asynchronous copy of integers from the device to the host.

While a CUDA graph is captured the host cannot read from the device: call `host_may_wait` first. In a traced pass it
cannot either, but runs of the program copy to the trace's mailbox (kernels/program/mailbox.py).
"""

from typing import Any, Protocol, final

import torch
from torch import Tensor


class HostCopy(Protocol):
    """What can be read as an AsyncD2H can."""

    is_traced: bool

    @property
    def is_ready(self) -> bool: ...
    def read(self) -> Tensor: ...


@final
class AsyncD2H:
    """A copy of `values` to pinned memory. It starts when the object is made, on the current stream.

    `read` blocks until the copy has arrived, but does not wait for kernels that were launched after its start. Values
    on the CPU are not copied. is_traced: made in a traced pass, so that `read` cannot be called.
    """

    def __init__(self, values: Any) -> None:
        self._event: torch.cuda.Event | None = None
        self._values, self.is_traced = values, not isinstance(values, Tensor)
        if self.is_traced:
            values.bring_to_host()
        elif values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    @property
    def is_ready(self) -> bool:
        """True if `read` would not block."""
        return not self.is_traced and (self._event is None or self._event.query())

    def read(self) -> Tensor:
        """Blocks until the values arrive and returns them, on the CPU."""
        assert not self.is_traced
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


def host_may_wait(values: Tensor) -> bool:
    """Returns True if the host may wait for the device of `values`: not while a CUDA graph is captured."""
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())
