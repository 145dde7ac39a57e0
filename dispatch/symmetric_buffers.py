"""The memory that ranks write to, one after another: made when it is first needed, and anew when more is.

To make some is a collective: every rank asks for as much at the same time.

Legend: S ranks of the EP group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import symmetric_kernels
from sonic_ep.routing import INDEX_DTYPE
from sonic_ep.symmetric_memory import PeerMemory

_LIST_GROWTH = 5 / 4  # lists have that much of it, since their lengths change from step to step
_ALIGNMENT = 256  # bytes, of everything in a buffer
_MAX_VALUE_BYTES = 8  # bytes of a weight or a value

Allocate = Callable[[int], PeerMemory]


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """Three buffers of rows of one width: two that dispatches take turns at, and one for combine. addresses: of each
    buffer, (S,)."""

    memory: PeerMemory
    buffer_bytes: int
    addresses: tuple[Tensor, ...]

    @classmethod
    def allocate(cls, allocate: Allocate, buffer_bytes: int) -> Self:
        memory = allocate(3 * buffer_bytes)
        return cls(memory, buffer_bytes, tuple(memory.at(i * buffer_bytes) for i in range(3)))

    def view(self, buffer: int, like: Tensor, num_rows: int) -> Tensor:
        return self.memory.view(buffer * self.buffer_bytes, (num_rows, like.shape[1]), like.dtype)

    def copy(self, rows: Tensor, buffer: int, rank: int, region: int) -> None:
        """By a copy engine, to where a region begins in that rank's buffer, in rows."""
        offset = buffer * self.buffer_bytes + region * row_bytes(rows)
        self.memory.view_of(rank, offset, rows.shape, rows.dtype).copy_(rows)


@dataclass(frozen=True, slots=True)
class ListBuffers:
    """Room for the index lists that arrive and the values that come back. starts, addresses: of the row of each pair,
    its weight, and the values."""

    memory: PeerMemory
    capacity: int
    starts: tuple[int, int, int]
    addresses: tuple[Tensor, ...]

    @classmethod
    def allocate(cls, allocate: Allocate, capacity: int) -> Self:
        rows, wide = _aligned(capacity * INDEX_DTYPE.itemsize), _aligned(capacity * _MAX_VALUE_BYTES)
        starts = (0, rows, rows + wide)
        memory = allocate(rows + 2 * wide)
        return cls(memory, capacity, starts, tuple(map(memory.at, starts)))


@final
class PeerBuffers:
    """All buffers of a group, shared by the layers that use it."""

    def __init__(self, group: EPGroup, allocate: Allocate) -> None:
        self._group = group
        self._allocate = allocate
        self._counts: tuple[int, PeerMemory] | None = None
        self.list_buffers: ListBuffers | None = None
        self._rows: dict[int, RowBuffers] = {}
        self._of_graphs: list[object] = []

    def signals(self, count: int) -> PeerMemory:
        """int64, zero at the start. Asked for once."""
        return self._allocate(_aligned(torch.int64.itemsize * count))

    def counts(self, needed: int) -> tuple[int, PeerMemory]:
        """How many integers a rank may tell, and where."""
        if self._counts is None or self._counts[0] < needed:
            self._release(self._counts)
            self._counts = None
            num_bytes = symmetric_kernels().NUM_SLOTS * self._group.size * needed * torch.int64.itemsize
            self._counts = needed, self._allocate(_aligned(num_bytes))
        return self._counts

    def lists(self, needed: int) -> ListBuffers:
        """For at least so many pairs."""
        if self.list_buffers is None or self.list_buffers.capacity < needed:
            self._release(self.list_buffers)
            self.list_buffers = None
            self.list_buffers = ListBuffers.allocate(self._allocate, max(1, round(needed * _LIST_GROWTH)))
        return self.list_buffers

    @property
    def pair_capacity(self) -> int:
        """In the lists that are there."""
        return 0 if self.list_buffers is None else self.list_buffers.capacity

    def rows(self, like: Tensor, stride: int) -> RowBuffers:
        """For rows as wide as these, regions of `stride` of them."""
        width = row_bytes(like)
        if not self.has_rows(like, stride):
            self._release(self._rows.get(width))
            self._rows.pop(width, None)
            self._rows[width] = RowBuffers.allocate(self._allocate, _aligned(self._group.size * stride * width))
        return self._rows[width]

    def has_rows(self, like: Tensor, stride: int) -> bool:
        """Are these there already?"""
        rows = self._rows.get(row_bytes(like))
        return rows is not None and rows.buffer_bytes >= self._group.size * stride * row_bytes(like)

    def retain_for_graphs(self) -> None:
        """What a CUDA graph that is being captured may write to lasts, whatever replaces it later."""
        for memory in (self._counts, self.list_buffers, *self._rows.values()):
            if memory is not None and all(memory is not known for known in self._of_graphs):
                self._of_graphs.append(memory)

    def _release(self, memory: object | None) -> None:
        """Before memory is replaced: nobody may be writing to it."""
        if memory is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._group.all_gather_object(None)


def row_bytes(like: Tensor) -> int:
    return like.shape[1] * like.element_size()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
