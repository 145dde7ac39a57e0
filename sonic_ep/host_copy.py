"""`HostCopy`: integers of the device on their way to the host, read once they are needed and not before."""

from typing import final

import torch
from torch import Tensor


@final
class HostCopy:
    """A copy of `values` that starts now; `read` waits for it, and for nothing that was launched since."""

    def __init__(self, values: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))

    def read(self) -> Tensor:
        """The values, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._values
