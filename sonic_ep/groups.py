"""`EPGroup`: the ranks that share one set of experts, and the few collectives that the layer needs of them.

With symmetric_memory.py the only file that talks to torch.distributed. With one rank no collective is ever called, and
torch.distributed need not be initialised.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, final
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait


class Exchange(Protocol):
    """By what way ranks tell each other a few integers before they exchange rows: a transport. name: of
    `exchange_named`; empty for one rank."""

    @property
    def name(self) -> str: ...

    @property
    def sends_unchecked(self) -> bool:
        """May rows be sent before the host has checked a routing? Then its counts must be void if it is bad."""
        ...

    def problem_with(self, num_tokens: int) -> str | None:
        """Why rows of so many tokens cannot be exchanged, which all ranks must be told before anybody tries."""
        ...

    def all_gather(self, values: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """Every rank's `values` (equal shape and dtype) stacked, (size, *values.shape).

        meanwhile: what to do, or to launch, while they travel.
        """
        ...

    def raise_if_lost(self) -> None:
        """RuntimeError if, as far as the host knows, a rank was waited for in vain: what came is not to be believed."""
        ...


_PROCESS_GROUPS: "WeakValueDictionary[str, dist.ProcessGroup]" = WeakValueDictionary()
_EXCHANGES: "WeakValueDictionary[str, Exchange]" = WeakValueDictionary()


def register_exchange(exchange: Exchange) -> None:
    """Let `exchange_named` find it, as long as somebody holds it."""
    _EXCHANGES[exchange.name] = exchange


def exchange_named(name: str) -> Exchange | None:
    """The exchange of that name, if somebody holds it: operations of a compiled graph take strings, not objects."""
    return _EXCHANGES.get(name)


@final
class EPGroup:
    """An expert-parallel group: `size` ranks (ep_size), this one being `rank`.

    EPGroup(process_group) wraps any torch.distributed group that this rank is in (None: the default group).
    EPGroup.alone() is one rank without torch.distributed.
    held: what lives as long as this object does: transports and their buffers.
    EPGroup.named(name) is the group whose `name` that is: operations of a compiled graph take strings, not objects.

    Raises RuntimeError when torch.distributed is not initialised, ValueError when this process is not a member.
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
        """The copy of a layer is of the same ranks."""
        return self

    @classmethod
    def alone(cls) -> "EPGroup":
        """The group of one rank: takes no collective at all."""
        group = cls.__new__(cls)
        group.process_group, group.size, group.rank, group.name, group.held = None, 1, 0, "", {}
        return group

    @classmethod
    def named(cls, name: str) -> "EPGroup":
        """The group of that name, of which this process must hold an EPGroup. The name of a group of one is empty."""
        return cls(_PROCESS_GROUPS[name]) if name else cls.alone()

    @property
    def backend(self) -> str:
        """Name of the torch.distributed backend ("none" alone)."""
        return "none" if self.process_group is None else dist.get_backend(self.process_group)

    def all_gather(self, values: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        """As Exchange has it, by the group's backend."""
        if self.size == 1:
            if meanwhile is not None:
                meanwhile()
            return values.unsqueeze(0)
        gathered = values.new_empty((self.size, *values.shape))
        parts = list(gathered.unbind(0))
        # What a CUDA graph captures stays on one stream; where the host computes there is nothing to overlap.
        overlaps = meanwhile is not None and values.is_cuda and host_may_wait(values)
        work = dist.all_gather(parts, values.contiguous(), group=self.process_group, async_op=overlaps)
        if meanwhile is not None:
            meanwhile()
        if work is not None:
            work.wait()
        return gathered

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send `send[q]` consecutive rows to rank q, receive `receive[s]` rows of rank s, in rank order.

        rows: (sum(send), ...) contiguous; result (sum(receive), ...) of the same dtype.
        """
        if self.size == 1:
            return rows
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=self.process_group)
        return received

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns `values`."""
        if self.size > 1:
            dist.all_reduce(values, group=self.process_group)
        return values

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order. For construction and errors, never for a step."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values

    def raise_together(self, problem: str | None, **same: object) -> None:
        """Raise ValueError on every rank if any rank has a problem; the message names the ranks.

        A collective: every rank must call it, with None where all is well. same: what must be equal on all of them.
        """
        reports = self.all_gather_object((problem, same))
        if self.size == 1 and problem is not None:
            raise ValueError(problem)
        found = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text is not None]
        if found:
            raise ValueError("; ".join(found))
        for name in same:
            values = [their[name] for _, their in reports]
            if any(value != values[0] for value in values):
                shown = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(f"the ranks of the EP group disagree about {name}: {shown}")
