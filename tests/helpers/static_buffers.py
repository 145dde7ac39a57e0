"""Static buffers without a GPU: processes share files, and the kernels that write into them are interpreted."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.kernels import operations
from sonic_ep.transports import GroupTransport
from tests.helpers.shared_files import shared_files


@contextmanager
def static_buffers(transport: GroupTransport, folder: str) -> Iterator[None]:
    """Let `transport` move rows of CPU tensors through static buffers."""
    group = transport.group
    transport._chosen["cpu"] = SymmetricTransport(group, shared_files(group, folder), patience=60, static=True)
    with lists_with_room():
        yield


@contextmanager
def lists_with_room() -> Iterator[None]:
    """Index lists by the kernels: those of plain torch have no room to spare."""
    stock = operations._lists
    operations._lists = lambda module, on_gpu: import_module(f"sonic_ep.kernels.cuda.{module}")  # type: ignore[assignment]
    try:
        yield
    finally:
        operations._lists = stock
