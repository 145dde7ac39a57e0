"""Memory of one rank that the others can write to: torch's symmetric memory, peer pointers over NVLink.

With groups.py the only file that talks to torch.distributed. Multicast is not used.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sonic_ep.groups import EPGroup

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # containers of several hosts may share a name


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """own: (bytes,) uint8 of this rank. addresses_S: (S,) int64 on its device, where this process finds each rank's.
    everyones: the memory there, by rank, for whoever copies."""

    own: Tensor
    addresses_S: Tensor
    peer_views: Sequence[Tensor]

    def at(self, offset: int) -> Tensor:
        """(S,) addresses of what stands `offset` bytes behind the start of each rank's memory."""
        return self.addresses_S + offset

    def view(self, offset: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This rank's own values there."""
        return _part(self.own, offset, size, dtype)

    def view_of(self, rank: int, offset: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Those of another."""
        return _part(self.peer_views[rank], offset, size, dtype)


def _part(memory: Tensor, offset: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.Size(size).numel() * dtype.itemsize
    return memory[offset : offset + count].view(dtype).view(size)


def symmetric_memory(group: EPGroup, device: torch.device, num_bytes: int) -> PeerMemory:
    """Zeros on every rank's CUDA device. A collective; every rank asks for as much.

    Raises RuntimeError, on every rank, where torch cannot map the ranks' memory.
    """
    from torch.distributed import _symmetric_memory as symmetric

    assert group.process_group is not None
    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    own.zero_()
    handle = symmetric.rendezvous(own, group.process_group)
    addresses_S = torch.tensor(handle.buffer_ptrs, dtype=torch.int64).to(device)
    torch.cuda.synchronize(device)
    dist.barrier(group.process_group, device_ids=[device.index] if group.backend == "nccl" else None)
    peer_views = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size)]
    return PeerMemory(own, addresses_S, peer_views)


class RankLocation(NamedTuple):
    """Where a rank is. gpu: its identity, None without one. unreachable: GPUs of the host that its own cannot reach.
    problem: why its memory cannot be written to, beside that."""

    host: str
    gpu: str | None
    unreachable: frozenset[str]
    problem: str | None

    @classmethod
    def here(cls, device: torch.device, problem: str | None) -> "RankLocation":
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        host = f"{socket.gethostname()} {boot}".strip()
        if device.type != "cuda":
            return cls(host, None, frozenset(), problem)
        gpus = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        own = torch.cuda.current_device() if device.index is None else device.index
        reaches = torch.cuda.can_device_access_peer
        far = frozenset(gpu for i, gpu in enumerate(gpus) if i != own and not reaches(own, i))
        return cls(host, gpus[own], far, problem)


def problem_between(locations: list[RankLocation]) -> str | None:
    """Why ranks in these places cannot write to each other's GPU memory, as far as places tell; or None."""
    for rank, location in enumerate(locations):
        if location.gpu is None:
            return f"the rows of rank {rank} are not on a CUDA device"
        if location.problem is not None:
            return f"rank {rank}: {location.problem}"
    if len(hosts := {location.host for location in locations}) > 1:
        return f"the ranks of the group are on several hosts: {', '.join(sorted(hosts))}"
    if len({location.gpu for location in locations}) < len(locations):
        return "two ranks of the group share a GPU"
    for rank, location in enumerate(locations):
        for other, there in enumerate(locations):
            if there.gpu in location.unreachable:
                return f"the GPU of rank {rank} has no peer access to that of rank {other}"
    return None


def problem_with_peers(group: EPGroup, device: torch.device, own_problem: str | None = None) -> str | None:
    """Why these ranks cannot write to each other's GPU memory, or None. A collective; the same on every rank.

    own_problem: why this rank cannot. Where nothing speaks against it a little memory is mapped, to see if it works:
    a container may forbid it.
    """
    problem = problem_between(group.all_gather_object(RankLocation.here(device, own_problem)))
    if problem is not None:
        return problem
    failure = None
    try:
        symmetric_memory(group, device, 256)
    except RuntimeError as error:
        failure = str(error).strip().splitlines()[0]
    failures = group.all_gather_object(failure)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None), None)
