"""The MoE layer on GPUs in bfloat16, beside DeepSpeed's own: outputs, gradients, training, resuming, rounding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonic_ep import RoundingConfig
from tests.helpers.launch import RankPool

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.gpu

Ranks = Callable[[int], RankPool]
HIDDEN, WIDTH, TOKENS = 256, 128, 1024


def gated(bias: bool = False) -> nn.Module:
    from tests.helpers.deepspeed_moe import GatedMLP

    return GatedMLP(HIDDEN, WIDTH, bias)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(approximate="tanh"), nn.Linear(WIDTH, HIDDEN))


def relu() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.ReLU(), nn.Linear(WIDTH, HIDDEN))


def exact_gelu() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN))


def gated_with_biases() -> nn.Module:
    return gated(bias=True)


VARIANTS: dict[str, dict[str, Any]] = {
    "k1": {"k": 1},
    "k2": {"k": 2},
    "k4-residual": {"k": 4, "use_residual": True},
    "biases": {"k": 3, "expert": gated_with_biases},
    "plain": {"k": 2, "expert": plain},
    "relu": {"k": 2, "expert": relu},
    "exact-gelu": {"k": 1, "expert": exact_gelu},
}


def model_of(rank: int, ours: bool, ep_size: int, **arguments: Any) -> Any:
    from tests.helpers.deepspeed_moe import Model, scatter_experts

    model = Model(ours, ep_size=ep_size, hidden=HIDDEN, **{"expert": gated, **arguments})
    scatter_experts(model, rank % ep_size)
    return model


def tokens(rank: int, step: int = 0) -> Tensor:
    values = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 * step + rank))
    return values.to("cuda", torch.bfloat16)


def outcome(layer: Any, x: Tensor) -> dict[str, Tensor]:
    from tests.helpers.deepspeed_moe import gradients

    x = x.clone().requires_grad_()
    y, l_aux, counts = layer(x)
    (y.float().square().mean() + l_aux).backward()
    assert x.grad is not None
    results = {"y": y.detach(), "l_aux": l_aux.detach(), "counts": counts, "dx": x.grad, **gradients(layer)}
    return {name: value.cpu() for name, value in results.items()}


def distance(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-20))


def against_deepspeeds(rank: int, variant: str, ep_size: int) -> Any:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    results = []
    with deepspeed_world():
        for ours in (False, True):
            layer = model_of(rank, ours, ep_size, **VARIANTS[variant]).layers[0].to("cuda", torch.bfloat16)
            layer.set_deepspeed_parallelism()
            results.append(outcome(layer, tokens(rank)))
    return results


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_is_close_to_deepspeeds(gpus: Ranks, variant: str, ep_size: int) -> None:
    for stock, ours in gpus(ep_size).run(against_deepspeeds, variant, ep_size, timeout=600):
        assert ours.keys() == stock.keys()
        assert torch.equal(ours["counts"], stock["counts"])
        far = {name: distance(ours[name], value) for name, value in stock.items()}
        assert max(far.values()) < 2e-2, far


def curve(rank: int, ours: bool, zero: int, ep_size: int, steps: int, **arguments: Any) -> list[tuple[float, ...]]:
    from tests.helpers.deepspeed_cpu import deepspeed_world, engine, train
    from tests.helpers.deepspeed_moe import loss_of

    with deepspeed_world():
        model = model_of(rank, ours, ep_size, k=2, **arguments)
        # A loss of order 1: from 1e5 bfloat16's rounding alone sets two runs of one layer a tenth apart in two steps.
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.mul_(0.2 if "experts" in name else 1)
        run = engine(model, zero=zero, dtype=torch.bfloat16)
        return [tuple(step) for step in train(run, [tokens(rank, step % 4) for step in range(steps)], loss_of)]


def both_curves(rank: int, zero: int) -> Any:
    return curve(rank, False, zero, 2, 16), curve(rank, True, zero, 2, 16)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_it_trains_as_deepspeeds(gpus: Ranks, zero: int) -> None:
    stock, ours = gpus(2).run(both_curves, zero, timeout=600)[0]
    assert ours[-1][0] < ours[0][0]
    for step, wanted in zip(ours, stock, strict=True):
        assert step == pytest.approx(wanted, rel=3e-2)


def as_programs_and_code(rank: int, k: int, rounding: RoundingConfig | None) -> tuple[bool, list[int]]:
    """Whether both ways give the same bits, and the programs of a layer of each."""
    from sonic_ep.integrations.deepspeed import SonicEPOptions
    from tests.helpers.deepspeed_cpu import deepspeed_world

    found, numbers = [], []
    with deepspeed_world():
        for as_programs in (True, False):
            options = SonicEPOptions(record_launches=as_programs, rounding=rounding)
            layer = model_of(rank, True, 2, k=k, options=options).layers[0].to("cuda", torch.bfloat16)
            layer.set_deepspeed_parallelism()
            found.append([])
            for step in range(6):
                layer.zero_grad()
                found[-1].append(outcome(layer, tokens(rank, step)))
            numbers.append(layer.deepspeed_moe._experts.num_programs)
    pairs = [(one[name], two[name]) for one, two in zip(*found, strict=True) for name in one]
    return all(torch.equal(one, two) for one, two in pairs), numbers


@pytest.mark.parametrize("rounding", [None, RoundingConfig(t=64)], ids=["plain", "rounded"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_steps_are_programs(gpus: Ranks, k: int, rounding: RoundingConfig | None) -> None:
    for alike, (with_them, without) in gpus(2).run(as_programs_and_code, k, rounding, timeout=600):
        assert alike
        assert with_them > 0
        assert without == 0


def rounded_curve(rank: int) -> list[tuple[float, ...]]:
    from sonic_ep.integrations.deepspeed import SonicEPOptions

    options = SonicEPOptions(rounding=RoundingConfig(t=64), save_dispatched=True)
    return curve(rank, True, 1, 2, 16, options=options)


def test_rounding_trains(gpus: Ranks) -> None:
    steps = gpus(2).run(rounded_curve, timeout=600)[0]
    assert steps[-1][0] < steps[0][0]


def resume(rank: int, folder: str, zero: int) -> tuple[Any, Any]:
    from tests.helpers.deepspeed_cpu import deepspeed_world, engine, train
    from tests.helpers.deepspeed_moe import loss_of

    batches = [tokens(rank, step) for step in range(4)]
    with deepspeed_world():
        run = engine(model_of(rank, True, 2, k=2), zero=zero, dtype=torch.bfloat16)
        train(run, batches[:2], loss_of)
        run.save_checkpoint(folder)
        wanted = train(run, batches[2:], loss_of)
        state = {key: value.cpu() for key, value in run.module.state_dict().items()}
    with deepspeed_world():
        run = engine(model_of(rank, True, 2, k=2, seed=5), zero=zero, dtype=torch.bfloat16)
        run.load_checkpoint(folder)
        got = train(run, batches[2:], loss_of)
        same = all(torch.equal(value.cpu(), state[key]) for key, value in run.module.state_dict().items())
    return [tuple(step) for step in got] == [tuple(step) for step in wanted], same


@pytest.mark.parametrize("zero", [1, 2])
def test_resumed_training_goes_on_bitwise(gpus: Ranks, tmp_path: Path, zero: int) -> None:
    assert gpus(2).run(resume, str(tmp_path), zero, timeout=600) == [(True, True)] * 2
