"""A layer follows what changes between its steps: settings, modes, hooks, alignments, lengths.

It is compared, bit for bit, with a copy that is made after the change and so knows nothing of the steps before.
"""

import copy
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonic_ep import MoE, MoEConfig, RoundingConfig, RouterConfig
from tests.helpers.changing_routing import leaning_tokens

T, D = 700, 256
CONFIG = MoEConfig(d=D, n=128, E=16, K=4, rounding=RoundingConfig(mode="nearest"))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Change = Callable[[MoE], Any]


def layer_on(device: str, config: MoEConfig = CONFIG) -> MoE:
    """A layer that has run three steps of one length, and so may have prepared what it runs."""
    layer = MoE(config, seed=0, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    for step in range(3):
        run(layer, tokens(layer, step))
    return layer


def tokens(layer: MoE, step: int, number: int = T) -> Tensor:
    w1 = layer.experts.w1
    return leaning_tokens(step, number, D, w1.device.type, w1.dtype)


def run(layer: MoE, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    ((out.y.float() ** 2).sum() + out.aux_loss).backward()
    grads = [parameter.grad for parameter in (x, *layer.parameters()) if parameter.grad is not None]
    return [out.y.detach(), out.aux_loss.detach(), *grads]


def assert_follows(layer: MoE, steps: int = 3) -> None:
    """The layer computes what a copy without a past computes."""
    fresh = copy.deepcopy(layer)
    for step in range(steps):
        x = tokens(layer, 10 + step)
        results = zip(run(layer, x), run(fresh, x), strict=True)
        assert [torch.equal(one, two) for one, two in results].count(False) == 0


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def set_config(layer: MoE, config: MoEConfig) -> None:
    layer.config = layer.router.config = config


CHANGES: dict[str, tuple[MoEConfig, Change]] = {
    "router in eval mode": (CONFIG, lambda layer: layer.router.eval()),
    "coefficient of a loss": (
        replace(CONFIG, router=RouterConfig(balance="batch", balance_coef=0.01)),
        lambda layer: set_config(layer, replace(CONFIG, router=RouterConfig(balance="batch", balance_coef=1.0))),
    ),
    "rounding": (CONFIG, lambda layer: set_config(layer, replace(CONFIG, rounding=RoundingConfig(mode="off")))),
    "bias of the router removed": (
        replace(CONFIG, router=RouterConfig(linear_bias=True)),
        lambda layer: setattr(layer.router, "bias", None),
    ),
    "experts frozen": (CONFIG, lambda layer: layer.experts.requires_grad_(False)),
    "parametrized weight": (
        CONFIG,
        lambda layer: nn.utils.parametrize.register_parametrization(layer.router, "weight", Half()),
    ),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_steps(name: str, device: str) -> None:
    config, change = CHANGES[name]
    layer = layer_on(device, config)
    before = run(layer, tokens(layer, 10))
    change(layer)
    after = run(layer, tokens(layer, 10))
    same = len(before) == len(after) and all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert not same  # else a layer that ignores the change would pass, too
    assert_follows(layer)


@contextmanager
def gemms_in_tf32() -> Generator[None]:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@pytest.mark.gpu
def test_settings_of_gemms() -> None:
    layer = layer_on("cuda", replace(CONFIG, shared_n=64))
    with gemms_in_tf32():  # with it, torch.get_float32_matmul_precision raises
        assert_follows(layer)


@pytest.mark.parametrize("device", DEVICES)
def test_hooks_and_forwards_of_submodules_are_called(device: str) -> None:
    layer, called = layer_on(device), []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.append(name)

    handles = [
        nn.modules.module.register_module_forward_hook(note("global")),
        layer.router.register_forward_hook(note("forward")),
    ]
    try:
        run(layer, tokens(layer, 1))
        assert {"global", "forward"} <= set(called)
    finally:
        for handle in handles:
            handle.remove()
    called.clear()
    forward = layer.router.forward

    def replaced(*arguments: Any, **options: Any) -> Any:
        called.append("replaced")
        return forward(*arguments, **options)

    layer.router.forward = replaced  # type: ignore[method-assign]
    for step in range(3):
        run(layer, tokens(layer, step))
    assert called == ["replaced"] * 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [8, 4, 1])
def test_gradients_and_rows_at_any_address(offset: int, device: str) -> None:
    layer = layer_on(device)
    fresh, results = copy.deepcopy(layer), []
    for each in (layer, fresh):
        each.zero_grad()
        memory = torch.empty(T * D + offset, device=device, dtype=each.experts.w1.dtype)
        x = memory[offset:].view(T, D).copy_(tokens(each, 3)).requires_grad_()
        first = torch.ones(offset, device=device, dtype=x.dtype, requires_grad=True)
        flat = torch.cat([first, each(x).y.flatten()])  # the gradient of y starts behind that of `first`
        (flat * torch.linspace(-1, 1, flat.numel(), device=device).to(x.dtype)).sum().backward()
        results.append([parameter.grad for parameter in each.parameters()])
    assert [torch.equal(one, two) for one, two in zip(*results, strict=True)].count(False) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [8, 1])
def test_saved_tensors_that_come_back_at_another_address(offset: int, device: str) -> None:
    layer = layer_on(device)

    def moved(tensor: Tensor) -> Tensor:
        """Returns a copy in memory that starts `offset` elements behind an aligned address."""
        memory = torch.empty(tensor.numel() + offset, device=tensor.device, dtype=tensor.dtype)
        return memory[offset:].view(tensor.shape).copy_(tensor)

    expected = run(layer, tokens(layer, 5))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, moved):
        found = run(layer, tokens(layer, 5))
    assert [torch.equal(one, two) for one, two in zip(expected, found, strict=True)].count(False) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_any_length(device: str) -> None:
    layer, drawn = layer_on(device), random.Random(0)
    fresh = copy.deepcopy(layer)
    for step in range(6 if device == "cpu" else 60):
        x = tokens(layer, step, 8 * drawn.randint(1, T // 8))
        results = zip(run(layer, x), run(fresh, x), strict=True)
        assert [torch.equal(one, two) for one, two in results].count(False) == 0
