"""Muon for stacks of matrices: torch.optim.Muon expert by expert, float64, and ranks that share the experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, fsdp
from sonic_ep.optim import Muon
from tests.helpers.launch import RankPool

CONFIG = MoEConfig(d=16, n=8, E=8, K=2, init_std=0.3, bias=True, rounding=RoundingConfig(mode="off"))
WORLD, EP, TOKENS, STEPS = 4, 2, 12, 3
Ranks = Callable[[int], RankPool]


def gradients(shape: tuple[int, ...]) -> list[Tensor]:
    """One for each step; the experts' differ in scale, as those of experts with few and many tokens do."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(-3, 0, shape[0]).view(-1, 1, 1)
    return [scales * torch.randn(shape, generator=generator) for _ in range(STEPS)]


def trained(
    make: type[torch.optim.Muon], weights: list[nn.Parameter], by_step: list[list[Tensor]], **options: Any
) -> None:
    optimizer = make(weights, **options)
    for step in by_step:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient
        optimizer.step()


@pytest.mark.parametrize("shape", [(5, 12, 8), (3, 8, 20)])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "momentum": 0.8}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}]
)
def test_each_expert_gets_what_torch_gives_it_alone(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    start, by_step = torch.randn(shape), gradients(shape)
    stack, alone = nn.Parameter(start.clone()), [nn.Parameter(each.clone()) for each in start]
    trained(Muon, [stack], [[each] for each in by_step], lr=0.1, **options)
    trained(torch.optim.Muon, alone, [[*each] for each in by_step], lr=0.1, **options)
    assert torch.equal(stack, torch.stack([*alone]))
    assert not torch.equal(stack, start)


def test_each_expert_against_float64() -> None:
    """The iteration is an odd polynomial, so it acts on the singular values alone."""
    shape, lr, momentum, decay = (5, 12, 8), 0.1, 0.95, 0.1
    start, by_step = torch.randn(shape), gradients(shape)
    stack = nn.Parameter(start.clone())
    trained(Muon, [stack], [[each] for each in by_step], lr=lr, momentum=momentum, weight_decay=decay)
    for expert, weight in enumerate(start.double()):
        average = torch.zeros_like(weight)
        for gradient in (each[expert].double() for each in by_step):
            average = momentum * average + (1 - momentum) * gradient
            u, s, vh = torch.linalg.svd(momentum * average + (1 - momentum) * gradient, full_matrices=False)
            s = s / s.norm()
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            weight = (1 - lr * decay) * weight - lr * (12 / 8) ** 0.5 * u * s @ vh
        off = float((stack.detach()[expert] - weight).norm() / (weight - start[expert]).norm())
        assert off < 0.02  # torch iterates in bf16


class Model(nn.Module):
    def __init__(self, group: EPGroup) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.moe = MoE(CONFIG, group, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        return 100 * self.moe(self.norm(self.linear(x))).y.square().mean()


def weights_after(model: Model, batches: Tensor) -> dict[str, Tensor]:
    """This rank's experts and all dense weights, after a step on each batch: Muon for matrices, AdamW for the rest."""
    matrices = [model.linear.weight, model.moe.experts.w1, model.moe.experts.w2]
    rest = [each for each in model.parameters() if all(each is not matrix for matrix in matrices)]
    optimizers = Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3, foreach=False)
    for batch in batches:
        model(batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach()
        for name, each in model.named_parameters()
    }


def batches() -> Tensor:
    return torch.randn(STEPS, WORLD * TOKENS, 16, generator=torch.Generator().manual_seed(1))


def over_ranks(rank: int) -> dict[str, Tensor]:
    grid = init_device_mesh("cpu", (WORLD // EP, EP), mesh_dim_names=("expert_data", "ep"))
    model = Model(EPGroup(grid["ep"].get_group()))
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), expert_mesh=grid["expert_data"])
    assert tuple(model.moe.experts.w1.to_local().shape) == (CONFIG.E // WORLD, 2 * CONFIG.n, CONFIG.d)  # type: ignore[attr-defined]
    return weights_after(model, batches().chunk(WORLD, dim=1)[rank])


def test_ranks_give_the_weights_of_one_process(ranks: Ranks) -> None:
    """EP 2, and FSDP2 over the ranks that hold the same experts, beside AdamW."""
    start = dict(Model(EPGroup.alone()).named_parameters())
    wanted = weights_after(Model(EPGroup.alone()), batches())
    for rank, found in enumerate(ranks(WORLD).run(over_ranks)):
        for name, whole in wanted.items():
            own, before = (
                each.chunk(EP)[rank % EP] if ".experts." in name else each for each in (whole, start[name].detach())
            )
            # torch iterates in bf16, and gradients are sums in another order.
            assert float((found[name] - own).norm() / (own - before).norm()) < 0.04, name


@pytest.mark.parametrize("shape", [(8,), (8, 4, 3, 3)])
def test_other_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="Muon takes weights .* and stacks .*: give it to AdamW"):
        Muon([nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(shape))])


def test_biases_of_experts_are_refused_and_what_was_there_stays() -> None:
    experts = MoE(CONFIG, EPGroup.alone(), seed=0).experts
    optimizer = Muon([{"params": [experts.w1], "lr": 0.5}], lr=0.1)
    with pytest.raises(ValueError, match=r"shape \(8, 16\) has a bias of each expert"):
        optimizer.add_param_group({"params": [experts.b1]})
    assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [(0.5, 1)]


def test_options_are_those_of_torch() -> None:
    with pytest.raises(ValueError, match="momentum should be >= 0"):
        Muon([nn.Parameter(torch.zeros(4, 4))], momentum=-1.0)


def cut(rank: int) -> list[str]:
    """What is said of each sharding of a stack over a mesh of two ranks, and of one rank."""
    said = []
    grid = init_device_mesh("cpu", (2, 1))
    for placements in ([Shard(1), Replicate()], [Shard(2), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(2)]):
        weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4, 4), grid, placements))
        try:
            Muon([weight])
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_shards_that_cut_a_matrix_are_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(cut):
        assert said[2:] == ["", ""]
        for message, dim in zip(said, (1, 2), strict=False):
            assert f"Shard(dim={dim})" in message
            assert "cuts the matrices, and Muon needs them whole: shard dim 0, or give it to AdamW" in message


def uneven(rank: int) -> bool:
    """Three experts over two ranks, of which the second has one; a gradient that is still a sum over the ranks."""
    mesh = init_device_mesh("cpu", (2,))
    start, by_step = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0)), gradients((3, 6, 4))
    whole, weight = nn.Parameter(start.clone()), nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
    partial = [[DTensor.from_local(each / 2, mesh, [Partial()])] for each in by_step]
    trained(Muon, [weight], partial, lr=0.1)
    trained(Muon, [whole], [[each] for each in by_step], lr=0.1)
    return torch.equal(weight.full_tensor(), whole)  # type: ignore[attr-defined]


def test_uneven_shards_and_partial_gradients(ranks: Ranks) -> None:
    assert ranks(2).run(uneven) == [True, True]
