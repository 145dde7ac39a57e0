"""torch.cuda.make_graphed_callables without a GPU: what it promises and where it hurts, computed eagerly.

As with graphs, the inputs, outputs and gradients of a module have one place each; what comes out is these places, and
every forward or backward overwrites them. Gradients lie where a forward of any of the modules computes, and the
backward of one that comes later, because graphs are captured one after the other in the same memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_WARM_UP = 3


def make_replayed_callables(modules: tuple[nn.Module, ...], samples: tuple[tuple[Tensor], ...]) -> None:
    """In place of torch's function of nearly that name."""
    gradients: list[list[Tensor]] = [[] for _ in modules]
    for number, (module, (sample,)) in enumerate(zip(modules, samples, strict=True)):
        assert not any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks))
        for _ in range(_WARM_UP):
            module(sample)
        module.forward = _replaying(module, sample, module.forward, gradients, number)


def _replaying(
    module: nn.Module, sample: Tensor, forward: Callable[..., Any], of_modules: list[list[Tensor]], number: int
) -> Callable[..., Any]:
    surface = (sample, *module.parameters())
    weights = [parameter.data_ptr() for parameter in module.parameters()]
    places: list[Tensor] = []
    gradients = of_modules[number]
    live: list[Any] = []

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            assert weights == [parameter.data_ptr() for parameter in module.parameters()]
            _spoil(of_modules)
            with torch.no_grad():
                sample.copy_(inputs[0])
            with torch.enable_grad():
                outputs, spec = tree_flatten(forward(sample))
            live[:] = outputs, spec
            _put(outputs, places)
            return tuple(place.detach() for place in places)

        @staticmethod
        def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
            _spoil(of_modules[:number])
            pairs = [(out, grad) for out, grad in zip(live[0], incoming, strict=True) if out.requires_grad]
            wanted = [value for value in surface if value.requires_grad]
            outputs, grads = zip(*pairs, strict=True)
            _put(torch.autograd.grad(outputs, wanted, grads, retain_graph=True), gradients)
            each = iter(gradients)
            return tuple(next(each).detach() if value.requires_grad else None for value in surface)

    def replay(x: Tensor, **others: Tensor) -> Any:
        if not module.training:
            return forward(x, **others)
        assert not others
        outputs = Replay.apply(x, *surface[1:])
        return tree_unflatten(outputs, live[1])

    return replay


def _put(values: Any, places: list[Tensor]) -> None:
    """Here, unlike in a graph, lists are as long as their step needs."""
    places.extend(torch.empty_like(value).detach() for value in values[len(places) :])
    for number, value in enumerate(values):
        if places[number].shape != value.shape:
            places[number] = torch.empty_like(value).detach()
        places[number].copy_(value.detach())


def _spoil(gradients: list[list[Tensor]]) -> None:
    for gradient in (gradient for of_module in gradients for gradient in of_module):
        gradient.fill_(torch.nan)
