"""docs/data_parallel.md: under torch's wrappers the gradients are those of one process with the whole batch."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig
from tests.helpers.launch import RankPool

CONFIG = MoEConfig(d=16, n=8, E=8, K=2, shared_n=8, rounding=RoundingConfig(mode="off"))
TOKENS, WORLD, EP = 12, 4, 2


class Model(nn.Module):
    def __init__(self, group: EPGroup, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.moe = MoE(CONFIG, group, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.linear(x)).y.square().mean()


def batch() -> Tensor:
    return torch.randn(WORLD * TOKENS, 16, generator=torch.Generator().manual_seed(1))


def gradients(rank: int, wrapper: str) -> dict[str, Tensor]:
    """Whole dense gradients, and those of this rank's experts."""
    ep, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    same_experts, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    model = Model(EPGroup(ep), seed=rank // EP)  # the second group's experts are others until they are copied
    experts = {name: p for name, p in model.named_parameters() if not getattr(p, "allreduce", True)}
    for p in experts.values():
        dist.broadcast(p.data, group_src=0, group=same_experts)
    for p in model.parameters():
        if getattr(p, "allreduce", True):
            dist.broadcast(p.data, src=0)  # as DistributedDataParallel does, FSDP does not
    wrapped: nn.Module = model
    if wrapper == "DDP":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
        wrapped = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), ignored_params=set(experts.values()))
    wrapped(batch().chunk(WORLD)[rank]).backward()
    for p in experts.values():
        assert p.grad is not None
        dist.all_reduce(p.grad, group=same_experts)
        p.grad /= dist.get_world_size()
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


def experts_sharded_too(rank: int, around: str) -> str:
    model = Model(EPGroup())
    inner = {"all": model, "layer": model.moe, "experts": model.moe.experts}[around]
    fully_shard(inner, mesh=init_device_mesh("cpu", (2,)))
    try:
        model(batch()[:TOKENS])
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("around", ["all", "layer", "experts"])
def test_experts_that_fsdp_shards_are_found(ranks: Callable[[int], RankPool], around: str) -> None:
    for message in ranks(2).run(experts_sharded_too, around):
        assert "experts.w1 is managed as if it were the same on all ranks" in message


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_gradients_are_those_of_the_whole_batch(ranks: Callable[[int], RankPool], wrapper: str) -> None:
    alone = Model(EPGroup.alone())
    alone(batch()).backward()
    for rank, found in enumerate(ranks(WORLD).run(gradients, wrapper)):
        for name, p in alone.named_parameters():
            assert p.grad is not None
            wanted = p.grad.chunk(EP)[rank % EP] if ".experts." in name else p.grad
            torch.testing.assert_close(
                found[name], wanted, rtol=1e-4, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )
