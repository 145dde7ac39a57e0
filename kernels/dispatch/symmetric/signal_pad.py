"""The signal pad: the memory through which ranks synchronize the kernels that write into each other's memory.

This is the host's side. kernels/dispatch/symmetric/signals.py is the device's side, with the protocol and the memory
order.

Communication has *stages*, one for each kind of kernel. In a stage every rank launches the same kernel. The kernel
signals all peers that this rank's buffers are ready, waits until theirs are, writes into them, signals that its writes
have arrived, and waits for the same signal of all peers. The host and collective libraries take no part. The stage
COUNTS needs two kernels and no ready signal, see all_gather.py.

In an empty step no rank has a pair to send. Then the kernels for lists, rows and sums neither signal nor wait, and a
rank need not launch them.

Legend: S ranks of the EP group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor


class Stage(IntEnum):
    """The kinds of kernels that synchronize ranks. Each has its own signals, so a timeout names the stage."""

    LISTS = 0
    DISPATCH = 1
    COMBINE = 2
    COMBINE_SCALARS = 3
    COUNTS = 4


MAX_RANKS = 1 << 16  # the code of a lost peer is stage * MAX_RANKS + rank + 1, see SignalPad.state


@dataclass(frozen=True, slots=True)
class SignalPad:
    """The memory in which the kernels of one rank synchronize with their peers.

    rank: This rank in the group.
    signals_S: (S,) int64 addresses of each rank's signals: `num_signals(S)` int64 in symmetric memory, zero at the
        start.
    state: (3 * stages + 1,) int64, which only this rank reads and writes: the epoch of each stage, which counts the
        completed kernels; the tickets of each stage, which count the finished programs of the running kernel; the work
        items of each stage that its programs have fetched; and the code of the lost peer, the first rank whose signal
        did not come within the timeout, or 0. Once that code is set, this rank waits for no other.
    host_status: (1,) int64, a copy of that code in pinned host memory, which the host reads while kernels run.
    timeout: Nanoseconds to wait for a signal.
    host_view: host_status as a numpy array, which is faster to read.
    """

    rank: int
    signals_S: Tensor
    state: Tensor
    host_status: Tensor
    timeout: int
    host_view: Sequence[int]

    @classmethod
    def of(cls, rank: int, signals_S: Tensor, timeout: int) -> Self:
        state = torch.zeros(3 * len(Stage) + 1, dtype=torch.int64, device=signals_S.device)
        host_status = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=signals_S.is_cuda)
        return cls(rank, signals_S, state, host_status, timeout, host_status.numpy())

    @property
    def size(self) -> int:
        return self.signals_S.shape[0]

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """The arguments that every kernel of a stage takes, in this order."""
        return self.signals_S, self.state, self.host_status, self.timeout, self.rank

    def lost_peer(self) -> tuple[Stage, int] | None:
        """Returns (stage, rank) of a lost peer, or None if there is none. Does not block."""
        host_status = int(self.host_view[0])
        return (Stage(host_status // MAX_RANKS), host_status % MAX_RANKS - 1) if host_status else None


def num_signals(size: int) -> int:
    """Returns the number of int64 signals on each of `size` ranks: one by stage, kind (READY, ARRIVED) and source."""
    return 2 * len(Stage) * size
