"""Which calls of a layer run as programs; the programs are stubs here, and x says that it is on a GPU."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from sonic_ep import MoE, MoEConfig, RoundingConfig, RouterConfig, checks
from sonic_ep.routing import GroupCounts
from sonic_ep.steps import program_steps
from sonic_ep.steps.layer_step import StepCall
from sonic_ep.steps.program_steps import ProgramSteps
from sonic_ep.steps.router_trace import Kind

D, T = 32, 6
CONFIG = MoEConfig(d=D, n=16, E=4, K=2, rounding=RoundingConfig(mode="off"))


class OnGPU(Tensor):
    """Takes the place of Tensor where ProgramSteps looks at x."""

    is_cuda = True

    def get_device(self) -> int:
        return 0


class Stub:
    """In place of StepPrograms: has programs for every step."""

    def __init__(self, traced: object) -> None:
        self.steps: list[tuple[Kind, tuple[int, ...]]] = []

    @property
    def num_programs(self) -> int:
        return len(self.steps)

    def find(self, kind: Kind, sizes: tuple[int, ...]) -> "Stub":
        return self

    def run(
        self, kind: Kind, sizes: tuple[int, ...], call: StepCall, x_TH: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        assert x_TH.shape == (sizes[0], D)
        self.steps.append((kind, sizes))
        return 2 * x_TH, x_TH.new_zeros(()), [x_TH.new_zeros(())] * (2 + len(GroupCounts._fields))


@pytest.fixture
def layer() -> Iterator[MoE]:
    """A layer with such steps."""
    with (
        patch.object(program_steps, "Tensor", OnGPU),
        patch.object(program_steps, "StepPrograms", Stub),
        patch.object(program_steps, "run", Stub.run),
        patch.object(program_steps, "kernels_compute", lambda *_: True),
        patch.object(checks, "_problem_with_device", lambda _: None),
        patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        yield MoE(CONFIG)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(*shape, dtype=dtype).as_subclass(OnGPU)


def ran(layer: MoE, x: Any) -> bool:
    return layer._programs.outputs(layer, x) is not None


def steps_of(layer: MoE) -> list[tuple[Kind, tuple[int, ...]]]:
    stub: Any = layer._programs._programs
    return stub.steps


@pytest.mark.parametrize(
    ("router", "rounding", "runs"),
    [
        ({}, "nearest", (True, True)),
        ({"check_logits": True}, "nearest", (False, False)),
        ({"jitter": 0.1}, "nearest", (False, True)),
        ({}, "stochastic", (False, True)),
    ],
)
def test_layers_that_read_or_draw_numbers_run_their_code(
    layer: MoE, router: dict[str, Any], rounding: Any, runs: tuple[bool, bool]
) -> None:
    layer.config = replace(CONFIG, router=RouterConfig(**router), rounding=RoundingConfig(mode=rounding))
    assert (ran(layer, rows(T, D)), ran(layer.eval(), rows(T, D))) == runs


def test_another_config_has_other_programs(layer: MoE) -> None:
    assert ran(layer, rows(T, D))
    assert layer._programs.num_programs == 1
    layer.config = replace(CONFIG, rounding=RoundingConfig(mode="nearest"))
    assert ran(layer, rows(T, D))
    assert layer._programs.num_programs == 1
    ((kind, _),) = steps_of(layer)
    assert kind.config is layer.config


def test_on_the_cpu_the_code_runs() -> None:
    layer, x = MoE(CONFIG), torch.randn(T, D, requires_grad=True)
    assert layer._programs.outputs(layer, x) is None
    layer(x).y.sum().backward()
    assert x.grad is not None
    assert layer.num_programs == 0


def test_what_a_program_returns_has_the_shape_of_x(layer: MoE) -> None:
    for shape, sizes in (((T, D), (T, T)), ((2, 3, D), (6, 3))):
        x = rows(*shape)
        outputs = layer._programs.outputs(layer, x)
        assert outputs is not None
        assert len(outputs) == 4 + len(GroupCounts._fields)
        assert torch.equal(outputs[0], 2 * x)
        assert outputs[0].shape == x.shape
        assert steps_of(layer)[-1][1] == sizes


def test_the_kind_of_a_step(layer: MoE) -> None:
    """By what the call is: mode, gradients, autocast, and the same object again for the same call."""
    layer.router.weight.requires_grad_(False)
    x = rows(T, D)
    for _ in range(2):
        ran(layer, x)
    ran(layer, x.detach().requires_grad_())
    with torch.no_grad():
        ran(layer, x)
    layer.eval()
    ran(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        ran(layer, x)
    kinds = [kind for kind, _ in steps_of(layer)]
    assert kinds[0] is kinds[1]
    assert [each.needs for each in kinds[1:4]] == [(False, False, True, True), (True, False, True, True), (False,) * 4]
    assert [each.training for each in kinds] == [True] * 4 + [False] * 2
    assert [each.dtype for each in kinds] == [torch.float32] * 5 + [torch.bfloat16]


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def _hook(register: Callable[..., Any]) -> Iterator[None]:
    handle = register(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def _in_eval(module: nn.Module) -> Iterator[None]:
    module.eval()
    yield
    module.train()


@contextmanager
def _within(module: nn.Module) -> Iterator[None]:
    module.adapter = nn.Identity()
    yield
    del module.adapter


WATCHED: dict[str, Callable[[MoE], AbstractContextManager[object]]] = {
    "forward hook": lambda layer: _hook(layer.experts.register_forward_hook),
    "forward pre-hook": lambda layer: _hook(layer.router.register_forward_pre_hook),
    "backward hook": lambda layer: _hook(layer.experts.register_full_backward_hook),
    "backward pre-hook": lambda layer: _hook(layer.router.register_full_backward_pre_hook),
    "global hook": lambda layer: _hook(register_module_forward_hook),
    "evaluation of a part": lambda layer: _in_eval(layer.router),
    "module in a part": lambda layer: _within(layer.experts),
    "replaced forward": lambda layer: patch.object(layer.experts, "forward", layer.experts.forward),
    "inference mode": lambda layer: torch.inference_mode(),
    "dispatch mode": lambda layer: _Watch(),
    "another device": lambda layer: patch.object(torch.cuda, "current_device", lambda: 1),
    "no kernels": lambda layer: patch.object(program_steps, "kernels_compute", lambda *_: False),
}


@pytest.mark.parametrize("how", WATCHED)
def test_the_code_runs_where_something_watches_it(layer: MoE, how: str) -> None:
    x = rows(T, D)
    with WATCHED[how](layer):
        assert not ran(layer, x)
    assert ran(layer, x)  # from now on the step is known
    if how != "no kernels":  # which do not change
        with WATCHED[how](layer):
            assert not ran(layer, x)
    assert ran(layer, x)


class _Other(OnGPU):
    pass


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(T, D),
        torch.zeros(T, D).as_subclass(_Other),
        rows(0, D),
        rows(D),
        rows(1, 2, 3, D),
        rows(T, D + 1),
        rows(T, D, dtype=torch.float64),
    ],
    ids=["on the CPU", "another type", "empty", "1 dim", "4 dims", "another width", "another dtype"],
)
def test_the_code_gets_any_other_x(layer: MoE, x: Any) -> None:
    assert not ran(layer, x)


def test_the_code_gets_more_tokens_than_programs_take(layer: MoE) -> None:
    with patch.object(program_steps, "MAX_TOKENS", T - 1):
        assert not ran(layer, rows(T, D))
        assert ran(layer, rows(T - 1, D))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_starts_without_programs(layer: MoE, how: Callable[[MoE], MoE]) -> None:
    assert ran(layer, rows(T, D))
    other = how(layer)
    assert (layer._programs.num_programs, other._programs.num_programs) == (1, 0)
    assert type(other._programs) is ProgramSteps
    assert ran(other, rows(T, D))
    assert (layer._programs.num_programs, other._programs.num_programs) == (1, 1)
