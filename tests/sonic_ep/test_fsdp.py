"""Experts that FSDP shards over the ranks that hold the same ones: gradients of the whole batch, recorded launches."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, fsdp
from tests.helpers.launch import RankPool, run_ranks

CONFIG = MoEConfig(d=16, n=8, E=8, K=2, shared_n=8, rounding=RoundingConfig(mode="off"))
TOKENS, WORLD, EP = 12, 4, 2


class Model(nn.Module):
    def __init__(self, group: EPGroup, config: MoEConfig = CONFIG) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(config.d, config.d)
        self.moe = MoE(config, group, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.linear(x)).y.square().mean()


def batch() -> Tensor:
    return torch.randn(WORLD * TOKENS, 16, generator=torch.Generator().manual_seed(1))


def groups(ep_size: int) -> tuple[EPGroup, DeviceMesh]:
    """This rank's EP group, and the mesh of the ranks that hold the same experts."""
    table = torch.arange(WORLD).view(-1, ep_size)
    ep, _ = dist.new_subgroups_by_enumeration(table.tolist())
    same_experts, _ = dist.new_subgroups_by_enumeration(table.t().tolist())
    return EPGroup(ep), DeviceMesh.from_group(same_experts, "cpu")


def sharded(rank: int, cases: list[tuple[int, int]]) -> list[dict[str, Tensor]]:
    """Whole gradients under sonic_ep.fsdp, in the second of two steps."""
    by_case = []
    mesh, of_ep_size = init_device_mesh("cpu", (WORLD,)), {}
    for ep_size, E in cases:
        group, expert_mesh = of_ep_size.setdefault(ep_size, groups(ep_size))
        model = Model(group, CONFIG.replace(E=E))
        fsdp.fully_shard(model, mesh=mesh, expert_mesh=expert_mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            optimizer.zero_grad()
            model(batch().chunk(WORLD)[rank]).backward()
            optimizer.step()
        found: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor), name
            assert p.to_local().numel() < p.numel() or ep_size == WORLD, name
            assert isinstance(p.grad, DTensor), name
            found[name] = p.grad.full_tensor()
        by_case.append(found)
    return by_case


def test_sharded_experts_get_the_gradients_of_the_whole_batch() -> None:
    cases = [(2, 8), (2, 6), (4, 8)]  # ep_size, E; of 6 experts the ranks shard 2 and 1 once more
    # Fresh ranks, because DTensor remembers the groups of equal meshes.
    for rank, by_case in enumerate(run_ranks(sharded, WORLD, cases)):
        for (ep_size, E), found in zip(cases, by_case, strict=True):
            alone = Model(EPGroup.alone(), CONFIG.replace(E=E))
            alone(batch()).backward()
            for name, p in alone.named_parameters():
                assert p.grad is not None
                wanted = p.grad.chunk(ep_size)[rank % ep_size] if ".experts." in name else p.grad
                torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-7)


def mistaken_meshes(rank: int) -> list[str]:
    group, expert_mesh = groups(EP)
    assert group.process_group is not None
    world, messages = init_device_mesh("cpu", (WORLD,)), []
    grid = DeviceMesh.from_group(
        [expert_mesh.get_group(), group.process_group], "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=("data", "ep")
    )
    for module, given in (
        (Model(group), DeviceMesh.from_group(group.process_group, "cpu")),
        (Model(group), grid),
        (Model(group).moe, expert_mesh),
        (Model(EPGroup.alone()), expert_mesh),
    ):
        with pytest.raises(ValueError, match="rank 3") as raised:
            fsdp.fully_shard(module, mesh=world, expert_mesh=given)
        messages.append(str(raised.value))
    return messages


def test_meshes_that_mix_experts_are_refused(ranks: Callable[[int], RankPool]) -> None:
    for mixed, several, layer, alone in ranks(WORLD).run(mistaken_meshes):
        assert "hold different experts: from 0 on rank 2, from 4 on rank 3" in mixed
        assert "expert_mesh has 2 dimensions, wanted one" in several
        assert "MoE contains no MoE layer with ep_size > 1" in layer
        assert "Model contains no MoE layer with ep_size > 1" in alone


# On GPUs

ON_GPUS = MoEConfig(d=256, n=128, E=16, K=4, rounding=RoundingConfig(mode="nearest"))


def in_mixed_precision(rank: int, world: int) -> tuple[list[int], list[bool]]:
    """How many recordings a layer has after steps under FSDP, with and without; and which results are the same."""
    expert_mesh = DeviceMesh.from_group(dist.new_subgroups(1)[0], "cuda")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    numbers, results = [], []
    for record in (True, False):
        group = EPGroup() if world > 1 else EPGroup.alone()
        model = Model(group, replace(ON_GPUS, record_launches=record)).cuda()
        mesh = init_device_mesh("cuda", (world,))
        if world > 1:
            fsdp.fully_shard(model, mesh=mesh, expert_mesh=expert_mesh, mp_policy=policy)
        else:
            torch_fully_shard(model, mesh=mesh, mp_policy=policy)
        found: list[Tensor] = []
        for step in range(6):
            generator = torch.Generator("cuda").manual_seed(10 * step + rank)
            loss = model(torch.randn(2, 350, 256, device="cuda", generator=generator))
            loss.backward()
            found.append(loss.detach())
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            found.append(parameter.grad.to_local())
        numbers.append(model.moe._recorded.num_recorded)
        results.append(found)
    return numbers, [torch.equal(one, two) for one, two in zip(*results, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_launches_are_recorded_in_mixed_precision(gpus: Callable[[int], RankPool], world: int) -> None:
    for (recorded, without), same in gpus(world).run(in_mixed_precision, world):
        assert recorded > 0
        assert without == 0
        assert all(same)
