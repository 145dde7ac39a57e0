"""Layers on several ranks whose steps are programs compute, bit for bit, what their code computes: whatever the sizes
of a step are, and whichever ranks run the code instead."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig, TransportConfig, replay_contexts
from sonic_ep.dispatch import symmetric
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.routers.router import Router
from sonic_ep.transports import GroupTransport
from tests.helpers.changing_routing import LOSSES, leaning_tokens
from tests.helpers.launch import RankPool

pytestmark = pytest.mark.gpu
T, D = 700, 256
SHAPE = {"d": D, "n": 128, "E": 16, "K": 4}
ROUNDED = RoundingConfig(mode="apportion", t=64)
CONFIGS = {
    "off": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="off")),
    "nearest": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="nearest")),
    "apportion": MoEConfig(**SHAPE, rounding=ROUNDED, save_dispatched=True),
    "push": MoEConfig(**SHAPE, rounding=ROUNDED, transport=TransportConfig(dispatch="push")),
    "losses": MoEConfig(**SHAPE, rounding=ROUNDED, router=LOSSES),
    "global": MoEConfig(
        **SHAPE, rounding=ROUNDED, router=RouterConfig(balance="global", balance_coef=0.01, expert_bias=True)
    ),
    "biases": MoEConfig(**SHAPE, rounding=ROUNDED, bias=True, router=RouterConfig(linear_bias=True)),
    "all-to-all": MoEConfig(**SHAPE, rounding=ROUNDED, transport=TransportConfig(kind="all_to_all")),
    "two hops": MoEConfig(
        **SHAPE,
        rounding=RoundingConfig(mode="off"),
        save_dispatched=True,
        transport=TransportConfig(kind="two_hop", ranks_per_host=1),
    ),
    "batch-invariant": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="off"), batch_invariant=True),
    "shared": MoEConfig(**SHAPE, rounding=RoundingConfig(mode="off"), shared_n=128),
    "small": MoEConfig(  # outputs of the experts' first GEMM in memory with small addresses
        **SHAPE, rounding=replace(ROUNDED, capacity_factor=1.25), transport=TransportConfig(buffers="static")
    ),
    "static": MoEConfig(
        **SHAPE, rounding=replace(ROUNDED, capacity_factor=1.5), transport=TransportConfig(buffers="static")
    ),
}
Gpus = Callable[[int], RankPool]
Layers = tuple[MoE, MoE]


def layers(config: MoEConfig) -> Layers:
    """The same layer twice: as programs, and running its code."""
    program, code = (
        MoE(replace(config, record_launches=programs), EPGroup(), seed=0, device="cuda", dtype=torch.bfloat16)
        for programs in (True, False)
    )
    return program, code


def inputs(step: int, *, lean: float = 0.0) -> Tensor:
    """Tokens of this rank. lean: how much all ranks' tokens have in common, so that few experts get most of them."""
    x = leaning_tokens(2 * step + torch.distributed.get_rank(), T, D, "cuda", torch.bfloat16)
    common = torch.randn(D, device="cuda", generator=torch.Generator("cuda").manual_seed(7))
    return (x + lean * common).bfloat16()


def run(layer: MoE, x: Tensor) -> list[Tensor]:
    """Outputs, statistics and all gradients of a step, in memory that was NaN before."""
    torch.full((50_000_000,), float("nan"), device="cuda")
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    ((out.y * out.y).sum() + out.aux_loss).backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    return [out.y.detach(), out.aux_loss.detach(), out.stats.entropy_T, *out.stats.counts, x.grad, *grads]  # pyright: ignore[reportReturnType]


def assert_same(one: Sequence[Tensor], two: Sequence[Tensor]) -> None:
    different = [i for i, (a, b) in enumerate(zip(one, two, strict=True)) if not torch.equal(a, b)]
    assert not different, f"numbers {different}"
    assert all(a.isfinite().all() for a in one)


def assert_steps_are_the_same(both: Layers, steps: Sequence[tuple[int, float]]) -> None:
    for step, lean in steps:
        assert_same(*(run(layer, inputs(step, lean=lean)) for layer in both))


def changing_steps(rank: int, name: str) -> int:
    program, code = layers(CONFIGS[name])
    for step, lean in enumerate([0, 0, 0, 3, 0, 3, 3, 0]):
        assert_same(*(run(layer, inputs(step, lean=lean)) for layer in (program, code)))
        for layer in (program, code):
            with torch.no_grad():
                for parameter in layer.parameters():
                    assert parameter.grad is not None
                    parameter -= 1e-3 * parameter.grad.sign()
            if layer.config.router.expert_bias:
                layer.update_expert_bias()
    if code.router.expert_bias is not None:
        assert program.router.expert_bias is not None
        assert torch.equal(code.router.expert_bias, program.router.expert_bias)
    return program.num_programs


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_of_changing_sizes(gpus: Gpus, name: str) -> None:
    program = gpus(2).run(changing_steps, name)
    assert program == [program[0]] * 2
    assert program[0] >= 1


