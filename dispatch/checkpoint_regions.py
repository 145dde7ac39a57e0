"""`Regions`: what a layer's forwards decided in regions of activation checkpointing, for their recomputations.

torch.utils.checkpoint compares the shapes of what a forward and its recomputation save, and these depend on the bound
of the step, which may change between the two. So a recomputation takes the decisions of its forward.

A reentrant checkpoint saves nothing in its forward, and needs none of this; other saved-tensor hooks do not recompute.
"""

import inspect
import weakref
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar, final

import torch

Call = TypeVar("Call")


class Region(NamedTuple):
    """A region that runs.

    frame: torch's object for it, the same in forward and recomputations. run: another object in each of these.
    """

    frame: object
    run: object


def present_region() -> Region | None:
    """Returns the innermost region of a checkpoint that is not reentrant, or None outside of one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    if hooks is None:
        return None
    from torch.utils.checkpoint import _CheckpointFrame

    pack = hooks[0]  # of a forward it refers to the frame, of a recomputation weakly
    for cell in getattr(inspect.unwrap(pack), "__closure__", None) or ():
        value = cell.cell_contents
        frame = value() if isinstance(value, weakref.ref) else value
        if isinstance(frame, _CheckpointFrame):
            return Region(frame, pack)
    return None


@final
class Regions(Generic[Call]):
    """The calls of one layer, by region."""

    def __init__(self) -> None:
        self._calls = weakref.WeakKeyDictionary[object, list[Call]]()
        self._next = weakref.WeakKeyDictionary[object, int]()  # of each run

    def call(self, region: Region, new: Callable[[], Call]) -> tuple[Call, bool]:
        """Returns the present call, and whether it is repeated: then it is the forward's in the same place."""
        calls, number = self._calls.setdefault(region.frame, []), self._next.get(region.run, 0)
        self._next[region.run] = number + 1
        if number < len(calls):
            return calls[number], True
        calls.append(new())
        return calls[number], False
