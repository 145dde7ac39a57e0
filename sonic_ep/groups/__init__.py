"""`EPGroup`: the ranks over which one set of experts is divided, and the collectives that the layer needs.

All collectives of torch.distributed are called here, except for allocation (symmetric_memory.py) and checkpoints. With
one rank no collective is called, and torch.distributed need not be initialised.

The host waits for other ranks in few places: in a collective over gloo, in `all_gather_object`, and where a transport
calls `wait_until` before it reads sizes. There it waits `timeout` seconds at most (lost_ranks.py). Ranks that are in
different calls hear of it in their next exchange (frames.py).
"""

import functools
import itertools
import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, Self, TypeVar, final
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.nn.functional import pad

from sonic_ep.async_d2h import AsyncD2H, host_may_wait
from sonic_ep.config import TransportConfig
from sonic_ep.groups.frames import (
    OBJECT,
    REPORT,
    SAME_CALLS,
    Frame,
    FramesDifferError,
    inline_parts,
    problem_with_splits,
)
from sonic_ep.groups.hosts import HostLayout, host_name
from sonic_ep.groups.lost_ranks import (
    Collective,
    LostRankError,
    PeerWatch,
    Whereabouts,
    in_backward,
    polled,
    work_has_ended,
)
from sonic_ep.groups.order import Forward, Order, Ran, problem_with_orders

__all__ = ["EPGroup", "Exchange", "HostLayout", "LostRankError", "exchange_named", "register_exchange"]


class Exchange(Protocol):
    """The part of a transport that the router uses: it gathers a few integers of every rank before rows are sent.

    name: for `exchange_named`; empty with one rank.
    """

    @property
    def name(self) -> str: ...

    def problem_with(self, num_tokens: int) -> str | None:
        """Returns why rows of `num_tokens` tokens cannot be sent, or None. All ranks must know before rows are sent."""
        ...

    def all_gather(
        self, values: Tensor, meanwhile: Callable[[], None] | None = None, *, used: int | None = None
    ) -> Tensor:
        """Returns every rank's `values` (equal shape and dtype) stacked, (size, *values.shape).

        meanwhile: called once while the gather is in flight, to launch other work. used: only so many of `values`, of
        one dimension, matter; the result may have no more columns.
        """
        ...

    def raise_if_lost(self) -> None:
        """Raises RuntimeError if the host knows that a peer is lost. The values received may then be garbage."""
        ...


