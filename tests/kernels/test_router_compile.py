"""The router's kernels compile for Hopper and Blackwell without a GPU, as they are launched, without spills."""

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep.config import RouterConfig

if find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing; unset TRITON_INTERPRET", allow_module_level=True)

knobs = import_module("triton").knobs
driver, jit = import_module("triton.runtime").driver, import_module("triton.runtime.jit")
GPUTarget = import_module("triton.backends.compiler").GPUTarget

TARGETS = {"sm_90a": 90, "sm_100a": 100}


@contextmanager
def only_compiled(capability: int) -> Iterator[list[Any]]:
    """Launches within it compile for that target and run nothing; yields what was compiled."""
    compiled: list[Any] = []
    run = jit.JITFunction.run

    def warmup(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))
        return compiled[-1]

    device = SimpleNamespace(
        get_current_device=lambda: capability,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    with patch.object(driver, "_active", device), patch.object(jit.JITFunction, "run", warmup):
        yield compiled


def resources(kernel: Any, arch: str, folder: Path) -> str:
    """What ptxas says of the kernel's registers."""
    source = folder / "kernel.ptx"
    source.write_text(kernel.asm["ptx"], encoding="utf-8")
    ptxas = knobs.nvidia.ptxas_blackwell.path if arch == "sm_100a" else knobs.nvidia.ptxas.path
    command = [ptxas, f"-arch={arch}", "-v", str(source), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def choose(E: int, K: int, config: RouterConfig) -> None:
    bias_E = meta(E) if config.expert_bias else None
    import_module("sonic_ep.kernels.cuda.router_choice").choose(meta(4096, E), bias_E, K, config)


DEEPSEEK = RouterConfig(score="sigmoid", expert_bias=True, num_groups=8, groups_per_token=4, check_logits=True)
LAUNCHES: dict[str, Callable[[], None]] = {
    "choose-8": lambda: choose(8, 2, RouterConfig()),
    "choose-60": lambda: choose(60, 4, RouterConfig()),
    "choose-128": lambda: choose(128, 8, RouterConfig()),
    "choose-deepseek": lambda: choose(256, 8, DEEPSEEK),
    "choose-384": lambda: choose(384, 8, RouterConfig(score="sigmoid", expert_bias=True)),
    "choose-512": lambda: choose(512, 10, RouterConfig()),
    "choose-1024": lambda: choose(1024, 16, RouterConfig()),
    "choose-4096": lambda: choose(4096, 16, RouterConfig()),
}


@pytest.mark.parametrize("launch", [*LAUNCHES.values()], ids=[*LAUNCHES])
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles_without_spills(arch: str, launch: Callable[[], None], tmp_path: Path) -> None:
    with only_compiled(TARGETS[arch]) as compiled:
        launch()
    assert compiled
    for kernel in compiled:
        told = resources(kernel, arch, tmp_path)
        assert "0 bytes spill stores, 0 bytes spill loads" in told, told
        assert re.search(r"Used \d+ registers", told)
