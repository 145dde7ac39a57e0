"""The same layer on GPUs: over NCCL against the dense oracle, over NVLink in bf16 against float32, against the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, TransportConfig, replay_contexts
from sonic_ep.config import Buffers
from tests.helpers.launch import RankPool, most_gpus
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
    for rank, errors in enumerate(gpus(most_gpus()).run(errors_against_oracle, *CASES[case], "cuda")):
        wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
        assert not wrong, f"rank {rank}: {wrong}"


BUFFERS: tuple[Buffers, ...] = ("exact", "static")


def half_errors(rank: int) -> dict[str, float]:
    """Relative errors of bf16 layers over NVLink, output and gradients, against float32 over NCCL given a selection."""
    d = 512
    rounding = RoundingConfig(mode="nearest", capacity_factor=1.5)
    config = MoEConfig(d=d, n=256, E=32, K=4, init_std=d**-0.5, rounding=rounding)
    group = EPGroup()
    record, replay = replay_contexts()
    exact = MoE(config.replace(transport=TransportConfig(kind="all_to_all")), group, seed=5, device="cuda")
    torch.manual_seed(rank)
    x, dout = (torch.randn(1024, d, device="cuda").bfloat16() for _ in range(2))

    def results(layer: MoE) -> dict[str, Tensor]:
        dtype = layer.experts.w1.dtype
        leaf = x.to(dtype).requires_grad_()
        y = layer(leaf).y
        gradients = torch.autograd.grad(y, [leaf, *layer.parameters()], dout.to(dtype))
        return dict(zip(("y", "dx", *(name for name, _ in layer.named_parameters())), (y, *gradients), strict=True))

    layers = {
        buffers: MoE(
            config.replace(transport=TransportConfig(kind="symmetric", buffers=buffers)),
            group,
            seed=5,
            device="cuda",
            dtype=torch.bfloat16,
        )
        for buffers in BUFFERS
    }
    exact.load_state_dict(layers["exact"].state_dict())
    with record:
        got = {"exact": results(layers["exact"])}
    got["static"] = results(layers["static"])
    record.recorded_pairs[id(exact.router)] = record.recorded_pairs.pop(id(layers["exact"].router))
    with replay:
        wanted = results(exact)
    return {f"{name}, {buffers}": relative(got[buffers][name], wanted[name]) for buffers in BUFFERS for name in wanted}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_bf16_over_nvlink_stays_close_to_float32(gpus: Callable[[int], RankPool], size: int) -> None:
    for errors in gpus(size).run(half_errors):
        assert len(errors) == 10
        assert all(0 < error < 1e-2 for error in errors.values()), errors


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
