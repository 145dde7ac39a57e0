"""CUDA graphs: a captured step does what the eager one does, whatever its inputs, though they change every size."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig, TransportConfig
from sonic_ep.dispatch import symmetric
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.initialization import rng_for
from sonic_ep.routers.router import Router
from tests.helpers.changing_routing import BOUNDED, LOSSES, STATIC, leaning_tokens
from tests.helpers.launch import RankPool, most_gpus
from tests.helpers.waiting import assert_nothing_waits

pytestmark = pytest.mark.gpu
T, D = 700, 256
SHAPE = {"d": D, "n": 128, "E": 16, "K": 4}
CONFIGS = {
    "off": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="off")),
    "nearest": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="nearest"), router=LOSSES),
    "apportion": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="apportion", t=64)),
    "pad": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="pad"), router=RouterConfig(expert_bias=True)),
    "down": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="down", t=32)),
    "capacity": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="nearest", capacity_factor=1.0)),
    "bias": MoEConfig(
        **SHAPE, rounding=RoundingConfig(mode="nearest"), activation="swiglu_oai", bias=True, shared_n=64
    ),
}


def inputs(step: int) -> Tensor:
    return leaning_tokens(step, T, D, "cuda", torch.bfloat16)


def warm_up(call: Any) -> None:
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side_stream)


def capture(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the step, and where its replays put the results."""
    warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


@pytest.mark.parametrize("name", CONFIGS)
def test_a_captured_layer_computes_what_the_eager_one_does(name: str) -> None:
    layer = MoE(CONFIGS[name], seed=1, device="cuda", dtype=torch.bfloat16)
    x = inputs(0).requires_grad_()
    dy = torch.randn(T, D, device="cuda").bfloat16()

    def step() -> tuple[Tensor, ...]:
        y, aux, stats = layer(x)
        gradients = torch.autograd.grad((y * dy).sum() + aux, [x, *layer.parameters()])
        return y.detach(), stats.counts.rows_SE, *gradients

    graph, captured = capture(step)
    rows = []
    for number in range(3):
        with torch.no_grad():
            x.copy_(inputs(number))
        graph.replay()
        for got, wanted in zip(captured, step(), strict=True):
            assert torch.equal(got, wanted)
        rows.append(captured[1].tolist())
    assert rows[0] != rows[1] != rows[2]


def test_a_captured_router_draws_anew_at_every_replay() -> None:
    config = MoEConfig(**SHAPE, rounding=RoundingConfig(mode="stochastic"))
    layer, x = MoE(config, seed=1, device="cuda", dtype=torch.bfloat16), inputs(0)

    def step() -> Tensor:
        with torch.no_grad():
            return layer(x).stats.counts.rows_SE

    graph, rows_SE = capture(step)
    seen = set()
    for _ in range(8):
        graph.replay()
        seen.add(str(rows_SE.tolist()))
    assert len(seen) > 1


