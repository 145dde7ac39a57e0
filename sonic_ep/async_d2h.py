"""`AsyncD2H`: integers of the device on their way to the host, read once they are needed and not before.

While a CUDA graph is captured the host can read nothing: whoever wants to asks `host_may_wait` first.
"""

from typing import final

import torch
from torch import Tensor


@final
class AsyncD2H:
    """A copy of `values` that starts now; `read` waits for it, and for nothing that was launched since."""

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    @property
    def is_ready(self) -> bool:
        """Would `read` not wait?"""
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """The values, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


def host_may_wait(values: Tensor) -> bool:
    """May the host read what is computed on the device of `values`? Not while a CUDA graph is captured."""
    return not (values.is_cuda and torch.cuda.is_current_stream_capturing())
