"""Experts that FSDP shards over the ranks that hold the same ones: gradients of the whole batch, programs."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, fsdp
from tests.helpers.launch import RankPool, run_ranks

# Large enough that all gradients are: the mistakes looked for here are factors.
CONFIG = MoEConfig(d=16, n=8, E=8, K=2, shared_n=8, init_std=0.3, bias=True, rounding=RoundingConfig(mode="off"))
TOKENS, WORLD, EP = 12, 4, 2


class Model(nn.Module):
    def __init__(self, group: EPGroup, config: MoEConfig = CONFIG) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(config.d, config.d)
        self.moe = MoE(config, group, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.linear(x)).y.square().mean()


def batch(world: int = WORLD) -> Tensor:
    return torch.randn(world * TOKENS, 16, generator=torch.Generator().manual_seed(1))


def groups(ep_size: int, device: str = "cpu") -> tuple[EPGroup, DeviceMesh]:
    """This rank's EP group, and the mesh of the ranks that hold the same experts."""
    table = torch.arange(dist.get_world_size()).view(-1, ep_size)
    ep, _ = dist.new_subgroups_by_enumeration(table.tolist())
    same_experts, _ = dist.new_subgroups_by_enumeration(table.t().tolist())
    return EPGroup(ep), DeviceMesh.from_group(same_experts, device)


class Case(NamedTuple):
    """reduce_dtype: None for the weights' own. micro_batches: how the batch is cut; reduced once, or after each.
    divisor: of all modules, in place of the number of ranks."""

    ep_size: int
    E: int = 8
    reduce_dtype: torch.dtype | None = None
    micro_batches: int = 1
    reduced_once: bool = True
    dtype: torch.dtype = torch.float32
    divisor: float | None = None
    sliced: bool = False  # the meshes are slices of one of two dimensions

    @property
    def rounding(self) -> float:
        """How far gradients may be from exact ones, in the norm: 1e-6, or what rounding before and after a sum does."""
        return {None: 1e-6, torch.float16: 0.001, torch.bfloat16: 0.005}[self.reduce_dtype]


def meshes(case: Case, device: str) -> tuple[EPGroup, DeviceMesh]:
    if not case.sliced:
        return groups(case.ep_size, device)
    shape = dist.get_world_size() // case.ep_size, case.ep_size
    grid = init_device_mesh(device, shape, mesh_dim_names=("expert_data", "ep"))
    return EPGroup(grid["ep"].get_group()), grid["expert_data"]


def sharded(rank: int, cases: list[Case], device: str) -> list[dict[str, Tensor]]:
    """Whole gradients under sonic_ep.fsdp, in the second of two steps."""
    by_case: list[dict[str, Tensor]] = []
    world = dist.get_world_size()
    mesh, known = init_device_mesh(device, (world,)), {}
    for case in cases:
        group, expert_mesh = known.setdefault((case.ep_size, case.sliced), meshes(case, device))
        model: Any = Model(group, CONFIG.replace(E=case.E)).to(device, case.dtype)
        policy = MixedPrecisionPolicy(reduce_dtype=case.reduce_dtype)
        fsdp.fully_shard(model, mesh=mesh, expert_mesh=expert_mesh, mp_policy=policy)
        for module in model.modules():
            if case.divisor is not None and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(case.divisor)
                module.set_force_sum_reduction_for_comms(module is model or case.ep_size < world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=False)
        parts = batch(world).chunk(world)[rank].to(device, case.dtype).chunk(case.micro_batches)
        for _ in range(2):
            optimizer.zero_grad()
            for i, part in enumerate(parts):
                model.set_requires_gradient_sync(not case.reduced_once or i == len(parts) - 1)
                (model(part) / len(parts)).backward()
            optimizer.step()
        found: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor), name
            assert p.to_local().numel() < p.numel() or case.ep_size == world, name
            assert isinstance(p.grad, DTensor), name
            found[name] = p.grad.full_tensor().cpu() * (case.divisor or world) / world
        by_case.append(found)
    return by_case


@functools.cache
def gradients_alone(E: int, world: int) -> dict[str, Tensor]:
    """The gradients of one process in float64 that has the whole batch."""
    alone = Model(EPGroup.alone(), CONFIG.replace(E=E)).double()
    alone(batch(world).double()).backward()
    found = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert min(float(gradient.norm()) for gradient in found.values()) > 1e-3
    return found


def errors(found: dict[str, Tensor], rank: int, case: Case, world: int) -> dict[str, float]:
    """Norms of the differences from the gradients of one process, as shares of the norms of those."""
    shares = {}
    for name, whole in gradients_alone(case.E, world).items():
        wanted = whole.chunk(case.ep_size)[rank % case.ep_size] if ".experts." in name else whole
        shares[name] = float((found[name].double() - wanted).norm() / wanted.norm())
    return shares


def check(by_rank: list[list[dict[str, Tensor]]], cases: list[Case], scale: float = 1.0) -> None:
    """Raises AssertionError unless all gradients, multiplied by `scale`, are those of one process."""
    for rank, by_case in enumerate(by_rank):
        for case, found in zip(cases, by_case, strict=True):
            scaled = {name: gradient * scale for name, gradient in found.items()}
            off = {name: x for name, x in errors(scaled, rank, case, len(by_rank)).items() if not x < case.rounding}
            assert off == {}, (rank, case)


# ep_size below the number of ranks and equal to it. Of 6 experts over 2 ranks, FSDP shards 3 as 2 and 1.
CASES = [
    Case(ep_size, E, reduce_dtype, micro_batches, reduced_once, sliced=E == 6)
    for ep_size, E in ((2, 8), (2, 6), (4, 8))
    for reduce_dtype in (None, torch.bfloat16, torch.float16)
    for micro_batches, reduced_once in ((1, True), (2, True), (2, False))
]
CASES += [
    Case(2, divisor=1.0),
    Case(4, divisor=1.0),
    Case(4, sliced=True),
    Case(2, dtype=torch.float64),
    Case(4, dtype=torch.float64),
]


def test_sharded_experts_get_the_gradients_of_the_whole_batch() -> None:
    # Fresh ranks, because DTensor remembers the groups of equal meshes.
    by_rank = run_ranks(sharded, WORLD, CASES, "cpu")
    check(by_rank, CASES)
    for case in range(len(CASES)):
        for scale in (0.99, 1.01):
            with pytest.raises(AssertionError, match="experts"):
                check([[by_case[case]] for by_case in by_rank], [CASES[case]], scale)


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


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("world", [2, 4])
def test_gradients_are_those_of_the_whole_batch_over_nccl(backend: str, world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices, there are {torch.cuda.device_count()}")
    cases = [case for case in CASES if case.ep_size <= world and case.dtype is torch.float32]
    check(run_ranks(sharded, world, cases, "cuda", backend=backend), cases)


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
        numbers.append(model.moe.num_programs)
        results.append(found)
    return numbers, [torch.equal(one, two) for one, two in zip(*results, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_steps_in_mixed_precision_run_as_programs(gpus: Callable[[int], RankPool], world: int) -> None:
    for (programs, without), same in gpus(world).run(in_mixed_precision, world):
        assert programs > 0
        assert without == 0
        assert all(same)
