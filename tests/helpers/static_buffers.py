"""Static buffers without a GPU: processes share files, and the kernels that write into them are interpreted."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import pad

from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.groups import EPGroup
from sonic_ep.kernels import backend
from sonic_ep.routing import Routing
from sonic_ep.transports import GroupTransport
from tests.helpers.shared_files import shared_files
from tests.helpers.triton_device import kernel_module

_IN_TRITON = {
    "combine.gather_sum",
    "combine.scalars",
    "dispatch.recv_index",
    "dispatch.send_index",
    "dispatch.split_sizes",
    "route.status",
}


def static_buffers(transport: GroupTransport, folder: str) -> AbstractContextManager[None]:
    """Let `transport` move rows of CPU tensors through static buffers."""
    return buffers_in_files(transport, folder, static=True)


@contextmanager
def buffers_in_files(transport: GroupTransport, folder: str, *, static: bool) -> Iterator[None]:
    """Likewise, or through exact ones, whose sizes come late."""
    group, before = transport.group, dict(transport._chosen)
    transport._chosen["cpu"] = SymmetricTransport(group, shared_files(group, folder), timeout=60, static=static)
    try:
        with lists_with_spare():
            yield
    finally:  # layers of a later test with these ranks and this config get the same transport, if one is left
        transport._chosen = before


def compares_nothing_in_backward() -> AbstractContextManager[object]:
    """As on GPUs: between CPUs a backward begins with a collective over gloo."""
    return patch.object(EPGroup, "begin_backward", lambda group, forward, like: group.order.add(forward))


@contextmanager
def static_buffers_in(folder: str, timeout: float = 60) -> Iterator[None]:
    """Let every transport that is chosen meanwhile move rows of CPU tensors through static buffers."""
    changed: list[GroupTransport] = []

    def on_device(transport: GroupTransport, device: torch.device) -> SymmetricTransport:
        if device.type not in transport._chosen:
            group, is_static = transport.group, transport.config.buffers == "static"
            allocate = shared_files(group, folder)
            changed.append(transport)
            transport._chosen[device.type] = SymmetricTransport(group, allocate, timeout=timeout, static=is_static)
        return transport._chosen[device.type]  # type: ignore[return-value]

    try:
        with patch.object(GroupTransport, "on_device", on_device), lists_with_spare():
            yield
    finally:
        for transport in changed:
            transport._chosen.clear()


def with_spare(routing: Routing, spare: int, **bounds: int) -> Routing:
    """The same with entries behind its pairs, which must count for nothing. bounds: what it then tells of its rows."""
    return replace(
        routing,
        weights_N=pad(routing.weights_N, (0, spare), value=9.0),
        token_ids_N=pad(routing.token_ids_N, (0, spare), value=-1),
        **bounds,  # type: ignore[arg-type]
    )


@contextmanager
def lists_with_spare() -> Iterator[None]:
    """Index lists, and sums by them, by the kernels: those of plain torch have no capacity to spare."""
    kernel_module("combine.gather_sum.triton")
    stock = backend._implementation

    def implementation(folder: str, name: str, in_triton: bool) -> Any:
        return stock(folder, name, in_triton or folder in _IN_TRITON)

    with patch.object(backend, "_implementation", implementation):
        yield
