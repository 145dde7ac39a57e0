"""A layer whose steps are programs computes, bit for bit, what its code computes, in every order of calls."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sonic_ep import MoE, MoEConfig, RoundingConfig, RouterConfig, replay_contexts
from sonic_ep.kernels.program.program import Program
from tests.helpers.changing_routing import LOSSES, leaning_tokens

pytestmark = pytest.mark.gpu
T, D = 700, 256
SHAPE = {"d": D, "n": 128, "E": 16, "K": 4}
CONFIGS = {
    "off": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="off")),
    "off with losses": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="off"), router=LOSSES),
    "nearest": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="nearest")),
    "nearest with losses": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="nearest"), router=LOSSES),
    "apportion": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="apportion", t=64)),
    "pad with expert bias": MoEConfig(
        **SHAPE, rounding=RoundingConfig(mode="pad"), router=RouterConfig(expert_bias=True)
    ),
    "capacity": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="nearest", capacity_factor=1.0)),
    "biases": MoEConfig(**SHAPE, bias=True, router=RouterConfig(linear_bias=True)),
    "shared expert": MoEConfig(**SHAPE, shared_n=64, shared_gate=True),
    "batch-invariant": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="off"), batch_invariant=True, shared_n=64),
    "received rows": MoEConfig(**SHAPE, save_dispatched=True),
    "sequences": MoEConfig(**SHAPE, router=RouterConfig(balance="sequence", balance_coef=0.01, z_loss_coef=0.01)),
    "global": MoEConfig(**SHAPE, router=RouterConfig(balance="global", balance_coef=0.01, expert_bias=True)),
}


def layers(config: MoEConfig, number: int = 1) -> tuple[list[MoE], list[MoE]]:
    """The same layers twice: as programs, and running their code."""

    def made(*, programs: bool) -> list[MoE]:
        config_of = replace(config, record_launches=programs)
        return [MoE(config_of, seed=seed, device="cuda", dtype=torch.bfloat16) for seed in range(number)]

    return made(programs=True), made(programs=False)


def inputs(step: int) -> Tensor:
    return leaning_tokens(step, T, D, "cuda", torch.bfloat16)


def run(layer: MoE, x: Tensor, *, losses: bool = True) -> list[Tensor]:
    """Outputs, statistics and all gradients of a step, in memory that was NaN before."""
    torch.full((50_000_000,), float("nan"), device="cuda")
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = layer(x.view(2, -1, D) if layer.config.router.balance == "sequence" else x)
    y = x + out.y.view_as(x)  # as models read x twice
    total = (y * y).sum() + (out.aux_loss if losses else 0)
    total.backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    assert x.grad is not None
    assert None not in grads
    return [out.y.detach(), out.aux_loss.detach(), out.stats.entropy_T, *out.stats.counts, x.grad, *grads]  # pyright: ignore[reportReturnType]


def traced_by_now(layer: MoE, x: Tensor) -> None:
    """Runs steps like x, so that the layer has programs for them."""
    for _ in range(2):
        run(layer, x)
    assert (layer.num_programs > 0) == layer.config.record_launches


def assert_same(one: Sequence[Tensor], two: Sequence[Tensor]) -> None:
    assert [torch.equal(a, b) for a, b in zip(one, two, strict=True)] == [True] * len(one)


@pytest.mark.parametrize("name", CONFIGS)
def test_programs_compute_what_the_code_does(name: str) -> None:
    (program,), (code,) = layers(CONFIGS[name])
    for step in range(4):
        assert_same(*(run(layer, inputs(step), losses=step != 2) for layer in (program, code)))
        for layer in (program, code):
            with torch.no_grad():
                for parameter in layer.parameters():
                    assert parameter.grad is not None
                    parameter -= 1e-5 * parameter.grad
            if layer.config.router.expert_bias:
                layer.update_expert_bias()
    assert program.num_programs == 1
    if code.router.expert_bias is not None:
        assert torch.equal(code.router.expert_bias, program.router.expert_bias)
        assert code.router.expert_bias.any()


def test_backward_in_any_order() -> None:
    orders: list[Callable[[list[Tensor]], object]] = [
        lambda losses: [loss.backward() for loss in losses],
        lambda losses: [loss.backward() for loss in reversed(losses)],
        lambda losses: torch.stack(losses).sum().backward(),
    ]
    for order in orders:
        results = []
        for stack in layers(CONFIGS["nearest"], 4):
            for layer in stack:
                traced_by_now(layer, inputs(1))
                layer.zero_grad()
            x = inputs(0).requires_grad_()
            outs = [layer(x).y for layer in stack]
            again = stack[0](x).y  # the same layer twice
            order([(out.float() * out.float()).sum() for out in (*outs, again)])
            results.append([x.grad, *[p.grad for layer in stack for p in layer.parameters()]])
        assert_same(*results)


def test_a_retained_graph_runs_backward_twice() -> None:
    results = []
    for (layer,) in layers(CONFIGS["nearest"]):
        traced_by_now(layer, inputs(0))
        layer.zero_grad()
        x = inputs(1).requires_grad_()
        loss = (layer(x).y ** 2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([x.grad, *[p.grad for p in layer.parameters()]])
    assert_same(*results)


def test_lengths_share_programs() -> None:
    (program,), (code,) = layers(CONFIGS["nearest"])
    lengths = (*range(1, T, 13), 512, 511, 1, T)
    for x in (*(inputs(length)[:length] for length in lengths), inputs(3).view(2, T // 2, D)):
        assert_same(run(program, x), run(code, x))
    known = program.num_programs
    assert 1 <= known <= 6
    for length in range(2, T, 17):
        run(program, inputs(length)[:length])
    assert program.num_programs == known
    program.experts.requires_grad_(False)
    code.experts.requires_grad_(False)
    for step in range(3):
        outs = [layer(inputs(step)) for layer in (program, code)]
        weights = program.router.weight, code.router.weight
        grads = [torch.autograd.grad((out.y**2).sum(), weight) for out, weight in zip(outs, weights, strict=True)]
        assert_same(*grads)
    assert program.num_programs == known + 1


@pytest.mark.parametrize("training", [True, False])
def test_without_gradients(training: bool) -> None:
    (program,), (code,) = layers(CONFIGS["nearest"])
    for layer in (program, code):
        layer.train(training)
    with torch.no_grad():
        for step in range(5):
            one, two = (layer(inputs(step)) for layer in (program, code))
            assert_same([one.y, *one.stats.counts], [two.y, *two.stats.counts])
    assert program.num_programs == 1


def test_a_copy_and_moved_weights() -> None:
    (program,), (code,) = layers(CONFIGS["off"])
    traced_by_now(program, inputs(0))
    copied = copy.deepcopy(program)
    assert copied.num_programs == 0
    traced_by_now(copied, inputs(0))
    assert_same(run(copied, inputs(1)), run(code, inputs(1)))
    for layer in (program, code):
        for parameter in layer.parameters():
            parameter.data = parameter.data.clone() * 0.5
    assert_same(run(program, inputs(2)), run(code, inputs(2)))
    assert program.num_programs == 1


def test_autocast() -> None:
    config = CONFIGS["nearest"]
    program, code = (
        MoE(replace(config, record_launches=programs), seed=0, device="cuda", dtype=torch.float32)
        for programs in (True, False)
    )
    for step in range(3):
        results = []
        for layer in (program, code):
            x = inputs(step).float().requires_grad_()
            with torch.autocast("cuda", torch.bfloat16):
                out = layer(x)
            results.append([out.y, *torch.autograd.grad(out.y.float().sum(), [x, *layer.parameters()])])
        assert_same(*results)


@pytest.mark.parametrize("contexts", [None, replay_contexts])
def test_activation_checkpointing(contexts: Any) -> None:
    more = {} if contexts is None else {"context_fn": contexts}
    (program,), (code,) = layers(CONFIGS["nearest"])
    run = Program.run_without_output
    with patch.object(Program, "run_without_output", autospec=True, side_effect=run) as recomputed:
        for step in range(3):
            results = []
            for layer in (program, code):
                x = inputs(step).requires_grad_()
                y = checkpoint(lambda x, layer=layer: layer(x).y * 2, x, use_reentrant=False, **more)
                results.append([y, *torch.autograd.grad((y**2).sum(), [x, *layer.parameters()])])
            assert_same(*results)
    assert program.num_programs == 1
    assert recomputed.call_count == 3


def test_a_program_needs_no_more_memory() -> None:
    config = MoEConfig(d=1024, n=512, E=16, K=4, rounding=RoundingConfig(mode="off"))
    peaks, saved = [], []
    for (layer,) in layers(config):
        x = leaning_tokens(0, 8192, 1024, "cuda", torch.bfloat16).requires_grad_()
        for _ in range(2):
            torch.autograd.grad(layer(x).y.sum(), [x, *layer.parameters()])
        assert layer.num_programs == layer.config.record_launches
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = layer(x).y
        saved.append(torch.cuda.memory_allocated() - before)
        torch.autograd.grad(y.sum(), [x, *layer.parameters()])
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del y
    assert saved[0] <= saved[1] + 2**20
    assert peaks[0] <= 1.03 * peaks[1]  # small tensors share memory, and so live longer


def test_hooks_of_submodules_run() -> None:
    (program,), _ = layers(CONFIGS["off"])
    traced_by_now(program, inputs(0))
    seen: list[Any] = []
    handle = program.router.register_forward_hook(lambda *_: seen.append(1))
    run(program, inputs(1))
    assert seen == [1]
    handle.remove()
    run(program, inputs(2))
    assert seen == [1]


@pytest.mark.parametrize("how", ["jitter", "hook", "check"])
def test_experts_run_as_programs_where_the_router_runs_its_code(how: str) -> None:
    router = {"jitter": RouterConfig(jitter=0.1), "check": RouterConfig(check_logits=True)}.get(how, RouterConfig())
    (program,), (code,) = layers(replace(CONFIGS["nearest"], router=router))
    for step in range(3):
        results = []
        for layer in (program, code):
            handle = layer.router.register_forward_hook(lambda *_: None) if how == "hook" else None
            torch.manual_seed(step)
            results.append(run(layer, inputs(step)))
            if handle is not None:
                handle.remove()
        assert_same(*results)
    assert program.num_programs == 1
