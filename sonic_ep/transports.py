"""Chooses the transport of an EP group: once, at its first use, by which GPUs can write to each other."""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from typing import Self, final

import torch
from torch import Tensor

from sonic_ep.config import TransportConfig
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.bounded_steps import BoundedSteps, Layer, LayerTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.protocol import DispatchHandle, Pending, PreparedDispatch
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.dispatch.two_hop import TwoHopTransport
from sonic_ep.extras import missing_extra
from sonic_ep.groups import EPGroup, HostLayout, exchange_named, register_exchange
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.routers.count_exchange import raise_problems
from sonic_ep.routing import Routing
from sonic_ep.symmetric_memory import problem_with_peers, symmetric_memory

_LOG = logging.getLogger("sonic_ep.transports")

_Chosen = AllToAllTransport | SymmetricTransport | TwoHopTransport


@final
class GroupTransport:
    """The transport of several ranks. Passes every call on to a Symmetric-, TwoHop- or AllToAllTransport.

    It chooses one of them as `config` says, see TransportConfig, at the first use for a device type, which is then a
    collective. Raises ValueError, on every rank, if the ranks do not support what `config` names.

    text: `config` as a string, by which an operation of a compiled graph finds this transport. name: for
    `exchange_named`.
    """

    def __init__(self, group: EPGroup, config: TransportConfig) -> None:
        # A new EPGroup: `group` refers to this transport, and a reference back would be a cycle.
        self.group = EPGroup(group.process_group)
        self.group.timeout = config.timeout
        self.config = config
        self.text = _text_of(config)
        self.name = _name_of(group, self.text)
        self._chosen: dict[str, _Chosen] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Returns self: a copy of a layer uses the same ranks and buffers."""
        return self

    @property
    def batch_invariant(self) -> bool:
        return self.config.batch_invariant

    def problem_with(self, num_tokens: int) -> str | None:
        problems = (transport.problem_with(num_tokens) for transport in self._chosen.values())
        return next((problem for problem in problems if problem is not None), None)

    def all_gather(
        self, values: Tensor, meanwhile: Callable[[], None] | None = None, *, used: int | None = None
    ) -> Tensor:
        return self.on(values).all_gather(values, meanwhile, used=used)

    def raise_if_lost(self) -> None:
        for transport in self._chosen.values():
            transport.raise_if_lost()

    def prepare(self, routing: Routing, plan: RankPlan, x_TH: Tensor | None = None) -> PreparedDispatch:
        if routing.weights_N.device.type not in self._chosen:
            routing.check()  # choosing a transport is a collective
        return self.on(routing.weights_N).prepare(routing, plan, x_TH)

    def dispatch(self, x_TH: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        return self.on(x_TH).dispatch(x_TH, handle, overlap=overlap)

    def combine(
        self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle, *, overlap: bool = False
    ) -> Pending:
        return self.on(values_PH).combine(values_PH, weights_P, handle, overlap=overlap)

    def combine_scalars(self, parts_PZ: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        return self.on(parts_PZ).combine_scalars(parts_PZ, handle, overlap=overlap)

    def known_device(self, device: torch.device) -> torch.device:
        """Returns `device`, or if no transport was chosen for its type, the current device of a type with one.

        For a rank that may have weights or rows on another device than the other ranks: to choose is a collective.
        """
        return device if device.type in self._chosen or not self._chosen else torch.device(next(iter(self._chosen)))

    def chosen(self, device: torch.device) -> _Chosen | None:
        """Returns the transport for a device type, if it has been chosen."""
        return self._chosen.get(device.type)

    def on(self, values: Tensor) -> _Chosen:
        """Returns the transport for the device type of `values`. A collective at its first use."""
        return self.on_device(values.device)

    def on_device(self, device: torch.device) -> _Chosen:
        if device.type not in self._chosen:
            self._chosen[device.type] = _choose(self.group, self.config, device)
        return self._chosen[device.type]


def transport_type(group: EPGroup) -> type[LocalTransport] | type[GroupTransport]:
    """Returns the type that `transport_for` returns."""
    return LocalTransport if group.size == 1 else GroupTransport


def transport_for(group: EPGroup, config: TransportConfig | None = None) -> LocalTransport | GroupTransport:
    """Returns the transport of a group. All layers with the same ranks and config share one object and its buffers.

    It lives as long as any EPGroup that it was returned for, because new buffers take tens of milliseconds. A
    collective at the first call for an EPGroup and a config. Raises ValueError of `HostLayout.imitated`.
    """
    config = config or TransportConfig()
    if group.size == 1:
        return LocalTransport(batch_invariant=config.batch_invariant)
    if config.ranks_per_host is not None:
        HostLayout.imitated(group.size, config.ranks_per_host)  # raises now what the first use would
    text = _text_of(config)
    name = _name_of(group, text)
    group.timeout = config.timeout
    transport = group.held.get(name)
    if not isinstance(transport, GroupTransport):
        transport = _found(group, text)
        # Another rank may have garbage-collected its transport already. Then all ranks make a new one.
        everywhere = all(group.all_gather_object(transport is not None, stage="construction"))
        if transport is None or not everywhere:
            transport = GroupTransport(group, config)
            register_exchange(transport)
        group.held[name] = transport
    return transport


def steps_of(
    group: EPGroup, transport: LocalTransport | GroupTransport, transport_of: Callable[[Layer], LayerTransport | None]
) -> BoundedSteps[Layer] | None:
    """Returns the steps of a layer; None on one rank, where sizes follow from T. transport_of: see BoundedSteps."""
    if group.size == 1:
        return None
    check = functools.partial(raise_problems, problem=None, group=group, exchange=transport)
    return BoundedSteps(group, check, transport_of)


def bounded_transport(
    transport: LocalTransport | GroupTransport, like: Tensor, row_bytes: int, *, may_be_static: bool = False
) -> LayerTransport | None:
    """Returns how rows of `row_bytes` on the device of `like` travel if their number can be bounded, or None.

    may_be_static: whether these steps have a capacity factor. A collective at the first use of the transport.
    """
    if not isinstance(transport, GroupTransport):
        return None
    device = transport.known_device(like.device)
    chosen = transport.on_device(device)
    if not isinstance(chosen, SymmetricTransport) or not chosen.can_be_bounded:
        return None
    return LayerTransport(chosen, row_bytes, device, chosen.is_static and may_be_static)


def existing_transport(group: EPGroup, text: str) -> LocalTransport | GroupTransport:
    """Returns the transport with this `text`, for operations of a compiled graph, which cannot refer to an object.

    Raises RuntimeError if it has been garbage-collected.
    """
    if group.size == 1:
        return LocalTransport(batch_invariant=bool(text))
    transport = _found(group, text)
    if transport is None:
        raise RuntimeError(f"nobody holds the transport of {text}: keep what transport_for(group, config) gave")
    return transport


def _found(group: EPGroup, text: str) -> GroupTransport | None:
    transport = exchange_named(_name_of(group, text))
    # After torch.distributed has been initialised again, another process group may have the same name.
    if isinstance(transport, GroupTransport) and transport.group.process_group is group.process_group:
        return transport
    return None


@functools.cache
def _text_of(config: TransportConfig) -> str:
    """Returns the config as a string, which operations of a compiled graph take."""
    return json.dumps(dataclasses.asdict(config))


def _name_of(group: EPGroup, text: str) -> str:
    return f"{group.name} {text}"


def _choose(group: EPGroup, config: TransportConfig, device: torch.device) -> _Chosen:
    if config.kind == "all_to_all":
        return AllToAllTransport(group, batch_invariant=config.batch_invariant)
    hosts = group.hosts(config.ranks_per_host)
    if config.kind == "two_hop" and hosts.problem is not None:
        raise ValueError(f"transport.kind='two_hop' cannot be had: {hosts.problem}, or set transport.kind='all_to_all'")
    if config.kind == "two_hop":
        return _two_hop(group, hosts, config, device)
    if config.batch_invariant:
        problem = "with batch_invariant=True a token's rank adds its pairs"
    elif hosts.num_hosts > 1:
        problem = f"the ranks of the group are on several hosts: {', '.join(sorted(hosts.names))}"
    elif device.type == "cuda":
        problem = problem_with_peers(group, device, missing_extra("cuda", "triton"))
    else:
        problem = f"the rows are on a {device.type} device"
    if problem is None:
        _LOG.info("rows travel through symmetric memory (%d ranks)", group.size)
        allocate = functools.partial(symmetric_memory, group, device)
        static = config.buffers == "static"
        return SymmetricTransport(group, allocate, timeout=config.timeout, static=static, dispatch=config.dispatch)
    if config.kind == "symmetric" or config.buffers == "static" or config.dispatch != "auto":
        dispatch = "" if config.dispatch == "auto" else f" and dispatch={config.dispatch!r}"
        raise ValueError(
            f"transport.kind={config.kind!r} with {config.buffers} buffers{dispatch} cannot be had: {problem}"
        )
    if hosts.num_hosts > 1 and hosts.problem is None and hosts.ranks_per_host > 1:
        return _two_hop(group, hosts, config, device)
    _LOG.info("rows travel by all-to-all over %s: %s", group.backend, hosts.problem or problem)
    return AllToAllTransport(group, batch_invariant=config.batch_invariant)


def _two_hop(group: EPGroup, hosts: HostLayout, config: TransportConfig, device: torch.device) -> TwoHopTransport:
    D, allocate = hosts.ranks_per_host, None
    where = f"{hosts.num_hosts} hosts of {D} ranks"
    if D == 1:
        problem = "a host has one rank"
    elif device.type != "cuda":
        problem = f"the rows are on a {device.type} device"
    else:
        problem = problem_with_peers(group, device, missing_extra("cuda", "triton"), per_host=D)
    if problem is None:
        first = group.rank - group.rank % D
        allocate = functools.partial(symmetric_memory, group, device, ranks=range(first, first + D))
    within = "symmetric memory" if problem is None else f"{group.backend} ({problem})"
    _LOG.info("rows travel in two hops: over %s between hosts, %s within one: %s", group.backend, within, where)
    return TwoHopTransport(group, D, allocate, timeout=config.timeout, batch_invariant=config.batch_invariant)
