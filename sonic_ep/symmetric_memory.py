"""Memory of each rank that its peers can write to: torch's symmetric memory, by peer pointers over NVLink.

NVLink multicast is not used.
"""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.groups import EPGroup
from sonic_ep.groups.hosts import host_name

_SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_Make = Callable[[Tensor, int, tuple[int, ...], torch.dtype], Tensor]
_MAKE_PART: ContextVar[_Make | None] = ContextVar("sonic_ep_make_part", default=None)


@contextmanager
def parts_made_by(make: _Make) -> Generator[None]:
    """A context in which views are what `make` returns for memory, a byte of it, a shape and a dtype."""
    before = _MAKE_PART.set(make)
    try:
        yield
    finally:
        _MAKE_PART.reset(before)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """One symmetric allocation: a piece of memory on every rank, of the same size.

    own: (bytes,) uint8, this rank's memory. addresses_S: (S,) int64 on its device, the address of each rank's memory in
    this process, for kernels. peer_views: each rank's memory as a tensor, for copy engines.
    """

    own: Tensor
    addresses_S: Tensor
    peer_views: Sequence[Tensor]

    def view(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the start of this rank's memory as a tensor of this size and dtype."""
        return _part(self.own, 0, size, dtype)

    def view_of(self, rank: int, offset: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the memory of a rank from byte `offset` as a tensor of this size and dtype."""
        return _part(self.peer_views[rank], offset, size, dtype)


def _part(memory: Tensor, offset: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    make = _MAKE_PART.get()
    if make is not None:
        return make(memory, offset, size, dtype)
    count = torch.Size(size).numel() * dtype.itemsize
    return memory[offset : offset + count].view(dtype).view(size)


def symmetric_memory(group: EPGroup, device: torch.device, num_bytes: int, ranks: range | None = None) -> PeerMemory:
    """Allocates `num_bytes` zero bytes on every rank's CUDA device. A collective; num_bytes must be equal on all ranks.

    ranks: those of the group that can write to each other, this one among them; by default all. The others have as many
    ranks, which are a block of their own. The result numbers the ranks of the block.

    Raises RuntimeError, on every rank, if torch cannot allocate or map the memory of one.
    """
    memory, failure = None, None
    try:
        memory = _mapped(group, device, num_bytes, range(group.size) if ranks is None else ranks)
    except RuntimeError as error:
        failure = error
    text = None if failure is None else str(failure).strip().splitlines()[0]
    # No rank writes to a peer before all have zeroed their memory.
    failures = group.all_gather_object(text, stage="the allocation of symmetric memory")
    problem = next((f"rank {rank}: {each}" for rank, each in enumerate(failures) if each is not None), None)
    if memory is None or problem is not None:
        raise RuntimeError(problem) from failure
    return memory


def _mapped(group: EPGroup, device: torch.device, num_bytes: int, ranks: range) -> PeerMemory:
    """Returns the memory of these ranks, which others may not have zeroed yet."""
    from torch.distributed import _symmetric_memory as symmetric

    assert group.process_group is not None
    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    own.zero_()
    members = group.process_group if len(ranks) == group.size else group.name_of_part(ranks)
    handle = symmetric.rendezvous(own, members)  # pyright: ignore[reportArgumentType]
    addresses_S = torch.tensor(handle.buffer_ptrs, dtype=torch.int64).to(device)
    torch.cuda.synchronize(device)
    peer_views = [
        own if rank == group.rank else handle.get_buffer(number, (num_bytes,), torch.uint8)
        for number, rank in enumerate(ranks)
    ]
    return PeerMemory(own, addresses_S, peer_views)


class RankLocation(NamedTuple):
    """The location of a rank.

    host: see `host_name`. gpu: its UUID, None without one. unreachable: the visible GPUs without peer access from that
    GPU. problem: another reason why peers cannot write to its memory, or None.
    """

    host: str
    gpu: str | None
    unreachable: frozenset[str]
    problem: str | None

    @classmethod
    def here(cls, device: torch.device, problem: str | None) -> "RankLocation":
        host = host_name()
        if device.type != "cuda":
            return cls(host, None, frozenset(), problem)
        gpus = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        own = torch.cuda.current_device() if device.index is None else device.index
        reaches = torch.cuda.can_device_access_peer
        far = frozenset(gpu for i, gpu in enumerate(gpus) if i != own and not reaches(own, i))
        return cls(host, gpus[own], far, problem)


def gpus_are_shared() -> bool:
    """Returns True if the environment lets several ranks have one GPU. torch reads the same variable."""
    return os.environ.get(_SHARED) == "1"


def problem_between(locations: list[RankLocation]) -> str | None:
    """Returns why ranks at these locations cannot write to each other's GPU memory, or None if no location shows it."""
    for rank, location in enumerate(locations):
        if location.gpu is None:
            return f"the rows of rank {rank} are not on a CUDA device"
        if location.problem is not None:
            return f"rank {rank}: {location.problem}"
    if len(hosts := {location.host for location in locations}) > 1:
        return f"the ranks of the group are on several hosts: {', '.join(sorted(hosts))}"
    if len({location.gpu for location in locations}) < len(locations) and not gpus_are_shared():
        return f"two ranks of the group share a GPU; {_SHARED}=1 allows that, for tests: it is slow"
    for rank, location in enumerate(locations):
        for other, there in enumerate(locations):
            if there.gpu in location.unreachable:
                return f"the GPU of rank {rank} has no peer access to the GPU of rank {other}"
    return None


def problem_with_peers(
    group: EPGroup, device: torch.device, own_problem: str | None = None, per_host: int | None = None
) -> str | None:
    """Returns why these ranks cannot write to each other's GPU memory, or None. A collective; equal on every rank.

    own_problem: why this rank cannot, or None. If no rank has a problem, we try to map a little memory, because a
    container may forbid that. per_host: so many consecutive ranks have to reach each other; by default all.
    """
    where = group.all_gather_object(RankLocation.here(device, own_problem), stage="the choice of a transport")
    per_host = per_host or group.size
    problems = (problem_between(where[first : first + per_host]) for first in range(0, group.size, per_host))
    problem = next((each for each in problems if each is not None), None)
    if problem is not None:
        return problem
    first = group.rank - group.rank % per_host
    try:
        symmetric_memory(group, device, 256, range(first, first + per_host))
    except RuntimeError as error:
        return str(error)
    return None