def calls_of_router(rank: int, name: str) -> int:
    program, called = layers(CONFIGS[name])[0], list[int]()
    forward = Router.forward

    def noted(self: Router, *arguments: Any, **options: Any) -> Any:
        called.append(1)
        return forward(self, *arguments, **options)

    with patch.object(Router, "forward", noted):
        for step in range(4):
            run(program, inputs(0 if name == "nearest" else step))  # whose bound holds for these rows alone
    return len(called)


@pytest.mark.parametrize("name", ["nearest", "all-to-all", "two hops"])
def test_the_code_of_the_router_runs_in_the_first_step_alone(gpus: Gpus, name: str) -> None:
    assert gpus(2).run(calls_of_router, name) == [1, 1]


def steps_by_copy_engines(rank: int, name: str) -> None:
    with patch.object(symmetric, "_MIN_COPY_BYTES", 0):
        changing_steps(rank, name)


@pytest.mark.parametrize("name", ["nearest", "apportion", "static"])
def test_sums_that_copy_engines_send(gpus: Gpus, name: str) -> None:
    gpus(2).run(steps_by_copy_engines, name)


def a_rank_with_hooks(rank: int, hooked: int) -> None:
    both = layers(CONFIGS["nearest"])
    assert_steps_are_the_same(both, [(0, 0), (1, 0), (2, 0)])
    assert both[0].num_programs
    handle = both[0].router.register_forward_hook(lambda *_: None) if rank == hooked else None
    assert_steps_are_the_same(both, [(3, 0), (4, 3), (5, 0), (6, 3), (7, 3)])  # it runs the code, the others may not
    if handle is not None:
        handle.remove()
    assert_steps_are_the_same(both, [(8, 0), (9, 3), (10, 3)])


@pytest.mark.parametrize("hooked", [0, 1])
def test_ranks_may_differ_in_what_runs_as_programs(gpus: Gpus, hooked: int) -> None:
    gpus(2).run(a_rank_with_hooks, hooked)


def other_lengths(rank: int) -> None:
    both = layers(CONFIGS["nearest"])
    for step, lengths in enumerate([(T, T), (T, T), (T, T), (T, 600), (600, T), (650, 20), (T, T), (0, T), (T, T)]):
        assert_same(*(run(layer, inputs(step)[: lengths[rank]]) for layer in both))
    assert both[0].num_programs


def test_lengths_may_change_on_each_rank(gpus: Gpus) -> None:
    gpus(2).run(other_lengths)


def errors_and_after(rank: int) -> None:
    both = layers(CONFIGS["nearest"])
    assert_steps_are_the_same(both, [(0, 0), (1, 0), (2, 0)])
    for layer in both:
        before = layer.router._counts_since_update_E.clone()
        with pytest.raises(ValueError, match="rank 1"):
            layer(inputs(3)[:, : D - 8 * rank])
        assert torch.equal(layer.router._counts_since_update_E, before)
    assert_steps_are_the_same(both, [(4, 0), (5, 3), (6, 3)])


def test_an_error_of_one_rank_is_raised_on_all_and_the_next_step_is_right(gpus: Gpus) -> None:
    gpus(2).run(errors_and_after)


def other_modes(rank: int) -> None:
    both = layers(CONFIGS["nearest"])
    for step in range(6):
        with torch.no_grad():
            one, two = (layer(inputs(step)) for layer in both)
            assert_same([one.y, *one.stats.counts], [two.y, *two.stats.counts])
        assert_steps_are_the_same(both, [(step, 0)])
    assert both[0].num_programs >= 2
    for layer in both:
        layer.eval()
    assert_steps_are_the_same(both, [(step, 0) for step in range(4)])


def test_with_and_without_gradients_in_turns(gpus: Gpus) -> None:
    gpus(2).run(other_modes)


def under_checkpoint(rank: int, reentrant: bool, more: dict[str, Any], name: str, of_code: int | None = None) -> None:
    """of_code: the rank whose router runs its code."""
    both = layers(CONFIGS[name])
    if rank == of_code:
        both[0].router.register_forward_hook(lambda *_: None)
    for step, lean in enumerate([0, 0, 3, 0, 3, 0]):
        results = []
        for layer in both:
            layer.zero_grad()
            fewer = 0 if name == "static" else 50
            xs = [inputs(2 * step + part, lean=lean)[: T - fewer * part].requires_grad_() for part in range(2)]
            ys: Any = [
                checkpoint(lambda x, layer=layer: layer(x).y * 2, x, use_reentrant=reentrant, **more) for x in xs
            ]
            torch.stack([(y**2).sum() for y in ys]).sum().backward()
            results.append([*ys, *[x.grad for x in xs], *[p.grad for p in layer.parameters()]])
        assert_same(*results)
    assert both[0].num_programs >= 1 or name == "static"
    assert both[1].num_programs == 0


