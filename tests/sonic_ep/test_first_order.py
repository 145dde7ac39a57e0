"""Second derivatives of a layer raise, whoever asks for them, and first ones are as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sonic_ep import MoE, MoEConfig
from sonic_ep.first_order import first_order

MESSAGE = "an MoE layer has no second derivatives"


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor)
        return x**3 * factor

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, factor = ctx.saved_tensors
        return 3 * x**2 * factor * grad_outputs[0], None


def test_gradients_are_those_of_the_function() -> None:
    x, factor = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(2.0)
    for create_graph in (False, True):
        (dx,) = torch.autograd.grad(Cube.apply(x, factor).sum(), x, create_graph=create_graph)
        assert dx.tolist() == [6.0, 24.0]
        assert dx.requires_grad == create_graph


@pytest.mark.parametrize("ask", ["grad of the input", "grad of all", "backward"])
def test_second_derivatives_raise(ask: str) -> None:
    x, factor = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)
    (dx,) = torch.autograd.grad(Cube.apply(x, factor).sum(), x, create_graph=True)
    asked: dict[str, Callable[[], object]] = {
        "grad of the input": lambda: torch.autograd.grad(dx.sum(), x),
        "grad of all": lambda: torch.autograd.grad(dx.sum(), [x, factor], allow_unused=True),
        "backward": lambda: dx.sum().backward(),
    }
    with pytest.raises(RuntimeError, match=MESSAGE):
        asked[ask]()


def test_second_derivatives_of_a_layer_raise() -> None:
    """torch's once_differentiable would return those of the router alone."""
    layer, x = MoE(MoEConfig(d=16, n=8, E=4, K=2), seed=0), torch.randn(10, 16, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).y.square().sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(layer(x).y.square().sum(), x)
    assert torch.equal(dx, plain)
    for asked in (x, layer.experts.w1, layer.router.weight):
        with pytest.raises(RuntimeError, match=MESSAGE):
            torch.autograd.grad(dx.sum(), asked, retain_graph=True)
