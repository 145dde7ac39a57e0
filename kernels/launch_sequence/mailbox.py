"""`Mailbox`: integers that a recorded copy brings to the host, again in every repetition of the launches."""

import ctypes
from typing import final

import torch

from sonic_ep.kernels.launch_sequence.driver import driver

_EMPTY, _BYTE_OF_EMPTY = -1, 0xFF
_MICROSECONDS = 1_000_000  # between two looks at the stream, which may have failed


@final
class Mailbox:
    """Pinned memory for integers that are never negative.

    values: (size,) int64, the destination of the copy. order: see `recorded_order`; only its address is used.
    """

    def __init__(self, size: int) -> None:
        self.values = torch.full((size,), _EMPTY, dtype=torch.int64, device="cpu").pin_memory()
        self.order = torch.zeros(1, dtype=torch.int64, device="cpu").pin_memory()
        self._address = self.values.data_ptr()

    def empty(self) -> None:
        """Call it before the launch of the copy."""
        ctypes.memset(self._address, _BYTE_OF_EMPTY, self.values.nbytes)

    def read(self) -> list[int]:
        """Blocks until the copy has arrived, but not for launches behind it. Returns the integers.

        Raises RuntimeError if the copy does not run, and what the device has failed with.
        """
        wait = driver().sequence_wait
        if not wait(self._address, self.values.numel(), _MICROSECONDS):
            torch.cuda.current_stream().synchronize()  # raises, or the copy has run
            if not wait(self._address, self.values.numel(), _MICROSECONDS):
                raise RuntimeError("recorded launches brought no sizes to the host")
        return self.values.tolist()
