"""Which rank holds what, and what that means for gradients.

Every rank holds all dense weights and E / ep_size experts per layer, and trains on its own share of the batch. Ranks
that together hold all experts once form an expert-parallel (EP) group; ranks that hold the same experts form an
expert-data group. With 4 processes and --ep-size 2:

                              EP group 0     EP group 1
    experts 0 .. E/2 - 1      rank 0         rank 2         <- one expert-data group
    experts E/2 .. E - 1      rank 1         rank 3         <- the other

The loss is the mean over the global batch, that is the mean of the ranks' own means. After backward

    dense weights    hold the gradient of this rank's loss:        average over all ranks
    expert weights   hold the sum of the EP group's losses, whose
                     tokens all came to where the expert lives:    sum over the expert-data group, divide by all ranks

Expert weights are told apart by `allreduce = False`, the mark that Megatron-LM and DeepSpeed know too.
"""

import argparse
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonic_ep import EPGroup, TransportConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What torchrun tells a process about itself; one process without torchrun is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def read_launch() -> Launch:
    """Read torchrun's variables: the only place where the example looks at the environment."""
    return Launch(
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def check_torchrun(program: str) -> None:
    """Raise ValueError where no launcher has said who this process is, for what cannot do without."""
    if "RANK" not in os.environ:
        raise ValueError(f"start it with python -m torch.distributed.run --standalone --nproc-per-node 2 {program}")


def positive(text: str) -> int:
    """Type of a flag that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def choose_device(wanted: str, launch: Launch) -> torch.device:
    """One GPU per process for "cuda", and for "auto" where the host has that many; else the CPU."""
    gpus = torch.cuda.device_count()
    if wanted == "cuda" and gpus < launch.local_world_size:
        raise ValueError(
            f"--device cuda needs one GPU per process: {launch.local_world_size} processes, {gpus} GPUs on this host; "
            f"start {max(1, gpus)} processes or use --device cpu"
        )
    if wanted == "cpu" or gpus < launch.local_world_size:
        return torch.device("cpu")
    return torch.device("cuda", launch.local_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """This process's place, and the collectives that training needs besides those of the MoE layer."""

    device: torch.device
    world: EPGroup
    ep: EPGroup
    expert_data: EPGroup

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.world.rank == 0

    def set_limits(self, transport: TransportConfig) -> None:
        """Wait for a lost rank as long as the MoE layers do, and name its host. A collective."""
        for group in (self.world, self.ep, self.expert_data):
            group.timeout = transport.timeout
        per_host = transport.ranks_per_host
        if self.world.size > 1:
            self.world.hosts(None if per_host is None or self.world.size % per_host else per_host)

    def own_rows(self, batch: Tensor) -> Tensor:
        """This rank's rows of the global batch, on its device."""
        return batch.chunk(self.world.size)[self.world.rank].to(self.device)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over all ranks, equal bits on each."""
        return self.world.all_reduce(values.clone()) / self.world.size

    def any(self, condition: bool) -> bool:
        """Whether it holds on any rank. A collective."""
        return bool(self.world.all_reduce(torch.tensor(int(condition))))

    def from_main(self, value: Any) -> Any:
        """Rank 0's picklable value, on every rank."""
        return self.world.all_gather_object(value)[0]

    def check_equal(self, name: str, value: Any) -> None:
        """Raise ValueError on every rank unless all ranks have the same value."""
        values = self.world.all_gather_object(value)
        if len(set(values)) > 1:
            raise ValueError(f"{name} differs between ranks: {dict(enumerate(values))}; give every host the same")

    def wait(self) -> None:
        """Return when every rank is here."""
        self.world.all_gather_object(None)

    def close(self) -> None:
        """Leave the other ranks; the mesh is of no use afterwards."""
        if self.world.size > 1:
            dist.destroy_process_group()


def open_mesh(launch: Launch, device: torch.device, ep_size: int) -> Mesh:
    """Join the other ranks: over gloo, and over NCCL for tensors on GPUs. Threads stay as torchrun sets them."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size > 1 and device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    elif launch.world_size > 1:
        dist.init_process_group("gloo")
    return form_groups(device, ep_size)


def form_groups(device: torch.device, ep_size: int) -> Mesh:
    """The groups of the table above. One of a single rank takes no collective, so one process alone needs none."""
    alone = EPGroup.alone()
    if not dist.is_initialized():
        return Mesh(device=device, world=alone, ep=alone, expert_data=alone)
    world = EPGroup()
    ranks = torch.arange(world.size).view(-1, ep_size)
    ep, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
    expert_data, _ = dist.new_subgroups_by_enumeration(ranks.t().tolist())
    return Mesh(
        device=device,
        world=world,
        ep=EPGroup(ep) if ep_size > 1 else alone,
        expert_data=EPGroup(expert_data) if ep_size < world.size else alone,
    )


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether this weight belongs to one expert only, and so to one rank of the EP group."""
    return not getattr(parameter, "allreduce", True)


def split_gradients(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(dense gradients, expert gradients), zeros where backward left none: every rank then has the same list."""
    dense: list[Tensor] = []
    experts: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        (experts if is_expert(parameter) else dense).append(parameter.grad)
    return dense, experts


@torch.no_grad()
def sync_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Turn each rank's gradients into those of the mean loss over the global batch, by the table above."""
    if mesh.world.size == 1:
        return
    for gradients, group in zip(split_gradients(model), (mesh.world, mesh.expert_data), strict=True):
        for bucket in by_dtype(gradients):
            # One collective a bucket: at this size a collective costs more than the copies.
            flat = group.all_reduce(torch.cat([gradient.flatten() for gradient in bucket])) / mesh.world.size
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


def by_dtype(tensors: list[Tensor]) -> list[list[Tensor]]:
    """The same tensors in lists of one dtype each: routers stay in fp32 whatever the weights' dtype."""
    buckets: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault(tensor.dtype, []).append(tensor)
    return list(buckets.values())
