"""`EPGroup`: the ranks over which one set of experts is divided, and the collectives that the layer needs.

All collectives of torch.distributed are called here, except for allocation (symmetric_memory.py) and checkpoints. With
one rank no collective is called, and torch.distributed need not be initialised.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, final
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait


class Exchange(Protocol):
    """The part of a transport that the router uses: it gathers a few integers of every rank before rows are sent.

    name: for `exchange_named`; empty with one rank.
    """

    @property
    def name(self) -> str: ...

    def problem_with(self, num_tokens: int) -> str | None:
        """Returns why rows of `num_tokens` tokens cannot be sent, or None. All ranks must know before rows are sent."""
        ...

    def all_gather(self, values: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """Returns every rank's `values` (equal shape and dtype) stacked, (size, *values.shape).

        meanwhile: called once while the gather is in flight, to launch other work.
        """
        ...

    def raise_if_lost(self) -> None:
        """Raises RuntimeError if the host knows that a peer is lost. What was received may then be garbage."""
        ...


_PROCESS_GROUPS: "WeakValueDictionary[str, dist.ProcessGroup]" = WeakValueDictionary()
_EXCHANGES: "WeakValueDictionary[str, Exchange]" = WeakValueDictionary()


def register_exchange(exchange: Exchange) -> None:
    """Registers an exchange for `exchange_named`, for as long as something else refers to it."""
    _EXCHANGES[exchange.name] = exchange


def exchange_named(name: str) -> Exchange | None:
    """Returns the registered exchange of that name, or None. Operations of a compiled graph take only strings."""
    return _EXCHANGES.get(name)


@final
class EPGroup:
    """An expert-parallel group of `size` ranks (ep_size). `rank` is this rank.

    EPGroup(process_group) wraps a torch.distributed group that contains this rank (None: the default group).
    EPGroup.alone() is one rank without torch.distributed.
    EPGroup.named(name) is the group with that `name`; operations of a compiled graph take strings, not objects.

    held: objects that live as long as this one: transports and their buffers.

    Raises RuntimeError if torch.distributed is not initialised, ValueError if this process is not a member.
    """

    def __init__(self, process_group: "dist.ProcessGroup | int | None" = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group first, "
                "or use EPGroup.alone() for a single process"
            )
        if isinstance(process_group, int):  # what dist.new_group returns to a rank outside the group
            raise ValueError(f"global rank {dist.get_rank()} is not a member of the given process group")
        members = process_group or dist.group.WORLD
        assert members is not None
        self.process_group: dist.ProcessGroup | None = members
        self.size: int = dist.get_world_size(members)
        self.rank: int = dist.get_rank(members)
        self.name: str = members.group_name
        self.held: dict[object, object] = {}
        _PROCESS_GROUPS[self.name] = members

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns self: a copy of a layer uses the same ranks."""
        return self

    def __reduce__(self) -> Any:
        """Raises TypeError for more than this rank alone: another process has no such group."""
        if self.process_group is None:
            return EPGroup.alone, ()
        raise TypeError(
            f"an EPGroup of {self.size} ranks, and a layer that has it, cannot be pickled: save the layer's "
            "state_dict(), or use sonic_ep.checkpoint"
        )

    @classmethod
    def alone(cls) -> "EPGroup":
        """Returns the group of one rank, which calls no collective."""
        group = cls.__new__(cls)
        group.process_group, group.size, group.rank, group.name, group.held = None, 1, 0, "", {}
        return group

    @classmethod
    def named(cls, name: str) -> "EPGroup":
        """Returns the group of that name. The empty name is `alone()`.

        Raises KeyError unless this process has made an EPGroup of it.
        """
        return cls(_PROCESS_GROUPS[name]) if name else cls.alone()

    @property
    def backend(self) -> str:
        """The name of the torch.distributed backend; "none" for `alone()`."""
        return "none" if self.process_group is None else dist.get_backend(self.process_group)

    def all_gather(self, values: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """`Exchange.all_gather` by the group's backend."""
        if self.size == 1:
            if meanwhile is not None:
                meanwhile()
            return values.unsqueeze(0)
        gathered = values.new_empty((self.size, *values.shape))
        parts = list(gathered.unbind(0))
        # Not under capture, which stays on one stream, nor on the CPU, where nothing can overlap.
        overlaps = meanwhile is not None and values.is_cuda and host_may_wait(values)
        work = dist.all_gather(parts, values.contiguous(), group=self.process_group, async_op=overlaps)
        if meanwhile is not None:
            meanwhile()
        if work is not None:
            work.wait()
        return gathered

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Sends `send[q]` consecutive rows to each rank q. Returns the received rows, `receive[s]` from each rank s.

        rows: (sum(send), ...) in order of destination rank. Result: (sum(receive), ...) in order of source rank, in the
        dtype of `rows`; with one rank, `rows` itself.
        """
        if self.size == 1:
            return rows
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=self.process_group)
        return received

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sums `values` over the ranks, in place, and returns them."""
        if self.size > 1:
            dist.all_reduce(values, group=self.process_group)
        return values

    def all_gather_object(self, value: Any) -> list[Any]:
        """Returns every rank's picklable `value`, in rank order. Slow: only for construction and errors."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def raise_together(
        self, problem: str | None, *, error: type[ValueError | TypeError | OSError] = ValueError, **same: object
    ) -> None:
        """Raises `error` on every rank if any rank has a problem. The message names the ranks.

        A collective: every rank must call it, with None if it has no problem. same: values that must be equal on all
        ranks; otherwise ValueError.
        """
        reports = self.all_gather_object((problem, same))
        if self.size == 1 and problem is not None:
            raise error(problem)
        found = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text is not None]
        if found:
            raise error("; ".join(found))
        for name in same:
            values = [their[name] for _, their in reports]
            if any(value != values[0] for value in values):
                shown = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(f"the ranks of the EP group disagree about {name}: {shown}")
