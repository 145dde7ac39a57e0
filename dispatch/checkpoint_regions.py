"""`Regions`: what a layer's forwards decided in regions of activation checkpointing, for their recomputations.

torch.utils.checkpoint compares the shapes of what a forward and its recomputation save, and these depend on the bound
of the step, which may change between the two. So a recomputation takes the decisions of its forward.

`SavingForward`: whether a recomputation has to make what a forward returns. It runs only for tensors that its region
has saved. So nobody reads the outputs of the last forward that saved any.

A reentrant checkpoint saves nothing in its forward, and needs none of this; other saved-tensor hooks do not recompute.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Self, TypeVar, final

import torch
from torch import Tensor

Call = TypeVar("Call")


class Region(NamedTuple):
    """A region that runs.

    frame: torch's object for it, the same in forward and recomputations. run: another object in each of these.
    recomputation: torch's identity of it; None in forward.
    """

    frame: Any
    run: object
    recomputation: object

    @property
    def num_saved(self) -> int:
        """How many tensors this run has saved so far."""
        frame, number = self.frame, self.recomputation
        return len(frame.weak_holders) if number is None else frame.recomp_counter[number]


def present_region() -> Region | None:
    """Returns the innermost region of a checkpoint that is not reentrant, or None outside of one."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    if hooks is None:
        return None
    from torch.utils.checkpoint import _CheckpointFrame

    pack = hooks[0]  # of a forward it refers to the frame, of a recomputation weakly, and to "gid"
    function = inspect.unwrap(pack)
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    found: dict[str, Any] = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    for value in found.values():
        frame = value() if isinstance(value, weakref.ref) else value
        if isinstance(frame, _CheckpointFrame):
            return Region(frame, pack, found.get("gid"))
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


# By frame: for the first tensor that a forward has saved, counted in its region, how many there were behind its last.
_ENDS = weakref.WeakKeyDictionary[object, dict[int, int]]()


def ends_with_saving_forward(region: Region) -> bool:
    """Returns True in a recomputation if the region has saved nothing behind its last `SavingForward`."""
    return region.recomputation is not None and len(region.frame.weak_holders) in _ENDS.get(region.frame, {}).values()


class SavingForward(NamedTuple):
    """A forward of an autograd function, which saves tensors for backward. first: how many its region had saved before.

    needs_output: whether anybody reads what it returns. Ranks that call the same layers agree on it if they agree on
    `ends_with_saving_forward`, which they compare, see groups/order.py.
    """

    first: int = 0
    ends: dict[int, int] | None = None
    needs_output: bool = True

    @classmethod
    def present(cls, has_backward: bool) -> Self:
        """Call it in front of the forward. has_backward: whether that saves anything."""
        region = present_region() if has_backward else None
        if region is None:
            return cls()
        first, ends = region.num_saved, _ENDS.setdefault(region.frame, {})
        is_last = region.recomputation is not None and ends.get(first) == len(region.frame.weak_holders)
        return cls(first, ends, not is_last)

    def noted(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Notes what the forward saves, and returns it."""
        if self.ends is not None:
            self.ends[self.first] = self.first + sum(each is not None for each in tensors)
        return tensors
