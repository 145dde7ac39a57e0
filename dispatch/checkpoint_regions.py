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
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Saves:
    """What the forwards of a region have saved, for its recomputations.

    ends: for the first tensor of each, counted in the region, how many there were behind its last. is_compared: whether
    the ranks agree that nothing, or that something, was saved behind the last of them.
    """

    ends: dict[int, int] = field(default_factory=dict)
    is_compared: bool = False


_SAVES = weakref.WeakKeyDictionary[object, _Saves]()  # by frame


def _may_leave_out(region: Region) -> bool:
    """Returns True in a recomputation without a dispatch mode. That of selective checkpointing counts the operations of
    forward and recomputation, which have to be the same."""
    return region.recomputation is not None and torch._C._len_torch_dispatch_stack() == 0


def compared_end(region: Region) -> bool:
    """Returns whether a region that is recomputed has saved nothing behind its last `SavingForward`.

    Call it where all ranks raise an error if they get different answers.
    """
    if not _may_leave_out(region):
        return False
    saves = _SAVES.setdefault(region.frame, _Saves())
    saves.is_compared = True
    return len(region.frame.weak_holders) in saves.ends.values()


class SavingForward(NamedTuple):
    """A forward of an autograd function, which saves tensors for backward. first: how many its region had saved before.

    needs_output: whether anybody reads what it returns. Equal on all ranks.
    """

    first: int = 0
    ends: dict[int, int] | None = None
    needs_output: bool = True

    @classmethod
    def present(cls, *, has_backward: bool, num_ranks: int) -> Self:
        """Call it in front of the forward. has_backward: whether that saves anything."""
        region = present_region() if has_backward else None
        if region is None:
            return cls()
        first, saves = region.num_saved, _SAVES.setdefault(region.frame, _Saves())
        is_last = _may_leave_out(region) and saves.ends.get(first) == len(region.frame.weak_holders)
        return cls(first, saves.ends, not (is_last and (saves.is_compared or num_ranks == 1)))

    def noted(self, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Notes what the forward saves, and returns it."""
        if self.ends is not None:
            self.ends[self.first] = self.first + sum(each is not None for each in tensors)
        return tensors
