"""The buffers in symmetric memory that the ranks write to. Allocated when first needed, reallocated to grow.

Allocation is a collective: every rank allocates the same size at the same point of its program.

Legend: S ranks of the EP group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from sonic_ep.groups import EPGroup
from sonic_ep.groups.frames import FRAME_INTS
from sonic_ep.kernels.backend import symmetric_kernels
from sonic_ep.routing import INDEX_DTYPE
from sonic_ep.symmetric_memory import PeerMemory

LIST_GROWTH = 5 / 4  # allocated / needed pairs, because the number of pairs changes from step to step
_ALIGNMENT = 256  # bytes; every part of a buffer starts at a multiple
_MAX_VALUE_BYTES = 8  # of one weight or value (float64)

Allocate = Callable[[int], PeerMemory]


@dataclass(frozen=True, slots=True)
class RowBuffers:
    """Three buffers for rows of one width: 0 and 1, between which dispatches alternate, and 2 for combine."""

    buffers: tuple[PeerMemory, ...]
    buffer_bytes: int

    @classmethod
    def allocate(cls, allocate: Allocate, buffer_bytes: int) -> Self:
        return cls(tuple(allocate(buffer_bytes) for _ in range(3)), buffer_bytes)

    def view(self, buffer: int, like: Tensor, num_rows: int) -> Tensor:
        """Returns this rank's buffer as (num_rows, width of `like`), in the dtype of `like`."""
        return self.buffers[buffer].view((num_rows, like.shape[1]), like.dtype)

    def copy(self, rows: Tensor, buffer: int, rank: int, region: int) -> None:
        """Copies rows to `rank`'s buffer, from row `region` on, with a copy engine."""
        self.buffers[buffer].view_of(rank, region * row_bytes(rows), rows.shape, rows.dtype).copy_(rows)


@dataclass(frozen=True, slots=True)
class ListBuffers:
    """Buffers for the index lists that arrive, the pairs' rows (int32) and weights, and for values that come back.

    capacity: pairs.
    """

    rows: PeerMemory
    weights: PeerMemory
    values: PeerMemory
    capacity: int

    @classmethod
    def allocate(cls, allocate: Allocate, capacity: int) -> Self:
        item_bytes = (INDEX_DTYPE.itemsize, _MAX_VALUE_BYTES, _MAX_VALUE_BYTES)
        rows, weights, values = (allocate(aligned(capacity * size)) for size in item_bytes)
        return cls(rows, weights, values, capacity)


@final
class PeerBuffers:
    """All buffers of a group, shared by the layers that use it. Methods that allocate are collectives."""

    def __init__(self, group: EPGroup, allocate: Allocate) -> None:
        self._group = group
        self._allocate = allocate
        self._counts: tuple[int, PeerMemory] | None = None
        self.list_buffers: ListBuffers | None = None
        self._rows: dict[int, RowBuffers] = {}
        self.generation = 0  # counts allocations
        self._of_graphs: list[object] = []

    def signals(self, count: int) -> PeerMemory:
        """Allocates `count` int64 signals, all zero. Call it once."""
        return self._new(aligned(torch.int64.itemsize * count))

    def counts(self, needed: int) -> tuple[int, PeerMemory]:
        """Returns the buffer of the all-gather of counts, for at least `needed` integers a rank: (capacity, memory).

        It has memory for layers of other sizes from the start: two ranks may call two of them in another order.
        """
        needed = max(needed, FRAME_INTS)
        if self._counts is None or self._counts[0] < needed:
            self._release(self._counts)
            self._counts = None
            num_bytes = symmetric_kernels().NUM_SLOTS * self._group.size * needed * torch.int64.itemsize
            self._counts = needed, self._new(aligned(num_bytes))
        return self._counts

    def lists(self, needed: int) -> ListBuffers:
        """Returns list buffers for at least `needed` pairs."""
        if self.list_buffers is None or self.list_buffers.capacity < needed:
            self._release(self.list_buffers)
            self.list_buffers = None
            self.list_buffers = ListBuffers.allocate(self._new, max(1, round(needed * LIST_GROWTH)))
        return self.list_buffers

    @property
    def pair_capacity(self) -> int:
        """The number of pairs that the present list buffers hold."""
        return 0 if self.list_buffers is None else self.list_buffers.capacity

    def rows(self, row_bytes: int, stride: int) -> RowBuffers:
        """Returns row buffers for rows of `row_bytes`, with a region of `stride` rows for each source."""
        if not self.has_rows(row_bytes, stride):
            self._release(self._rows.get(row_bytes))
            self._rows.pop(row_bytes, None)
            self._rows[row_bytes] = RowBuffers.allocate(self._new, aligned(self._group.size * stride * row_bytes))
        return self._rows[row_bytes]

    def has_rows(self, row_bytes: int, stride: int) -> bool:
        """Returns True if `rows` would not allocate."""
        rows = self._rows.get(row_bytes)
        return rows is not None and rows.buffer_bytes >= self._group.size * stride * row_bytes

    def _new(self, num_bytes: int) -> PeerMemory:
        self.generation += 1
        return self._allocate(num_bytes)

    def retain_for_graphs(self) -> None:
        """Holds the present buffers for the CUDA graph that is being captured, even if others replace them later."""
        for memory in (self._counts, self.list_buffers, *self._rows.values()):
            if memory is not None and all(memory is not known for known in self._of_graphs):
                self._of_graphs.append(memory)

    def _release(self, memory: object | None) -> None:
        if memory is not None:
            wait_until_unused(self._group)


def wait_until_unused(group: EPGroup) -> None:
    """Waits until no rank writes to memory that is about to be replaced."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    group.all_gather_object(None)


def row_bytes(like: Tensor) -> int:
    """Returns the bytes of one row of `like`."""
    return like.shape[1] * like.element_size()


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
