"""Memory that the processes of a test can all write to, as GPUs of one host can: files, mapped by every rank."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from sonic_ep.groups import EPGroup
from sonic_ep.kernels.cuda import peer_pairs, peer_rows, peers
from sonic_ep.peer_memory import PeerMemory


def shared_files(group: EPGroup, folder: str) -> Callable[[int], PeerMemory]:
    """An `allocate` for SymmetricTransport. Kernels are interpreted here, by few programs, with a clock of the host."""
    peers.now = time.monotonic_ns
    peer_rows.PUSH_PROGRAMS, peer_rows.SUM_PROGRAMS, peer_pairs.PAIR_PROGRAMS = 2, 3, 2
    mapped: list[torch.Tensor] = []  # a mapping lasts as long as its tensor

    def allocate(num_bytes: int) -> PeerMemory:
        number = len(mapped)
        paths = [Path(folder) / f"{number}-{rank}" for rank in range(group.size)]
        paths[group.rank].write_bytes(bytes(num_bytes))
        group.all_gather_object(None)
        views = [torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8) for path in paths]
        mapped.extend(views)
        return PeerMemory(views[group.rank], torch.tensor([view.data_ptr() for view in views]))

    return allocate
