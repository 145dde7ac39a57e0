"""What kernels need to write into the memory of other ranks, and how they meet: the host's side of
kernels/dispatch/symmetric/signals.py.

Ranks that reach each other's memory work in *stages*: every rank launches the same kernel, tells the others that its
own buffers are free, waits for theirs to be, writes into them, tells them so, and waits to be told. No collective and
no host takes part. Where no rank has a pair to send, nobody meets for lists, rows or sums, and a rank need not launch
these kernels.

Legend: S ranks of the EP group.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor


class Stage(IntEnum):
    """The kernels at which ranks meet. Each has flags of its own, so that a late rank can be told by its stage."""

    LISTS = 0
    DISPATCH = 1
    COMBINE = 2
    COMBINE_SCALARS = 3
    COUNTS = 4


MAX_RANKS = 1 << 16  # a report is stage * MAX_RANKS + rank + 1


@dataclass(frozen=True, slots=True)
class SignalPad:
    """Where the ranks of a group meet.

    signals_S: (S,) int64 addresses of each rank's flags, `num_signals(S)` int64, zero at the start. state: int64 of
    this rank alone: by stage the number of meetings, of programs that are done and of pieces that these took, and what
    it reports of a rank that it waited for in vain, after which it waits for nobody. report: (1,) int64, the same where
    the host can read it while kernels run. patience: nanoseconds to wait for a rank.
    """

    rank: int
    signals_S: Tensor
    state: Tensor
    host_status: Tensor
    timeout: int

    @classmethod
    def of(cls, rank: int, signals_S: Tensor, timeout: int) -> Self:
        state = torch.zeros(3 * len(Stage) + 1, dtype=torch.int64, device=signals_S.device)
        host_status = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=signals_S.is_cuda)
        return cls(rank, signals_S, state, host_status, timeout)

    @property
    def size(self) -> int:
        return self.signals_S.shape[0]

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """What every kernel of a stage takes, in its order."""
        return self.signals_S, self.state, self.host_status, self.timeout, self.rank

    def lost_peer(self) -> tuple[Stage, int] | None:
        """The stage at which a rank was waited for in vain, and that rank; None while all is well. Does not wait."""
        host_status = int(self.host_status.numpy()[0])
        return (Stage(host_status // MAX_RANKS), host_status % MAX_RANKS - 1) if host_status else None


def num_signals(size: int) -> int:
    """int64 flags of each rank of `size`: by stage, ready or arrived, and source rank."""
    return 2 * len(Stage) * size
