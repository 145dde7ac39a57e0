"""`Handover`: what one operation of a compiled graph leaves for the next beside tensors, which are all that a graph
passes on: sizes that are on their way to the host, rows that are on their way to other ranks.
"""

from collections.abc import Callable
from threading import get_ident
from typing import Generic, TypeVar, final

from torch import Tensor

V = TypeVar("V")


@final
class Handover(Generic[V]):
    """One value at a time for each group and thread, found by the memory of a tensor that the graph hands from one
    operation to the other.

    check: what has to be done with a value that nobody takes, since whoever left it relied on that.
    """

    def __init__(self, check: Callable[[V], object]) -> None:
        self._check = check
        # With the tensor: as long as it is here no other can have its address.
        self._left: dict[tuple[str, int], tuple[Tensor, V]] = {}

    def leave(self, group: str, beside: Tensor, value: V) -> None:
        """For the operation that takes `beside`, a tensor of at least one element. Checks what was left before."""
        self.settle(group)
        self._left[group, get_ident()] = beside, value

    def take(self, group: str, beside: Tensor) -> V | None:
        """What was left beside this tensor; None if nothing was. Checks what was left beside another."""
        left = self._left.get((group, get_ident()))
        if left is None or left[0].data_ptr() != beside.data_ptr():
            self.settle(group)
            return None
        del self._left[group, get_ident()]
        return left[1]

    def settle(self, group: str) -> None:
        """Check what was left and not taken, if anything was."""
        left = self._left.pop((group, get_ident()), None)
        if left is not None:
            self._check(left[1])
