"""The same layer on GPUs over NCCL: against the dense oracle, against the CPU, and where it reads back to the host."""

from collections.abc import Callable

import pytest
import torch

from sonic_ep import EPGroup, MoE
from tests.helpers.launch import RankPool
from tests.sonic_ep.test_layer import CASES, TOLERANCE, build, errors_against_oracle, inputs, relative, small

pytestmark = pytest.mark.gpu
GPU_CASES = (
    "mode-apportion",
    "mode-stochastic",
    "mode-pad",
    "mode-off",
    "auto",
    "capacity",
    "groups-bias",
    "kept-rows",
)


@pytest.mark.parametrize("case", [*GPU_CASES, "one-rank-empty", "all-on-one-expert", "fewer-tokens-than-t"])
def test_output_and_gradients_match_the_dense_oracle(gpus: Callable[[int], RankPool], case: str) -> None:
    pool = gpus(min(4, torch.cuda.device_count()))
    for rank, errors in enumerate(pool.run(errors_against_oracle, *CASES[case], "cuda")):
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"


def test_gpu_and_cpu_route_alike() -> None:
    config, _ = CASES["mode-apportion"]
    x, _ = inputs(config, "ragged", 3)
    on_cpu = build(config, EPGroup.alone(), "ragged")(x)
    on_gpu = build(config, EPGroup.alone(), "ragged", "cuda")(x.cuda())
    assert relative(on_gpu.y, on_cpu.y) < TOLERANCE
    assert on_gpu.stats.changed_share == on_cpu.stats.changed_share
    assert torch.equal(on_gpu.stats.counts_E.cpu(), on_cpu.stats.counts_E)


def test_weights_are_the_same_on_every_device() -> None:
    for on_gpu, on_cpu in zip(
        MoE(small(), seed=4, device="cuda").parameters(), MoE(small(), seed=4).parameters(), strict=True
    ):
        assert torch.equal(on_gpu.cpu(), on_cpu)


def test_bf16_trains() -> None:
    layer = MoE(small(d=64, n=32), seed=0, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(200, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y, aux, _ = layer(x)
    (y.float().square().mean() + aux).backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    assert all(g is not None and g.isfinite().all() and g.abs().max() > 0 for g in gradients)