def test_check_logits_says_that_it_cannot_be_captured() -> None:
    config = MoEConfig(**SHAPE, router=RouterConfig(check_logits=True))
    layer, x = MoE(config, seed=1, device="cuda", dtype=torch.bfloat16), inputs(0)
    warm_up(lambda: layer(x))
    with pytest.raises(ValueError, match="check_logits=False"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(x)


def captured_routing(rank: int) -> list[bool]:
    """Router, decision and plan across ranks, captured and eager, on inputs that change: equal?"""
    config = MoEConfig(**SHAPE, rounding=RoundingConfig(mode="apportion", t=64))
    group = EPGroup()
    torch.manual_seed(0)
    router, x = Router(config, device=torch.device("cuda")), inputs(0)
    router.initialize(0.02, rng_for(7, 0))

    def step() -> tuple[Tensor, ...]:
        with torch.no_grad():
            routing = router(x, group=group, sequence_length=T).routing
            plan = plan_for(routing.counts, group.rank)
        return routing.counts.rows_SE, plan.table_FC, plan.pairs_SQ, routing.token_ids_N, routing.weights_N

    graph, captured = capture(step)
    equal = []
    for number in range(3):
        x.copy_(inputs(number + 3 * rank))
        graph.replay()
        torch.cuda.synchronize()
        eager = step()
        sent = int(captured[2].view(group.size, group.size)[group.rank].sum())
        equal += [torch.equal(got[:sent], wanted[:sent]) for got, wanted in zip(captured, eager, strict=True)]
    return equal


def test_routing_across_ranks_is_captured(gpus: Callable[[int], RankPool]) -> None:
    for equal in gpus(most_gpus()).run(captured_routing):
        assert all(equal)
        assert len(equal) == 15


STEPS = 100


def captured_layer(rank: int, rounding: RoundingConfig, saves: bool) -> tuple[list[str], int]:
    """Names of what differs between a replay and the eager step with exact buffers, over steps of changing routing; and
    how many numbers of rows this rank has had."""
    torch.manual_seed(rank)
    config = MoEConfig(**SHAPE, rounding=rounding, router=LOSSES, transport=STATIC, save_dispatched=saves)
    group, x, dy = EPGroup(), inputs(rank).requires_grad_(), torch.randn(T, D, device="cuda").bfloat16()
    layer = MoE(config, group, seed=1, device="cuda", dtype=torch.bfloat16)
    other = config.replace(transport=TransportConfig(kind="all_to_all"))
    exact = MoE(other, group, seed=1, device="cuda", dtype=torch.bfloat16)

    def step(layer: MoE) -> tuple[Tensor, ...]:
        y, aux, stats = layer(x)
        gradients = torch.autograd.grad((y * dy).sum() + aux, [x, *layer.parameters()])
        return y.detach(), stats.counts.rows_SE, *gradients

    with patch.object(symmetric, "_MIN_COPY_BYTES", 0):
        graph, captured = capture(lambda: step(layer))
    names = ("y", "rows", "dx", *(name for name, _ in layer.named_parameters()))
    differing, sizes = [], set()
    for number in range(STEPS):
        with torch.no_grad():
            x.copy_(inputs(number % 9 + 10 * rank))
        graph.replay()
        same = [torch.equal(a, b) for a, b in zip(captured, step(exact), strict=True)]
        differing += [f"step {number}: {name}" for name, equal in zip(names, same, strict=True) if not equal]
        sizes.add(str(captured[1].tolist()))
    return differing, len(sizes)


@pytest.mark.parametrize("saves", [False, True], ids=["sends x again", "keeps rows"])
@pytest.mark.parametrize("mode", BOUNDED)
def test_a_layer_across_ranks_is_captured(gpus: Callable[[int], RankPool], mode: str, saves: bool) -> None:
    for differing, sizes in gpus(most_gpus()).run(captured_layer, BOUNDED[mode], saves):
        assert differing == []
        assert sizes > 5


def static_step_without_a_wait(rank: int) -> None:
    config = MoEConfig(**SHAPE, rounding=BOUNDED["apportion"], transport=STATIC)
    group = EPGroup()
    layer = MoE(config, group, seed=1, device="cuda", dtype=torch.bfloat16)
    x = inputs(rank).requires_grad_()
    assert_nothing_waits(lambda: layer(x).y.sum().backward())


def test_a_static_step_never_waits(gpus: Callable[[int], RankPool]) -> None:
    gpus(most_gpus()).run(static_step_without_a_wait)


def other_number_of_tokens(rank: int) -> None:
    config = MoEConfig(**SHAPE, rounding=BOUNDED["apportion"], transport=STATIC)
    layer = MoE(config, EPGroup(), seed=1, device="cuda", dtype=torch.bfloat16)
    x = inputs(rank)
    layer(x)
    with pytest.raises(ValueError, match="rank 1: T=5 tokens, but transport.buffers='static' keeps to the first step"):
        layer(x[: 5 if rank == 1 else None])
    layer.eval()
    layer(x[: 5 if rank == 1 else None])  # plain top-K knows no bound: sizes are read


def test_static_buffers_keep_to_their_number_of_tokens(gpus: Callable[[int], RankPool]) -> None:
    gpus(2).run(other_number_of_tokens)
