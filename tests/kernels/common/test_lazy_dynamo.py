"""Eager programs import nothing of Dynamo: its import takes seconds. torch's optimizers import it, layers need not."""

import inspect
import os
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from sonic_ep.kernels.common import lazy_dynamo as lazy
from sonic_ep.kernels.common.lazy_dynamo import lazy_dynamo
from tests.helpers.machine_code import needs_compilers
from tests.test_house import gpu_modules, name_of

SLOW_TO_IMPORT = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.fsdp", "torch.distributed.tensor")
ROOT = Path(__file__).parents[3]

STEP = """
import torch
from sonic_ep import MoE, MoEConfig, RoundingConfig, RouterConfig
config = MoEConfig(d=32, n=16, E=8, K=2, shared_n=16, router=RouterConfig(balance="global", balance_coef=0.01))
for mode in ("nearest", "off"):
    moe = MoE(config.replace(rounding=RoundingConfig(mode=mode)), seed=0)
    x = torch.randn(64, 32, requires_grad=True)
    with torch.autocast("cpu"):
        out, loss, _ = moe(x)
    (out.sum() + loss).backward()
    moe.eval()(x)
"""


def slow_imports_of(program: str, *modules: str) -> str:
    """Returns what a new process has imported of SLOW_TO_IMPORT after it ran the program and imported the modules."""
    lines = [
        program,
        "import sys, torch",
        "from importlib import import_module",
        f"before = torch.compile, torch.compiler.disable; [*map(import_module, {modules!r})]",
        "assert before == (torch.compile, torch.compiler.disable)",
        f"print([name for name in {SLOW_TO_IMPORT!r} if name in sys.modules])",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", "\n".join(lines)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    return run.stdout.strip() or run.stderr


def test_torch_itself_imports_none() -> None:
    assert slow_imports_of("") == "[]"


def test_a_step_on_the_cpu_imports_none() -> None:
    assert slow_imports_of(STEP) == "[]"


@needs_compilers
def test_modules_of_the_gpu_import_none() -> None:
    modules = [name_of(path) for path in gpu_modules()]
    others = ["sonic_ep.steps.program_steps", "sonic_ep.dispatch.symmetric", "sonic_ep.cuda_graphs"]
    assert slow_imports_of(STEP, "torch.distributed._symmetric_memory", *sorted(modules), *others) == "[]"


@pytest.fixture
def before_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had imported Dynamo."""
    monkeypatch.setattr(lazy, "_is_imported", lambda: False)


def double(x: torch.Tensor) -> torch.Tensor:
    """Doubles."""
    return x + x


@pytest.mark.usefixtures("before_dynamo")
def test_a_function_is_compiled_once_when_it_is_first_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: calls.append(options) or model)
    with lazy_dynamo():
        compiled = torch.compile(double, dynamic=False)
    assert calls == []
    assert compiled.__doc__ == "Doubles."
    for _ in range(2):
        assert compiled(torch.ones(())).item() == 2
    assert calls == [{"dynamic": False}]


@pytest.mark.usefixtures("before_dynamo")
def test_what_was_decorated_runs_in_dynamo_and_inside_graphs() -> None:
    with lazy_dynamo():
        compiled: Any = torch.compile(double, backend="eager", dynamic=False)
        disabled: Any = torch.compiler.disable(double, reason="no graph")
    x = torch.ones(3)
    assert torch.equal(compiled(x), 2 * x)
    assert torch.equal(disabled(x), 2 * x)
    graph = torch.compile(lambda x: compiled(x) + 1, backend="eager", fullgraph=True)
    assert torch.equal(graph(x), 2 * x + 1)
    broken = torch.compile(lambda x: disabled(x) + 1, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="disable"):
        broken(x)


@pytest.mark.usefixtures("before_dynamo")
@pytest.mark.parametrize("of_process", [True, False])
def test_older_torch_has_one_recompile_limit_for_the_process(of_process: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []

    def new_compile(model: object, recompile_limit: int | None = None) -> object:
        limits.append(recompile_limit)
        return model

    config: Any = import_module("torch._dynamo.config")
    monkeypatch.setattr(torch, "compile", (lambda model: model) if of_process else new_compile)
    with config.patch(recompile_limit=8), lazy_dynamo():
        compile_later: Any = torch.compile
        assert "recompile_limit" in inspect.signature(compile_later).parameters
        compile_later(double, recompile_limit=64)(torch.ones(()))
        assert (config.recompile_limit, limits) == ((64, []) if of_process else (8, [64]))


@pytest.mark.usefixtures("before_dynamo")
def test_modules_and_other_threads_get_what_torch_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: ("compiled", model))
    monkeypatch.setattr(torch.compiler, "disable", lambda fn, recursive: ("disabled", fn))
    module, found = torch.nn.Identity(), []
    with lazy_dynamo():
        assert torch.compile(module) == ("compiled", module)
        assert torch.compiler.disable(module) == ("disabled", module)
        thread = threading.Thread(target=lambda: found.extend((torch.compile(double), torch.compiler.disable(double))))
        thread.start()
        thread.join()
    assert found == [("compiled", double), ("disabled", double)]


def test_nothing_is_replaced_once_dynamo_is_imported() -> None:
    import_module("torch._dynamo")
    before = torch.compile, torch.compiler.disable
    with lazy_dynamo():
        assert (torch.compile, torch.compiler.disable) == before
