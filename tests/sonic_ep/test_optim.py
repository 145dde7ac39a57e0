"""Clipping and decay over ranks that hold different experts, against torch's own functions in one process."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, fsdp
from sonic_ep.optim import clip_grad_norm_, parameter_groups
from tests.helpers.launch import RankPool, run_ranks

CONFIG = MoEConfig(d=16, n=8, E=8, K=2, shared_n=8, init_std=0.3, bias=True, rounding=RoundingConfig(mode="off"))
TOKENS, WORLD = 12, 4


class Model(nn.Module):
    def __init__(self, group: EPGroup) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.head = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 2)
        self.unused = nn.Parameter(torch.zeros(3))
        self.moe = MoE(CONFIG, group, seed=0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.moe(self.norm(self.linear(x))).y
        return 100 * y.square().mean() + self.head(y).square().mean()


def batch() -> Tensor:
    return torch.randn(WORLD * TOKENS, 16, generator=torch.Generator().manual_seed(1))


class Case(NamedTuple):
    """wrapper: "FSDP2", "HSDP" (the dense weights alone), or "" for gradients that are averaged by hand."""

    wrapper: str
    ep_size: int
    norm_type: float
    max_norm: float = 0.7
    foreach: bool | None = None


CASES = [Case(wrapper, ep, norm) for wrapper in ("FSDP2", "") for ep in (1, 2, 4) for norm in (2.0, math.inf, 1.0)]
CASES += [Case("HSDP", 2, 2.0), Case("", 2, 2.0, max_norm=1e4), Case("FSDP2", 2, 3.0, foreach=False)]


def enlarge_experts(model: nn.Module) -> None:
    """So that their largest gradient is the largest of all."""
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.grad is not None:
            parameter.grad *= 10


def averaged(case: Case, rank: int, device: str = "cpu") -> Model:
    """A model with gradients of the whole batch."""
    grid = init_device_mesh(device, (WORLD // case.ep_size, case.ep_size), mesh_dim_names=("expert_data", "ep"))
    world = init_device_mesh(device, (WORLD,))
    if case.wrapper == "HSDP":
        world = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model(EPGroup(grid["ep"].get_group()) if case.ep_size > 1 else EPGroup.alone()).to(device)
    if case.wrapper and case.ep_size > 1:
        fsdp.fully_shard(model, mesh=world, expert_mesh=grid["expert_data"])
    elif case.wrapper:
        torch_fully_shard(model, mesh=world)
    model(batch().chunk(WORLD)[rank].to(device)).backward()
    for parameter in model.parameters():
        if parameter.grad is not None and not case.wrapper:
            of_expert = case.ep_size > 1 and not getattr(parameter, "allreduce", True)
            dist.all_reduce(parameter.grad, group=grid["expert_data"].get_group() if of_expert else None)
            parameter.grad /= WORLD
    enlarge_experts(model)
    return model


def clipped(rank: int, cases: list[Case], device: str) -> list[tuple[Tensor, dict[str, Tensor]]]:
    results = []
    for case in cases:
        model = averaged(case, rank, device)
        norm = clip_grad_norm_(model.parameters(), case.max_norm, case.norm_type, foreach=case.foreach)
        found: dict[str, Any] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
        results.append((norm.cpu(), {name: gradient.cpu() for name, gradient in whole.items()}))
    return results


@functools.cache
def clipped_alone(case: Case) -> tuple[float, dict[str, Tensor]]:
    model = Model(EPGroup.alone()).double()
    model(batch().double()).backward()
    enlarge_experts(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm, case.norm_type)
    return float(norm), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(by_rank: list[list[tuple[Tensor, dict[str, Tensor]]]]) -> None:
    for i, case in enumerate(CASES):
        norm, gradients = clipped_alone(case)
        assert len({float(results[i][0]) for results in by_rank}) == 1, case
        for rank, results in enumerate(by_rank):
            got, found = results[i]
            assert got.dtype is torch.float32
            assert float(got) == pytest.approx(norm, rel=1e-6), case
            assert found.keys() == gradients.keys()
            for name, whole in gradients.items():
                wanted = whole.chunk(case.ep_size)[rank % case.ep_size] if ".experts." in name else whole
                assert float((found[name] - wanted).norm() / wanted.norm()) < 2e-6, (case, name)


def test_clipping_is_that_of_one_process() -> None:
    check(run_ranks(clipped, WORLD, CASES, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_clipping_is_that_of_one_process_over_nccl(backend: str) -> None:
    if torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} CUDA devices, there are {torch.cuda.device_count()}")
    check(run_ranks(clipped, WORLD, CASES, "cuda", backend=backend))


def test_experts_and_dense_weights_both_count_in_the_norm() -> None:
    """So that the test above fails if either is counted twice, or not at all."""
    _, gradients = clipped_alone(Case("", 1, 2.0, max_norm=math.inf))
    norms = [
        nn.utils.get_total_norm([each for name, each in gradients.items() if (".experts." in name) == of_experts])
        for of_experts in (False, True)
    ]
    assert 0.5 < float(norms[0] / norms[1]) < 2
    assert ".experts." in max(gradients, key=lambda name: float(gradients[name].abs().max()))


def one_nan(rank: int, wrapper: str) -> list[str]:
    messages = []
    for norm_type in (2.0, math.inf):
        model = averaged(Case(wrapper, 4, norm_type), rank)
        grad = model.moe.experts.w2.grad
        assert grad is not None
        if rank == 2:
            (grad.to_local() if isinstance(grad, DTensor) else grad)[0, 0, 0] = math.nan
        assert clip_grad_norm_(model.parameters(), math.inf, norm_type).isnan()
        with pytest.raises(RuntimeError, match="norm of order") as raised:
            clip_grad_norm_(model.parameters(), 1.0, norm_type, error_if_nonfinite=True)
        messages.append(str(raised.value))
    return messages


@pytest.mark.parametrize("wrapper", ["FSDP2", ""])
def test_a_nan_on_one_rank_is_an_error_on_all(ranks: Callable[[int], RankPool], wrapper: str) -> None:
    for two, largest in ranks(WORLD).run(one_nan, wrapper):
        assert "norm of order 2 of all gradients is nan" in two
        assert "norm of order inf of all gradients is nan" in largest


def test_alone_it_is_torchs() -> None:
    mine, torchs = (Model(EPGroup.alone()).bfloat16() for _ in range(2))
    for model in (mine, torchs):
        model(batch().bfloat16()).backward()
    norm = clip_grad_norm_(mine.linear.weight, 0.5, error_if_nonfinite=True)
    assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(torchs.linear.weight, 0.5)), rel=2**-7)
    assert mine.linear.weight.grad is not None
    assert torchs.linear.weight.grad is not None
    assert float(mine.linear.weight.grad.float().norm()) == pytest.approx(0.5, rel=0.005)
    assert float(clip_grad_norm_([], 1.0)) == 0.0


def test_mistaken_arguments() -> None:
    with pytest.raises(ValueError, match="norm_type=0 is not above 0: give"):
        clip_grad_norm_(nn.Parameter(torch.ones(3)), 1.0, 0)
    unknown = nn.Parameter(torch.ones(3, 2))
    unknown.allreduce = False  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"shape \(3, 2\) has allreduce = False.*set its attribute ep_group_name"):
        clip_grad_norm_([unknown], 1.0)


def names_by_decay(model: nn.Module) -> dict[float, set[str]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[float, set[str]] = {}
    for group in parameter_groups(model, weight_decay=0.1):
        found.setdefault(group["weight_decay"], set()).update(names[id(p)] for p in group["params"])
    return found


def test_biases_of_experts_do_not_decay() -> None:
    model = Model(EPGroup.alone())
    model.head.requires_grad_(False)
    found = names_by_decay(model)
    assert {name for name in found[0.1] if ".experts." in name} == {"moe.experts.w1", "moe.experts.w2"}
    assert {name for name in found[0.0] if ".experts." in name} == {"moe.experts.b1", "moe.experts.b2"}
    assert {"linear.weight", "moe.router.weight"} < found[0.1]
    assert {"linear.bias", "norm.weight", "norm.bias", "unused"} < found[0.0]
    assert found[0.0] | found[0.1] == {name for name, p in model.named_parameters() if p.requires_grad}


def stepped(rank: int) -> tuple[dict[float, set[str]], int]:
    model = averaged(Case("FSDP2", 2, 2.0), rank)
    groups = parameter_groups(model, weight_decay=0.1)
    torch.optim.AdamW(groups, fused=True).step()  # which takes no two meshes in one group
    return names_by_decay(model), len(groups)


def test_groups_are_of_one_mesh() -> None:
    alone = names_by_decay(Model(EPGroup.alone()))
    assert run_ranks(stepped, WORLD) == [(alone, 4)] * WORLD
