"""`Mailbox`: integers that a copy of a program brings to the host, in each of its runs."""

from typing import TYPE_CHECKING, final

import torch

from sonic_ep.kernels.program.native import event_has_passed, new_event, wait_for_event

if TYPE_CHECKING:
    from sonic_ep.kernels.program.trace import Slot, Trace


@final
class Mailbox:
    """Pinned memory for (size,) int64. One run at a time may copy to it. Can be read as an AsyncD2H can."""

    is_traced = False

    def __init__(self, size: int) -> None:
        self.values = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=True)
        self._event = new_event()

    def receive(self, values: "Slot", trace: "Trace") -> None:
        """Notes the copy, on the current lane."""
        trace.fixed(self.values).copy_(values)
        trace.event(self._event)

    @property
    def is_ready(self) -> bool:
        """True if `read` would not block."""
        return event_has_passed(self._event)

    def read(self) -> torch.Tensor:
        """Blocks until the copy of the last run has arrived, but not for what was launched behind it.

        The next run overwrites the result.
        """
        wait_for_event(self._event)
        return self.values
