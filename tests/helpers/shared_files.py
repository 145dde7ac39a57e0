"""Memory that the processes of a test can all write to, as GPUs of one host can: files, mapped by every rank."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from sonic_ep.groups import EPGroup
from sonic_ep.symmetric_memory import PeerMemory
from tests.helpers.triton_device import kernel_module


def shared_files(group: EPGroup, folder: str) -> Callable[[int], PeerMemory]:
    """An `allocate` for SymmetricTransport. Kernels are interpreted here, by few programs, with a clock of the host."""
    # Only here: a module of tests is loaded, and says that it skips, where there is no Triton.
    peers, peer_rows, peer_pairs = (
        kernel_module(name)
        for name in ("dispatch.symmetric.signals", "dispatch.symmetric.rows", "dispatch.symmetric.pairs")
    )
    peers.now = _now
    peer_rows.PUSH_PROGRAMS, peer_rows.SUM_PROGRAMS, peer_pairs.PAIR_PROGRAMS = 2, 3, 6
    mapped: list[torch.Tensor] = []  # a mapping lasts as long as its tensor

    def allocate(num_bytes: int) -> PeerMemory:
        number = len(mapped)
        paths = [Path(folder) / f"{number}-{rank}" for rank in range(group.size)]
        paths[group.rank].write_bytes(bytes(num_bytes))
        group.all_gather_object(None)
        views = [torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in paths]
        mapped.extend(views)
        return PeerMemory(views[group.rank], torch.tensor([view.data_ptr() for view in views]), views)

    return allocate


def _now() -> int:
    """Nanoseconds, asked for only by who waits: it lets others have the core meanwhile."""
    time.sleep(0.0002)
    return time.monotonic_ns()
