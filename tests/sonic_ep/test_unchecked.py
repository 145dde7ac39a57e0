"""Rows are sent before the host hears how the other ranks are; with static buffers, all of a forward is launched.

If one of them is not well, nobody waits for it, all are told, and the next step is as if nothing had been. Between
processes that share files the kernels are interpreted; between GPUs they run.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig, TransportConfig, functional, replay_contexts
from sonic_ep.config import Buffers
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.routing import AsyncSplitSizes
from sonic_ep.steps import experts_step
from tests.helpers.launch import RankPool
from tests.helpers.noting import noting
from tests.helpers.static_buffers import buffers_in_files
from tests.helpers.tolerances import assert_near
from tests.helpers.triton_device import triton_device

Ranks = Callable[[int], RankPool]
T = 12
WRONG = {
    "problem": "rank 1: x has hidden size",
    "mode": "disagree about input dtype or training mode: rank 0: torch.{dtype} training, rank 1: torch.{dtype} eval",
    "logits": "router logits hold NaN or inf (rank 1: {logits})",
}
# breaks: the healthy rank runs out of memory then. twice: it tries the routing again.
WAYS = [*WRONG, "problem breaks", "mode breaks", "mode twice"]


def config(device: str, buffers: Buffers) -> MoEConfig:
    d, n = (8, 4) if device == "cpu" else (64, 32)
    return MoEConfig(
        d=d,
        n=n,
        E=8,
        K=2,
        rounding=RoundingConfig(mode="nearest", t=2, G=2, capacity_factor=2.0),
        router=RouterConfig(check_logits=True),
        transport=TransportConfig(buffers=buffers, timeout=20),
    )


def dtype_of(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def step(layer: MoE, number: int, run: Callable[..., Any]) -> list[Tensor]:
    """Other rows each time: what an earlier step has left must not pass for them. run: the layer, compiled or not."""
    generator = torch.Generator().manual_seed(10 * number + layer.group.rank)
    x = torch.randn(T, layer.config.d, generator=generator).to(layer.experts.w1).requires_grad_()
    y = run(x).y
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


def go_wrong(layer: MoE, how: str, run: Callable[..., Any]) -> str:
    how, *more = how.split()
    ill = layer.group.rank == 1
    x = torch.ones(T, layer.config.d - (how == "problem" and ill)).to(layer.experts.w1)
    if ill:
        layer.train(how != "mode")
        x[0] = float("nan") if how == "logits" else 1
    breaks = more == ["breaks"] and not ill
    with patch.object(experts_step, "forward", side_effect=MemoryError) if breaks else nullcontext():
        try:
            if more == ["twice"]:
                route_once_compute_twice(layer, x)
            run(x)
        except ValueError as error:
            return str(error)
        finally:
            layer.train()
    return "no error"


def route_once_compute_twice(layer: MoE, x_TH: Tensor) -> None:
    group, weights = layer.group, layer.experts()
    routing = layer.router(x_TH, group=group, sequence_length=T, exchange=layer.transport).routing
    with pytest.raises(ValueError, match="disagree"):
        functional.moe(x_TH, routing, weights.w1, weights.w2_eHI, transport=layer.transport, group=group)
    functional.moe(x_TH, routing, weights.w1, weights.w2_eHI, transport=layer.transport, group=group)


Compiled = Literal["", "router", "layer"]


def compiled_or_not(layer: MoE, compiled: Compiled) -> Callable[..., Any]:
    torch._dynamo.reset()
    if compiled == "router":
        layer.router.compile(fullgraph=True, backend="aot_eager")
    return torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled == "layer" else layer


# Of this process, whose pool has one size and one device; its ranks hear the same calls.
expected_steps: dict[tuple[Buffers, Compiled], list[list[Tensor]]] = {}


def steps(
    rank: int, folder: str | None, buffers: Buffers, how: str, compiled: Compiled
) -> tuple[str, list[list[Tensor]], list[list[Tensor]]]:
    """What is raised in the middle of three steps, these, and the same ones where nothing has gone wrong."""
    device, group = "cpu" if folder is not None else "cuda", EPGroup()

    def new_layer() -> MoE:
        return MoE(config(device, buffers), group, seed=0, device=device, dtype=dtype_of(device))

    layer = new_layer()
    context: AbstractContextManager[None] = nullcontext()
    if folder is not None:
        context = buffers_in_files(layer.transport, folder, static=buffers == "static")  # pyright: ignore[reportArgumentType]
    with context, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute")  # which Dynamo asks the input of a router for
        raised, results, run = "", [], compiled_or_not(layer, compiled)
        for number in range(3):
            if number == 2:
                raised = go_wrong(layer, how, run)
            results.append(step(layer, number, run))
        key = (buffers, compiled)
        if key not in expected_steps:
            well = new_layer()
            run = compiled_or_not(well, compiled)  # which rounds more often than eager kernels do
            expected_steps[key] = [step(well, number, run) for number in range(3)]
    return raised, results, expected_steps[key]


def check(pool: RankPool, folder: str | None, buffers: Buffers, how: str, compiled: Compiled = "") -> None:
    device = "cuda" if folder is None else "cpu"
    wanted = WRONG[how.split()[0]].format(dtype=str(dtype_of(device)).removeprefix("torch."), logits=8)
    for raised, results, expected in pool.run(steps, folder, buffers, how, compiled):
        assert wanted in raised
        for got, values in zip(results, expected, strict=True):
            assert all(map(torch.equal, got, values))


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels")
@pytest.mark.parametrize("buffers", ["static", "exact"])
@pytest.mark.parametrize(("size", "how"), [*((2, how) for how in WAYS), (4, "problem")])
def test_nobody_waits_for_a_rank_that_has_raised(
    ranks: Ranks, size: int, buffers: Buffers, how: str, tmp_path: Path
) -> None:
    check(ranks(size), str(tmp_path), buffers, how)


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels")
@pytest.mark.parametrize("buffers", ["static", "exact"])
@pytest.mark.parametrize(
    ("compiled", "how"), [*(("layer", how) for how in WAYS if "twice" not in how), ("router", "problem")]
)
def test_nobody_waits_in_a_compiled_layer(
    ranks: Ranks, buffers: Buffers, compiled: Compiled, how: str, tmp_path: Path
) -> None:
    check(ranks(2), str(tmp_path), buffers, how, compiled)


def raised_without_output(rank: int, folder: str) -> list[str]:
    """What is raised in four steps of a graph that nobody asks for the experts' output; the third goes wrong."""
    layer, raised = MoE(config("cpu", "static"), EPGroup(), seed=0), []
    torch._dynamo.reset()
    run = torch.compile(lambda x: layer(x).stats.entropy, fullgraph=True, backend="aot_eager")
    with buffers_in_files(layer.transport, folder, static=True):  # pyright: ignore[reportArgumentType]
        for number in range(4):
            x = torch.randn(T, layer.config.d - (number == 2 and rank == 1))
            try:
                run(x)
                raised.append("")
            except ValueError as error:
                raised.append(str(error))
    return raised


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels")
def test_a_compiled_layer_whose_output_nobody_uses_is_checked(ranks: Ranks, tmp_path: Path) -> None:
    for raised in ranks(2).run(raised_without_output, str(tmp_path)):
        assert "rank 1: x has hidden size 7" in raised.pop(2)
        assert raised == [""] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("buffers", ["static", "exact"])