@pytest.mark.parametrize("name", ["nearest", "off", "apportion", "static", "biases", "all-to-all", "two hops"])
@pytest.mark.parametrize(
    ("reentrant", "more"),
    [(False, {}), (True, {}), (False, {"context_fn": replay_contexts})],
    ids=["", "reentrant", "replay"],
)
def test_activation_checkpointing(gpus: Gpus, name: str, reentrant: bool, more: dict[str, Any]) -> None:
    gpus(2).run(under_checkpoint, reentrant, more, name)


@pytest.mark.parametrize("of_code", [0, 1])
@pytest.mark.parametrize("more", [{}, {"context_fn": replay_contexts}], ids=["", "replay"])
def test_one_rank_runs_code_in_regions(gpus: Gpus, more: dict[str, Any], of_code: int) -> None:
    gpus(2).run(under_checkpoint, False, more, "nearest", of_code)


def one_rank_looks_at_its_output(rank: int, looks: bool) -> str:
    """Returns what is raised where rank 0 alone computes something of an output: with a gradient if it `looks`."""
    layer, message = layers(CONFIGS["nearest"])[0], ""

    def block(x: Tensor) -> Tensor:
        y = layer(x).y
        if rank == 0:
            (y if looks else y.detach()).norm()
        return y

    for step in range(6):
        x = inputs(step).requires_grad_()
        try:
            checkpoint(block, x, use_reentrant=False).square().sum().backward()
        except ValueError as error:
            message = str(error)
            break
    gc.collect()  # as in one_rank_under_checkpoint: the error may have come in a forward
    assert layer.num_programs >= 1
    return message


@pytest.mark.parametrize("looks", [False, True])
def test_ranks_leave_out_outputs_together(gpus: Gpus, looks: bool) -> None:
    for message in gpus(2).run(one_rank_looks_at_its_output, looks):
        assert ("disagree what a checkpointed block does behind its MoE layers" in message) == looks
        assert looks or not message


def one_rank_under_checkpoint(rank: int) -> str:
    layer, _ = layers(CONFIGS["nearest"])
    for step in range(2):
        run(layer, inputs(step))
    x, message = inputs(2).requires_grad_(), ""
    try:
        checkpoint(lambda x: layer(x).y, x, use_reentrant=False) if rank else layer(x).y
    except ValueError as error:
        message = str(error)
    gc.collect()  # torch ends the hooks of a checkpoint that has raised when its generator is collected
    run(layer, inputs(3))
    return message


def test_ranks_checkpoint_alike(gpus: Gpus) -> None:
    one, two = gpus(2).run(one_rank_under_checkpoint)
    assert one == two
    assert "disagree whether activations are checkpointed" in one
    assert "nothing more on rank 0, a forward of layer " in one


def orders_of_backward(rank: int) -> None:
    orders: list[Callable[[list[Tensor]], object]] = [
        lambda losses: [loss.backward() for loss in losses],
        lambda losses: [loss.backward() for loss in reversed(losses)],
    ]
    stacks = [layers(CONFIGS["apportion"]) for _ in range(3)]
    for both in stacks:
        assert_steps_are_the_same(both, [(0, 0), (1, 0)])
        assert both[0].num_programs
    for order in orders:
        results = []
        for stack in zip(*stacks, strict=True):
            x = inputs(2).requires_grad_()
            for layer in stack:
                layer.zero_grad()
            order([(layer(x).y ** 2).sum() for layer in (*stack, stack[0])])  # the last runs twice
            results.append([x.grad, *[p.grad for layer in stack for p in layer.parameters()]])
        assert_same(*results)


def test_backward_in_any_order(gpus: Gpus) -> None:
    gpus(2).run(orders_of_backward)


def grown_between_passes(rank: int) -> None:
    both, larger = layers(CONFIGS["nearest"]), layers(CONFIGS["nearest"])[0]
    assert_steps_are_the_same(both, [(0, 0), (1, 0)])
    results = []
    for layer in both:
        layer.zero_grad()
        x = inputs(2).requires_grad_()
        y = layer(x).y
        longer = torch.cat([inputs(3, lean=3.0)] * (2 + len(results)))
        assert isinstance(larger.transport, GroupTransport)
        assert isinstance(larger.transport.on(x), SymmetricTransport)
        larger(longer)  # other buffers take the place of those that forward has used
        (y * y).sum().backward()
        results.append([y, x.grad, *[p.grad for p in layer.parameters()]])
    assert_same(*results)
    assert_steps_are_the_same(both, [(4, 0), (5, 3)])


def test_buffers_may_grow_between_forward_and_backward(gpus: Gpus) -> None:
    gpus(2).run(grown_between_passes)
