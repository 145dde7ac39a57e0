"""`RecordedLayer`: the recorded calls of a layer. Their inputs are x and the layer's parameters."""

from functools import partial
from typing import Any, Self, final

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import _has_any_global_hook

from sonic_ep.kernels.launch_sequence.recorded_calls import Code, RecordedCalls, Steps, problem_with_x


class _Parts:
    """The submodules and parameters of a layer, found once: nn.Module needs longer for it than a pass for launching."""

    def __init__(self, layer: nn.Module) -> None:
        modules = dict(layer.named_modules())
        self._submodules = [module for module in modules.values() if module is not layer]  # no cycle through the layer
        self._members = [_members(module) for module in (layer, *self._submodules)]
        self._places = [
            (module._parameters, name)
            for module in modules.values()
            for name, p in module._parameters.items()
            if p is not None
        ]

    def are_current(self, layer: nn.Module) -> bool:
        """Returns True unless a submodule, a parameter, a config or a forward was replaced, added or removed."""
        return [_members(module) for module in (layer, *self._submodules)] == self._members

    def problem(self) -> str | None:
        """Returns why only the code of the submodules does what the user has asked for."""
        if _has_any_global_hook():
            return "there are global module hooks"
        for m in self._submodules:
            if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
                return "a submodule has hooks"
            if "forward" in vars(m) or "parametrizations" in m._modules:
                return "the forward or a parameter of a submodule is replaced"
        return None

    def modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._submodules)

    def parameters(self) -> list[Tensor]:
        return [parameters[name] for parameters, name in self._places]  # pyright: ignore[reportReturnType]


def _members(module: nn.Module) -> tuple[object, ...]:
    """Returns what is compared to see that a module is as it was. Configs by id: those of two types may be equal."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    return type(module), id(vars(module).get("config")), "forward" in vars(module), names, dict(module._modules)


@final
class RecordedLayer:
    """The recordings of one layer, by input signature. A copy of it, as of its layer, starts without any.

    code: its `compute` takes the layer and [x], and reads the layer's parameters.
    """

    def __init__(self, code: Code, steps: Steps) -> None:
        self._code, self._steps = code, steps
        self._calls = RecordedCalls(code._replace(compute=partial(_compute_with, code)), steps)
        self._parts: _Parts | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[Code, Steps]]:
        return type(self), (self._code, self._steps)

    @property
    def num_recorded(self) -> int:
        """The number of signatures with a recording."""
        return self._calls.num_recorded

    def outputs(self, layer: nn.Module, x: Tensor) -> list[Tensor] | None:
        """Returns the outputs of the layer's code, or None: see `RecordedCalls.outputs`."""
        problem = self._problem_with_parts(layer)
        assert self._parts is not None
        problem = problem or problem_with_x(x)
        if problem is not None:
            return self._calls.outputs(layer, [], 0, problem)
        inputs, modes = [x, *self._parts.parameters()], self._parts.modes()
        return self._calls.outputs(layer, inputs, x.shape[:-1].numel(), None, settings=modes)

    def observe(self, split_sizes: Any) -> None:
        """Is called after the layer's code has run because `outputs` returned None. split_sizes: of its routing."""
        self._calls.observe(split_sizes)

    def _problem_with_parts(self, layer: nn.Module) -> str | None:
        if self._parts is None or not self._parts.are_current(layer):
            self._parts = _Parts(layer)
            self._calls.forget()
        return self._parts.problem()


def _compute_with(code: Code, layer: nn.Module, tensors: list[Tensor]) -> list[Tensor]:
    """Computes with the last tensors in place of the layer's parameters."""
    names = [f"layer.{name}" for name, _ in layer.named_parameters(remove_duplicate=False)]
    return functional_call(_Body(layer, code), dict(zip(names, tensors[1:], strict=True)), (tensors[0],))


class _Body(nn.Module):
    """The code of a layer without the layer's own hooks."""

    def __init__(self, layer: nn.Module, code: Code) -> None:
        super().__init__()
        self.layer, self._code = layer, code

    def forward(self, x: Tensor) -> list[Tensor]:
        return self._code.compute(self.layer, [x])
