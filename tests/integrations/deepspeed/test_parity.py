"""Rounding off, a model with our MoE layer trains under the engine as one with DeepSpeed's own and drop_tokens=False:
20 steps, loss and gradient norm to 1e-5, for every ZeRO stage that DeepSpeed's layer knows, every k and ep_size."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.launch import RankPool

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
STEPS = 20
Ranks = Callable[[int], RankPool]
Curve = list[tuple[float, ...]]


def plain_mlp() -> nn.Module:
    from tests.helpers.deepspeed_moe import WIDTH, H

    return nn.Sequential(nn.Linear(H, WIDTH), nn.GELU(approximate="tanh"), nn.Linear(WIDTH, H))


def biased_mlp() -> nn.Module:
    from tests.helpers.deepspeed_moe import GatedMLP

    return GatedMLP(bias=True)


def relu_mlp() -> nn.Module:
    from tests.helpers.deepspeed_moe import WIDTH, H

    return nn.Sequential(nn.Linear(H, WIDTH), nn.ReLU(), nn.Linear(WIDTH, H))


def exact_gelu_mlp() -> nn.Module:
    from tests.helpers.deepspeed_moe import WIDTH, H

    return nn.Sequential(nn.Linear(H, WIDTH), nn.GELU(), nn.Linear(WIDTH, H))


@dataclass(frozen=True)
class Case:
    """arguments: of both MoE layers. config: of the engine. ep_sizes: of our runs; stock has the last."""

    ranks: int
    zero: int
    ep_sizes: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


# Without ZeRO, DeepSpeed clips each rank by a norm of its own, so that its curves depend on ep_size.
UNCLIPPED = {"clip": 0.0}

CASES = {
    "2-zero0-k2": Case(2, 0, (1, 2), {"k": 2}, UNCLIPPED),
    "2-zero1-k1": Case(2, 1, (1, 2), {"k": 1}),
    "2-zero2-k3-accumulation": Case(2, 2, (1, 2), {"k": 3}, {"gradient_accumulation_steps": 2}),
    "2-zero1-residual": Case(2, 1, (2,), {"k": 2, "use_residual": True}),
    "2-zero1-plain-mlp": Case(2, 1, (2,), {"k": 2, "expert": plain_mlp}),
    "2-zero0-biases-residual": Case(2, 0, (2,), {"k": 4, "expert": biased_mlp, "use_residual": True}, UNCLIPPED),
    "2-zero1-data-before-expert": Case(2, 1, (2,), {"k": 2}, {"use_data_before_expert_parallelism": True}),
    "2-zero2-relu-residual": Case(2, 2, (1, 2), {"k": 2, "expert": relu_mlp, "use_residual": True}),
    "2-zero1-relu": Case(2, 1, (1, 2), {"k": 2, "expert": relu_mlp}),
    "2-zero2-exact-gelu": Case(2, 2, (1, 2), {"k": 1, "expert": exact_gelu_mlp}),
    "2-zero2-rsample": Case(2, 2, (1, 2), {"k": 1, "noisy_gate_policy": "RSample", "use_rts": False}),
    "2-zero1-second-sampled": Case(2, 1, (1, 2), {"k": 2, "top2_2nd_expert_sampling": True}),
    "4-zero1-plain-mlp": Case(4, 1, (1, 2, 4), {"k": 2, "expert": plain_mlp}),
    "4-zero0-k1": Case(4, 0, (1, 2, 4), {"k": 1}, UNCLIPPED),
    "4-zero1-k3": Case(4, 1, (1, 2), {"k": 3}),
    "4-zero2-k2": Case(4, 2, (1, 2, 4), {"k": 2}),
    "4-zero2-data-before-expert": Case(4, 2, (2,), {"k": 2}, {"use_data_before_expert_parallelism": True}),
}


def curve(rank: int, case: Case, ours: bool, ep_size: int) -> Curve:
    from deepspeed.utils import groups

    from tests.helpers.deepspeed_cpu import deepspeed_world, engine, train
    from tests.helpers.deepspeed_moe import Model, batches, loss_of, scatter_experts

    with deepspeed_world():
        model = Model(ours, ep_size=ep_size, **case.arguments)
        ep_rank = (
            rank // (case.ranks // ep_size) if "use_data_before_expert_parallelism" in case.config else rank % ep_size
        )
        scatter_experts(model, ep_rank)
        run = engine(model, zero=case.zero, **case.config)
        torch.manual_seed(rank)
        assert groups._get_expert_parallel_rank(f"ep_size_{ep_size}") == ep_rank
        accumulated = case.config.get("gradient_accumulation_steps", 1)
        return [tuple(step) for step in train(run, batches(rank, STEPS * accumulated), loss_of)]


def curves(rank: int, case: Case) -> list[Curve]:
    stock = curve(rank, case, ours=False, ep_size=case.ep_sizes[-1])
    return [stock, *(curve(rank, case, ours=True, ep_size=ep_size) for ep_size in case.ep_sizes)]


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_our_layer_trains_as_deepspeeds(ranks: Ranks, case: Case) -> None:
    stock, *ours = ranks(case.ranks).run(curves, case, timeout=600)[0]
    assert sum(loss for loss, _ in stock[-5:]) < sum(loss for loss, _ in stock[:5])
    for each in ours:
        for step, wanted in zip(each, stock, strict=True):
            assert step == pytest.approx(wanted, abs=1e-5)
