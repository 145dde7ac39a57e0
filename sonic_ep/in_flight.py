"""`InFlight`: passes a Python object from one operation of a compiled graph to a later one.

A graph passes only tensors from one operation to the next. Async D2H copies of sizes, and rows in flight to other
ranks, are no tensors of the graph, so they are passed here.
"""

from collections.abc import Callable
from threading import get_ident
from typing import Generic, TypeVar, final

from torch import Tensor

V = TypeVar("V")


@final
class InFlight(Generic[V]):
    """Holds at most one value for each group and thread. The key is the address of a tensor that the graph passes on.

    check: called with a value that no operation has popped. The operation that put it relied on a later check.
    """

    def __init__(self, check: Callable[[V], object]) -> None:
        self._check = check
        # Holds the key tensor too: while it lives, no other tensor can have its address.
        self._held: dict[tuple[str, int], tuple[Tensor, V]] = {}

    def put(self, group: str, key: Tensor, value: V) -> None:
        """Stores `value` for the operation that takes `key`, a tensor of at least one element. Flushes first."""
        self.flush(group)
        self._held[group, get_ident()] = key, value

    def pop(self, group: str, key: Tensor) -> V | None:
        """Returns and removes the value stored with `key`. Without one, flushes and returns None."""
        held = self._held.get((group, get_ident()))
        if held is None or held[0].data_ptr() != key.data_ptr():
            self.flush(group)
            return None
        del self._held[group, get_ident()]
        return held[1]

    def flush(self, group: str) -> None:
        """Removes the stored value, if there is one, and calls `check` with it."""
        held = self._held.pop((group, get_ident()), None)
        if held is not None:
            self._check(held[1])
