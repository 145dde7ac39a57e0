"""Token rounding does what it does in sonic_ep's own layer; loss, counts and evaluation are those of plain top-k."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig
from tests.helpers.launch import RankPool

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
G = 16
ROUNDING = RoundingConfig(t=8, G=G)


def layer_of(rank: int, rounding: RoundingConfig | None, **arguments: Any) -> Any:
    from sonic_ep.integrations.deepspeed import SonicEPOptions
    from tests.helpers.deepspeed_moe import Model, scatter_experts

    options = SonicEPOptions(rounding=rounding, save_dispatched=True)
    model = Model(True, ep_size=2, options=options, **arguments)
    scatter_experts(model, rank % 2)
    layer = model.layers[0]
    layer.set_deepspeed_parallelism()
    return layer


def tokens(rank: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(96, 16, generator=torch.Generator().manual_seed(10 * seed + rank))


def against_own_layer(rank: int, k: int) -> tuple[Any, Any, list[int]]:
    from tests.helpers.deepspeed_cpu import deepspeed_world
    from tests.helpers.deepspeed_moe import EXPERTS, WIDTH, H, noted_routings

    with deepspeed_world():
        layer = layer_of(rank, ROUNDING, k=k)
        inner = layer.deepspeed_moe
        router = RouterConfig(renormalize=k > 1)
        config = MoEConfig(d=H, n=WIDTH, E=EXPERTS, K=k, router=router, rounding=ROUNDING)
        own = MoE(config, EPGroup(inner.group.process_group), seed=0)
        with torch.no_grad():
            own.router.weight.copy_(inner.gate.wg.weight)
            own.experts.w1.copy_(inner.experts.w1)
            own.experts.w2.copy_(inner.experts.w2)
        routings = noted_routings(inner.experts)
        results = []
        runs = ((inner.gate.wg, inner.experts, lambda x: layer(x)[0]), (own.router, own.experts, lambda x: own(x).y))
        for gate, experts, run in runs:
            x = tokens(rank).requires_grad_()
            y = run(x)
            y.square().sum().backward()
            results.append([y.detach(), x.grad, gate.weight.grad, experts.w1.grad, experts.w2.grad])
    return *results, routings[0].counts.rows_SE.sum(0).tolist()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_it_rounds_as_our_own_layer(ranks: Ranks, k: int) -> None:
    for ours, own, rows in ranks(2).run(against_own_layer, k):
        torch.testing.assert_close(ours, own)
        assert all(count % G == 0 for count in rows)


def plain_parts(rank: int, k: int) -> Any:
    """Output in training, what must not change with rounding, output in evaluation; without rounding first."""
    from tests.helpers.deepspeed_cpu import deepspeed_world

    parts = []
    with deepspeed_world():
        for rounding in (None, ROUNDING):
            layer = layer_of(rank, rounding, k=k)
            y, l_aux, counts = layer(tokens(rank))
            parts.append((y.detach(), l_aux.detach(), counts, layer.eval()(tokens(rank))[0].detach()))
    return parts


@pytest.mark.parametrize("k", [1, 2, 3])
def test_loss_counts_and_evaluation_are_those_of_plain_topk(ranks: Ranks, k: int) -> None:
    for (y, *plain), (rounded_y, *rounded) in ranks(2).run(plain_parts, k):
        assert not torch.equal(y, rounded_y)
        for got, wanted in zip(rounded, plain, strict=True):
            assert torch.equal(got, wanted)


def rounded_curve(rank: int, zero: int, mode: str) -> list[float]:
    from sonic_ep.integrations.deepspeed import SonicEPOptions
    from tests.helpers.deepspeed_cpu import deepspeed_world, engine, train
    from tests.helpers.deepspeed_moe import Model, loss_of, scatter_experts

    rounding = RoundingConfig(mode=mode, t=4, G=8)  # pyright: ignore[reportArgumentType]
    with deepspeed_world():
        model = Model(True, ep_size=2, k=2, options=SonicEPOptions(rounding=rounding))
        scatter_experts(model, rank % 2)
        steps = train(engine(model, zero=zero, lr=1e-2), [tokens(rank, seed % 4) for seed in range(24)], loss_of)
        return [step.loss for step in steps]


@pytest.mark.parametrize(("size", "zero", "mode"), [(2, 1, "stochastic"), (4, 2, "apportion")])
def test_it_trains(ranks: Ranks, size: int, zero: int, mode: str) -> None:
    first, *others = ranks(size).run(rounded_curve, zero, mode)
    assert all(other == first for other in others)
    assert sum(first[-4:]) < 0.8 * sum(first[:4])


def recomputed(rank: int) -> list[Any]:
    from torch.utils.checkpoint import checkpoint

    from tests.helpers.deepspeed_cpu import deepspeed_world

    results = []
    with deepspeed_world():
        for reentrant in (None, True, False):
            layer = layer_of(rank, RoundingConfig(mode="stochastic", t=4, G=8), k=2)
            x = tokens(rank).requires_grad_()
            torch.manual_seed(11)
            run = layer if reentrant is None else lambda x, r=reentrant, of=layer: checkpoint(of, x, use_reentrant=r)
            y, l_aux, _ = run(x)
            (y.square().sum() + l_aux).backward()
            results.append([y.detach(), x.grad, layer.deepspeed_moe.experts.w1.grad])
    return results


def test_recomputation_decides_alike(ranks: Ranks) -> None:
    for saved, *others in ranks(2).run(recomputed):
        for other in others:
            torch.testing.assert_close(other, saved, atol=0, rtol=0)
