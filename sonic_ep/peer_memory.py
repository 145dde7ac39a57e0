"""Memory of one rank that the others can write to: torch's symmetric memory, peer pointers over NVLink.

With groups.py the only file that talks to torch.distributed. Multicast is not used.
"""

import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sonic_ep.groups import EPGroup


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """own: (bytes,) uint8 of this rank. addresses_S: (S,) int64 on its device, where this process finds each rank's."""

    own: Tensor
    addresses_S: Tensor

    def at(self, offset: int) -> Tensor:
        """(S,) addresses of what stands `offset` bytes behind the start of each rank's memory."""
        return self.addresses_S + offset

    def view(self, offset: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """This rank's own values there."""
        count = torch.Size(size).numel() * dtype.itemsize
        return self.own[offset : offset + count].view(dtype).view(size)


def symmetric_memory(group: EPGroup, num_bytes: int) -> PeerMemory:
    """Zeros on the current CUDA device of every rank of the group. A collective; every rank asks for as much."""
    from torch.distributed import _symmetric_memory as symmetric

    assert group.process_group is not None
    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
    own.zero_()
    handle = symmetric.rendezvous(own, group.process_group)
    addresses_S = torch.tensor(handle.buffer_ptrs, dtype=torch.int64).to(own.device)
    torch.cuda.synchronize()
    dist.barrier(group.process_group, device_ids=[own.device.index] if group.backend == "nccl" else None)
    return PeerMemory(own, addresses_S)


def problem_with_peers(group: EPGroup, own_problem: str | None = None) -> str | None:
    """Why these ranks cannot write to each other's GPU memory, or None. A collective; the same on every rank.

    own_problem: why this rank cannot.
    """
    index = torch.cuda.current_device() if torch.cuda.is_available() else None
    if index is None:
        own_problem = "has no CUDA device"
    uuid = None if index is None else str(torch.cuda.get_device_properties(index).uuid)
    reports = group.all_gather_object((socket.gethostname(), uuid, own_problem))
    for rank, (*_, text) in enumerate(reports):
        if text is not None:
            return f"rank {rank}: {text}"
    places = [report[:2] for report in reports]
    if len({host for host, _ in places}) > 1:
        return f"the ranks of the group are on several hosts: {', '.join(sorted({host for host, _ in places}))}"
    if len(set(places)) < group.size:
        return "two ranks of the group share a GPU"
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    hidden = [
        rank
        for rank, (_, device) in enumerate(places)
        if device != uuid and device in visible and not torch.cuda.can_device_access_peer(index, visible[device])
    ]
    problems = group.all_gather_object(f"has no peer access to rank {hidden[0]}" if hidden else None)
    return next((f"rank {rank} {text}" for rank, text in enumerate(problems) if text), None)