@pytest.mark.parametrize("how", ["problem", "logits breaks"])
def test_nobody_waits_in_a_compiled_layer_on_gpus(gpus: Ranks, buffers: Buffers, how: str) -> None:
    check(gpus(2), None, buffers, how, "layer")


@pytest.mark.gpu
@pytest.mark.parametrize("buffers", ["static", "exact"])
@pytest.mark.parametrize("how", WAYS)
def test_nobody_waits_for_a_gpu_that_has_raised(gpus: Ranks, buffers: Buffers, how: str) -> None:
    check(gpus(2), None, buffers, how)


def order(rank: int, folder: str, buffers: Buffers, compiled: Compiled) -> list[list[str]]:
    """In which order rows are sent, reports are read and sums are sent back, by step."""
    layer, did = MoE(config("cpu", buffers), EPGroup(), seed=0), list[list[str]]()
    with (
        buffers_in_files(layer.transport, folder, static=buffers == "static"),  # pyright: ignore[reportArgumentType]
        noting(did, ["send"], SymmetricTransport, "_send"),
        noting(did, ["combine"], SymmetricTransport, "combine"),
        noting(did, ["read"], AsyncSplitSizes, "read"),
        torch.no_grad(),
    ):
        run = compiled_or_not(layer, compiled)
        for number in range(3):
            did.append([])
            run(torch.ones(T, 8) + number)
    return did


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels")
@pytest.mark.parametrize(
    ("buffers", "order_of_steps"), [("static", ["send", "combine", "read"]), ("exact", ["read", "send", "combine"])]
)
@pytest.mark.parametrize("compiled", ["", "layer"])
def test_reports_are_read_late(
    ranks: Ranks, buffers: Buffers, order_of_steps: list[str], compiled: Compiled, tmp_path: Path
) -> None:
    """But in the first step, which allocates what the ranks write to."""
    expected = [["read", "send", "combine"], order_of_steps, order_of_steps]
    assert ranks(2).run(order, str(tmp_path), buffers, compiled) == [expected] * 2


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels")
@pytest.mark.parametrize(("buffers", "reads"), [("static", 1), ("exact", 2)])
def test_a_router_that_is_compiled_alone_reads_its_report_at_once(
    ranks: Ranks, buffers: Buffers, reads: int, tmp_path: Path
) -> None:
    """Exact buffers read sizes again: an operation of a graph passes on none."""
    assert ranks(2).run(order, str(tmp_path), buffers, "router") == [[["read"] * reads + ["send", "combine"]] * 3] * 2


def recomputed(rank: int, folder: str, compiled: Compiled) -> None:
    """Steps of changing numbers of tokens, recomputed in backward: some are launched ahead of sizes, some behind."""
    group = EPGroup()
    exact = MoEConfig(d=8, n=4, E=8, K=2, init_std=0.3, rounding=RoundingConfig(mode="off"), save_dispatched=True)
    layer = MoE(exact, group, seed=0)
    plain = MoE(exact.replace(transport=TransportConfig(kind="all_to_all")), group, seed=0)
    with buffers_in_files(layer.transport, folder, static=False):  # pyright: ignore[reportArgumentType]
        run = compiled_or_not(layer, compiled)
        for number, tokens in enumerate((12, 12, 9, 9, 10, 12, 12)):
            x = torch.randn(tokens + rank, 8, generator=torch.Generator().manual_seed(10 * number + rank))
            results = []
            for each, call in ((layer, run), (plain, plain)):
                leaf = x.clone().requires_grad_()
                y = checkpoint(lambda x, call=call: call(x).y, leaf, use_reentrant=False, context_fn=replay_contexts)
                results.append(torch.autograd.grad(y.square().sum(), [leaf, *each.parameters()]))
            for got, expected in zip(*results, strict=True):
                assert_near(got, expected, share=1e-5)


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels")
@pytest.mark.parametrize("compiled", ["", "layer"])
def test_recomputed_steps_are_the_same(ranks: Ranks, compiled: Compiled, tmp_path: Path) -> None:
    ranks(2).run(recomputed, str(tmp_path), compiled)
