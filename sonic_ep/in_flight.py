"""`InFlight`: what one operation of a compiled graph leaves for the next beside tensors, which are all that a graph
passes on: sizes that are on their way to the host, rows that are on their way to other ranks.
"""

from collections.abc import Callable
from threading import get_ident
from typing import Generic, TypeVar, final

from torch import Tensor

V = TypeVar("V")


@final
class InFlight(Generic[V]):
    """One value at a time for each group and thread, found by the memory of a tensor that the graph hands from one
    operation to the other.

    check: what has to be done with a value that nobody takes, since whoever left it relied on that.
    """

    def __init__(self, check: Callable[[V], object]) -> None:
        self._check = check
        # With the tensor: as long as it is here no other can have its address.
        self._held: dict[tuple[str, int], tuple[Tensor, V]] = {}

    def put(self, group: str, key: Tensor, value: V) -> None:
        """For the operation that takes `key`, a tensor of at least one element. Checks what was left before."""
        self.flush(group)
        self._held[group, get_ident()] = key, value

    def pop(self, group: str, key: Tensor) -> V | None:
        """What was left beside this tensor; None if nothing was. Checks what was left beside another."""
        held = self._held.get((group, get_ident()))
        if held is None or held[0].data_ptr() != key.data_ptr():
            self.flush(group)
            return None
        del self._held[group, get_ident()]
        return held[1]

    def flush(self, group: str) -> None:
        """Check what was left and not taken, if anything was."""
        held = self._held.pop((group, get_ident()), None)
        if held is not None:
            self._check(held[1])
