"""Both ways repeat recorded launches where they can: what a recording takes, and that its function is the layer's code.

There is no GPU here: `RecordedCalls.outputs` is replaced by the function that it would record.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep import RoundingConfig
from sonic_ep.kernels.launch_sequence.recorded_calls import RecordedCalls
from tests.helpers.launch import RankPool

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
ROUNDING = RoundingConfig(t=4, G=8)


class Recorded:
    """In place of RecordedCalls.outputs: the recorded function itself, on the tensors that the recording gets."""

    def __init__(self) -> None:
        self.problems: list[str | None] = []
        self.shapes: list[list[tuple[int, ...]]] = []

    def outputs(self, layer: Any, inputs: list[Tensor], num_tokens: int, problem: str | None) -> list[Tensor] | None:
        self.problems.append(problem)
        if problem is not None:
            return None
        assert num_tokens == inputs[0].shape[0]
        assert all(each.is_contiguous() for each in inputs)
        self.shapes.append([tuple(each.shape) for each in inputs])
        return layer.outputs_of(inputs)


def both(step: Callable[[], dict[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor], Recorded]:
    """A step by the code, the same by the recorded function, and what it got."""
    code, recorded = step(), Recorded()
    with patch.object(RecordedCalls, "outputs", lambda _, *args, **__: recorded.outputs(*args)):
        return code, step(), recorded


def moe_both_ways(rank: int, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    from sonic_ep.integrations.deepspeed import SonicEPOptions
    from tests.helpers.deepspeed_cpu import deepspeed_world
    from tests.helpers.deepspeed_moe import H, Model, gradients, scatter_experts

    def step() -> dict[str, Tensor]:
        torch.manual_seed(rank)  # of noise
        model = Model(True, ep_size=2, options=SonicEPOptions(**options), **arguments)
        scatter_experts(model, rank)
        layer = model.layers[0]
        layer.set_deepspeed_parallelism()
        x = torch.randn(24 - rank, H, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        used = torch.arange(24 - rank) % 3 if arguments.get("k") == 1 else None
        y, l_aux, counts = layer(x, used)
        (y.square().sum() + 3 * l_aux).backward()
        assert x.grad is not None
        return {"y": y.detach(), "l_aux": l_aux.detach(), "counts": counts, "dx": x.grad, **gradients(layer)}

    with deepspeed_world():
        code, again, recorded = both(step)
    assert code.keys() == again.keys()
    differing = [name for name, value in code.items() if not torch.equal(value, again[name])]
    return differing, recorded.problems, recorded.shapes


@pytest.mark.parametrize(
    ("arguments", "options", "routed"),
    [
        ({"k": 1}, {}, [(24, 8), (24,)]),
        ({"k": 2}, {}, [(24, 8)]),
        ({"k": 3, "use_residual": True}, {"save_dispatched": True}, [(24, 8)]),
        ({"k": 3}, {"rounding": ROUNDING}, [(24, 8)]),
    ],
)
def test_moe_is_recorded_from_its_logits_on(
    ranks: Ranks, arguments: dict[str, Any], options: dict[str, Any], routed: list[tuple[int, ...]]
) -> None:
    results = ranks(2).run(moe_both_ways, arguments, options)
    assert all(differing == [] and problems == [None] for differing, problems, _ in results)
    assert results[0][2] == [[(24, 16), *routed, (4, 48, 16), (4, 16, 24)]]


@pytest.mark.filterwarnings("ignore:without effect")
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"k": 1, "noisy_gate_policy": "RSample"}, {}),
        ({"k": 2}, {"rounding": RoundingConfig(mode="stochastic", t=4, G=8)}),
    ],
)
def test_moe_that_draws_runs_its_code(ranks: Ranks, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    for differing, problems, _ in ranks(2).run(moe_both_ways, arguments, options):
        assert differing == []
        assert problems == ["the layer draws random numbers"]


def test_moe_without_recordings(ranks: Ranks) -> None:
    for differing, problems, _ in ranks(2).run(moe_both_ways, {"k": 2}, {"record_launches": False}):
        assert differing == []
        assert problems == []


def autoep_both_ways(rank: int, preset: str, zero: int, options: dict[str, Any]) -> Any:
    from sonic_ep.integrations.deepspeed import AutoEP, SonicEPOptions
    from tests.helpers.deepspeed_cpu import deepspeed_world, engine, train
    from tests.helpers.hugging_face import adam_of, batches, expert_parallel, loss_of, model_of

    def step() -> dict[str, Tensor]:
        AutoEP.install(SonicEPOptions(**options))
        try:
            with deepspeed_world():
                run = engine(model_of(preset), zero=zero, optimizer=adam_of, **expert_parallel(2, preset))
                steps = train(run, batches(rank, 2), loss_of)
                counts = [layer.mlp.tokens_per_expert for layer in run.module.model.layers[1:]]
                return {"steps": torch.tensor(steps), "counts": torch.stack(counts)}
        finally:
            AutoEP.uninstall()

    code, again, recorded = both(step)
    differing = [name for name, value in code.items() if not torch.equal(value, again[name])]
    return differing, recorded.problems, recorded.shapes


@pytest.mark.parametrize("options", [{}, {"rounding": ROUNDING}], ids=["plain", "rounded"])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_autoep_is_recorded_from_its_logits_on(ranks: Ranks, zero: int, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    for differing, problems, shapes in ranks(2).run(autoep_both_ways, "qwen3_moe", zero, options):
        assert differing == []
        assert problems == [None] * 4  # two layers, two steps
        for tokens, logits, gate_and_up, down, (none, distance) in shapes:
            assert (tokens, logits, gate_and_up, down) == ((24, 32), (24, 8), (4, 32, 32), (4, 32, 16))
            assert none == 0
            assert zero == 0 or distance == 2 * 4 * 16 * 32 * 4  # w2 lies between w1 and w3


def test_the_correction_bias_is_an_input(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    for differing, problems, shapes in ranks(2).run(autoep_both_ways, "deepseek_v3", 1, {}):
        assert differing == []
        assert set(problems) == {None}
        assert all(each[1:3] == [(24, 8), (8,)] for each in shapes)


def test_zero_3_runs_the_code(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    for differing, problems, _ in ranks(2).run(autoep_both_ways, "qwen3_moe", 3, {}):
        assert differing == []
        assert problems == ["ZeRO 3 gathers the weights in every pass"] * 4