_PROCESS_GROUPS: "WeakValueDictionary[str, dist.ProcessGroup]" = WeakValueDictionary()
_EXCHANGES: "WeakValueDictionary[str, Exchange]" = WeakValueDictionary()
# Shared by the EPGroups of one process group: the watch, the order, and the name of the backend by type of device.
_SHARED: "WeakKeyDictionary[dist.ProcessGroup, tuple[PeerWatch, Order, dict[str, str]]]" = WeakKeyDictionary()
# Groups of some ranks of a process group, by these ranks, with their names. Names are not used again in a process.
_PARTS: "WeakKeyDictionary[dist.ProcessGroup, dict[range, tuple[str, dist.ProcessGroup]]]" = WeakKeyDictionary()
_NUMBERS = itertools.count()
# torch 2.13 deprecates the older name, and 2.11 does not have the newer one.
_ALL_GATHER: "Callable[..., dist.Work | None]" = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
_TIMEOUT = TransportConfig().timeout
_Value = TypeVar("_Value")
_Options = TypeVar("_Options", AllgatherOptions, AllToAllOptions)


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
    order: of the backwards of all layers with these ranks, see order.py.
    timeout: seconds that the host waits for another rank, see lost_ranks.py. A layer sets its transport.timeout.

    Raises RuntimeError if torch.distributed is not initialised, ValueError if this process is not a member. Every
    collective raises LostRankError, a RuntimeError that names the rank, if one does not come; the process group is then
    of no more use. stage: names the collective in that error. ValueError, on every rank, if the ranks are in different
    calls and an exchange shows it, see frames.py; the group then works on.
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
        self.timeout = _TIMEOUT
        if members not in _SHARED:
            backends = dict(pair.split(":") for pair in dist.get_backend_config(members).split(","))
            store, world = functools.partial(_store_of, ref(members)), distributed_c10d._get_default_store
            elsewhere = Whereabouts(self.name, dist.get_process_group_ranks(members), world)
            watch = PeerWatch(self.rank, self.size, store, elsewhere)
            _SHARED[members] = watch, Order(), backends
        self._watch, self.order, self._backends = _SHARED[members]
        _PROCESS_GROUPS[self.name] = members

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Returns self: a copy of a layer uses the same ranks."""
        return self

    def __reduce__(self) -> "tuple[Callable[[], EPGroup], tuple[()]]":
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
        group.timeout, group.order = _TIMEOUT, Order()
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

    @property
    def layer(self) -> int:
        """The number of the MoE layer of which this rank runs the forward; 0 for none. For errors, and `Forward`."""
        return self._watch.layer if self.size > 1 else 0

    @property
    def running(self) -> str:
        """The layer that this rank runs, in words for errors: "layer 2 in backward". Empty for one without a number."""
        layer = self.order.last.layer if in_backward() else self.layer
        return f"layer {layer}{' in backward' if in_backward() else ''}" if layer else ""

    def enter_layer(self, number: int) -> None:
        """Sets `layer`, of all groups of these ranks."""
        if self.size > 1:
            self._watch.layer = number

    def hosts(self, ranks_per_host: int | None = None) -> HostLayout:
        """Returns which ranks share a host. A collective unless ranks_per_host is set. Later errors name the hosts.

        ranks_per_host: imitates hosts of that many consecutive ranks, see `HostLayout.imitated`.
        """
        if ranks_per_host is None:
            layout = HostLayout(tuple(self.all_gather_object(host_name(), stage="the choice of a transport")))
        else:
            layout = HostLayout.imitated(self.size, ranks_per_host)
        self._watch.hosts = layout
        return layout

    @property
    def host_layout(self) -> HostLayout:
        """The last result of `hosts`, on any EPGroup of these ranks; before, and for one rank, all are on one host.

        A transport calls `hosts` when it is chosen, except with transport.kind="all_to_all".
        """
        return self._watch.hosts if self.size > 1 else HostLayout(("",))

    def all_gather(
        self,
        values: Tensor,
        meanwhile: Callable[[], None] | None = None,
        *,
        used: int | None = None,
        stage: str = "counts",
        layer: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`Exchange.all_gather` by the group's backend. layer: its number, if it is not `self.layer`.

        out: (size, *values.shape), in place of a new tensor for the result, with several ranks. Only the `used` columns
        of it may be written.
        """
        if self.size == 1:
            if meanwhile is not None:
                meanwhile()
            return values.unsqueeze(0)
        if self._is_over_gloo(values):
            values = values if used is None else values[:used]
            data = values.detach().cpu().contiguous().flatten().view(torch.uint8)
            joined = torch.cat(self._gather_bytes(data, data.shape[0], stage, layer))
            if meanwhile is not None:
                meanwhile()
            joined = joined.view(values.dtype).view(self.size, *values.shape)
            if out is None:
                return joined.to(values.device)
            (out if used is None else out[:, :used]).copy_(joined)
            return out
        gathered = values.new_empty((self.size, *values.shape)) if out is None else out
        # Not under capture, which stays on one stream, nor on the CPU, where nothing can overlap.
        overlaps = meanwhile is not None and values.is_cuda and host_may_wait(values)
        self._watch.begin(stage, layer)
        flat = gathered.view(-1), values.contiguous().view(-1)
        work = _ALL_GATHER(*flat, group=self.process_group, async_op=overlaps)
        if overlaps and meanwhile is not None:
            meanwhile()
        if work is not None:
            work.wait()
        if meanwhile is not None and not overlaps:
            meanwhile()
        return gathered

    def begin_backward(self, forward: Forward, like: Tensor) -> None:
        """Adds the backward of a forward to `order`. Over gloo, where the host waits anyway, compares the ranks'.

        There an all-to-all whose sizes differ between ranks would end the process. like: what is sent.
        Raises ValueError, on every rank, if the orders differ.
        """
        if self.size == 1:
            return
        self.order.add(forward)
        if not forward.waits or not self._is_over_gloo(like):
            return
        own, ran = self.order.ran()
        hashes = self.all_gather(
            torch.tensor([own], device=like.device), stage="order of backwards", layer=forward.layer
        )
        orders = hashes.flatten().tolist()
        if len(set(orders)) > 1:
            raise self._error_of_orders(self.all_gather_object(ran, stage="order of backwards"), orders)

    def _error_of_orders(self, ran: list[list[Ran]], hashes: list[int]) -> ValueError:
        """Returns the error for what the ranks ran, rank by rank. `order` starts anew, so that it is raised once."""
        self.order.send()
        return ValueError(problem_with_orders(ran, hashes))

    def all_to_all(
        self,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        *,
        stage: str = "an all-to-all",
        layer: int | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Sends `send[q]` consecutive rows to each rank q. Returns the received rows, `receive[s]` from each rank s.

        rows: (sum(send), ...) in order of destination rank. Result: (sum(receive), ...) in order of source rank, in the
        dtype of `rows`; with one rank, `rows` itself. layer: its number, if it is not `self.layer`. out: in place of a
        new tensor for the result.
        """
        if self.size == 1:
            return rows if out is None else out.copy_(rows)
        received, send, receive = out, list(send), list(receive)
        if received is None:
            received = rows.new_empty((sum(receive), *rows.shape[1:]))
        if not self._is_over_gloo(rows):
            self._watch.begin(stage, layer)
            dist.all_to_all_single(received, rows.contiguous(), receive, send, group=self.process_group)
            return received
        with self._watch.lock:
            if self._watch.is_threaded:
                self._check_splits(rows, send, receive, stage, layer)
            collective, group = self._watch.begin(stage, layer), self._gloo
            work = group.alltoall_base(received, rows.contiguous(), receive, send, self._limited(AllToAllOptions()))
            self._watch.wait(work_has_ended(work), collective, self.timeout)
        return received

    def _check_splits(
        self, rows: Tensor, send: list[int], receive: list[int], stage: str, layer: int | None = None
    ) -> None:
        """Raises ValueError, on every rank, if an all-to-all over gloo would end a process."""
        row_bytes = rows.shape[1:].numel() * rows.element_size()
        own = torch.tensor([*send, *receive, row_bytes], device="cpu")
        everywhere = self.all_gather(own, stage=f"{stage}, sizes", layer=layer)
        problem = problem_with_splits(everywhere.tolist(), stage)
        if problem is not None:
            raise ValueError(problem)

    def all_reduce(self, values: Tensor, *, stage: str = "an all-reduce") -> Tensor:
        """Sums `values` over the ranks, in place, and returns them."""
        if self.size > 1 and self._is_over_gloo(values):
            values.copy_(self.all_gather(values, stage=stage, layer=0).sum(0))
        elif self.size > 1:
            self._watch.begin(stage, 0)
            dist.all_reduce(values, group=self.process_group)
        return values

    def all_gather_object(self, value: _Value, *, stage: str = "a check of all ranks") -> list[_Value]:
        """Returns every rank's picklable `value`, in rank order. Slow: only for construction and errors."""
        return self._gather_objects(value, OBJECT, stage)

    def _gather_objects(self, value: _Value, size: int, stage: str) -> list[_Value]:
        """`all_gather_object`. size: OBJECT or REPORT."""
        if self.size == 1:
            return [value]
        parts = self._gather_bytes(_pickled(value), size, stage)
        return [pickle.loads(part.numpy().tobytes()) for part in parts]

    def _gather_bytes(self, data: Tensor, size: int, stage: str, layer: int | None = None) -> list[Tensor]:
        """Returns every rank's bytes, uint8 on the CPU: of the frames, and by another all-gather of what they lack.

        size: see Frame. Raises ValueError, on every rank, if the ranks are in different calls.
        """
        with self._watch.lock:
            collective, is_threaded = self._watch.begin(stage, layer), self._watch.is_another_thread()
            own = Frame(collective, size, data.shape[0], self.order.exchange, is_threaded)
            gathered = self._gather_of_size(own.packed(data), collective)
            try:
                found = inline_parts(gathered, own)
            except FramesDifferError as error:
                self.order.restart(error.exchange)
                raise ValueError(str(error)) from None
            self._watch.is_threaded |= found.is_threaded
            if found.parts is not None:
                return found.parts
            padded = pad(data, (0, max(found.lengths) - data.shape[0]))
            gathered = self._gather_of_size(padded, collective)
        return [row[:length] for row, length in zip(gathered, found.lengths, strict=True)]

    def _gather_of_size(self, data: Tensor, collective: Collective) -> Tensor:
        """Returns (size, B) uint8 on the CPU. B must be equal on all ranks."""
        data = data.to(self._object_device)
        gathered = data.new_empty(self.size, data.shape[0])
        parts = list(gathered.unbind(0))
        if not self._is_over_gloo(data):
            dist.all_gather(parts, data, group=self.process_group)
            return self.to_host(gathered, stage=collective.stage)
        work = self._gloo.allgather([parts], [data], self._limited(AllgatherOptions()))
        self._watch.wait(work_has_ended(work), collective, self.timeout)
        return gathered.cpu()

    def all_to_all_object(self, values: Sequence[_Value], *, stage: str) -> list[_Value]:
        """Sends the picklable `values[q]` to each rank q. Returns what each rank sent to this one, in rank order.

        Slow: only for checkpoints.
        """
        if self.size == 1:
            return [*values]
        parts, ones = [_pickled(value) for value in values], [1] * self.size
        self._gather_bytes(torch.empty(0, dtype=torch.uint8, device="cpu"), OBJECT, stage)
        send = [part.shape[0] for part in parts]
        lengths = self.all_to_all(torch.tensor(send, device=self._object_device), ones, ones, stage=stage)
        receive = self.to_host(lengths, stage=stage).tolist()
        received = self.all_to_all(torch.cat(parts).to(self._object_device), send, receive, stage=stage)
        return [pickle.loads(part.numpy().tobytes()) for part in self.to_host(received, stage=stage).split(receive)]

    @property
    def _object_device(self) -> torch.device:
        """The device of pickled objects: the CPU, if a backend of the group is for it."""
        return torch.device("cpu" if "cpu" in self._backends else next(iter(self._backends)))

    def _limited(self, options: _Options) -> _Options:
        """Returns gloo's options with a limit of its own: threads that still wait would keep a process from ending."""
        options.asyncOp, options.timeout = True, timedelta(seconds=self.timeout)
        return options

    def wait_until(self, is_ready: Callable[[], bool], *, stage: str) -> None:
        """Returns once `is_ready()`, for what the device computes from other ranks' values. Raises LostRankError."""
        if not is_ready():
            self._watch.wait(polled(is_ready), self._watch.current(stage), self.timeout)

    def to_host(self, values: Tensor, *, stage: str) -> Tensor:
        """Returns what the device computes from other ranks' values, on the CPU. Raises LostRankError."""
        copy = AsyncD2H(values)
        self.wait_until(lambda: copy.is_ready, stage=stage)
        return copy.read()

    def _is_over_gloo(self, values: Tensor) -> bool:
        return self._backends.get(values.device.type) == "gloo"

    @property
    def _gloo(self) -> dist.ProcessGroup:
        assert self.process_group is not None
        return self.process_group

    def name_of_part(self, ranks: range) -> str:
        """Returns the name of a group of torch with these ranks of this one, this rank among them, for rendezvous.

        It has no communicator: nothing is exchanged here, and its ranks alone need to call this. Its store is a part of
        this group's, so it is another one for every group of ranks, and after torch.distributed is initialised again.
        """
        assert self.process_group is not None
        parts = _PARTS.setdefault(self.process_group, {})
        if ranks not in parts:
            store = dist.PrefixStore(f"sonic_ep/ranks {ranks[0]} to {ranks[-1]}", _store_of(ref(self.process_group)))
            name = f"{self.name} ranks {ranks[0]} to {ranks[-1]} {next(_NUMBERS)}"
            parts[ranks] = name, dist.ProcessGroup(store, ranks.index(self.rank), len(ranks))
            distributed_c10d._register_process_group(name, parts[ranks][1])  # pyright: ignore[reportArgumentType]
        return parts[ranks][0]

    def raise_together(
        self,
        problem: str | None,
        *,
        error: type[ValueError | TypeError | OSError] = ValueError,
        stage: str = "a check of all ranks",
        **same: object,
    ) -> None:
        """Raises `error` on every rank if any rank has a problem. The message names the ranks.

        A collective: every rank must call it, with None if it has no problem. same: values, by name, that must be
        equal on all ranks; otherwise ValueError. So must the orders of backwards since the last exchange of counts.
        """
        reports = self._gather_objects((problem, same, *self.order.ran()), REPORT, stage)
        if self.size == 1 and problem is not None:
            raise error(problem)
        orders = [order for _, _, order, _ in reports]
        if len(set(orders)) > 1:
            raise self._error_of_orders([ran for *_, ran in reports], orders)
        found = [f"rank {rank}: {text}" for rank, (text, *_) in enumerate(reports) if text is not None]
        if found:
            raise error("; ".join(found))
        if any(their.keys() != same.keys() for _, their, *_ in reports):
            shown = ", ".join(
                f"rank {rank}: {' '.join(their) or 'nothing'}" for rank, (_, their, *_) in enumerate(reports)
            )
            raise ValueError(f"the ranks of the EP group are in different calls, which compare: {shown}; {SAME_CALLS}")
        for name in same:
            values = [their[name] for _, their, *_ in reports]
            if any(value != values[0] for value in values):
                shown = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))
                raise ValueError(f"the ranks of the EP group disagree about {name}: {shown}; give every rank the same")


def _pickled(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _store_of(process_group: "ref[dist.ProcessGroup]") -> dist.Store:
    """Returns the store through which the ranks of a group met. Raises KeyError after it has been destroyed."""
    members = process_group()
    return distributed_c10d._world.pg_map[members][1]  # pyright: ignore[reportArgumentType]
