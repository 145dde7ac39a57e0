"""The router's kernels compile for Hopper and Blackwell without a GPU, as they are launched, without spills."""

import os
import re
import subprocess
from collections.abc import Iterator
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
from sonic_ep.kernels.route.interface import LossGradient, PairGradients, RouterLinear, RouterOperations

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
    fast_launch = import_module("sonic_ep.kernels.common.launch").FastLauncher
    with (
        patch.object(driver, "_active", device),
        patch.object(jit.JITFunction, "run", warmup),
        patch.object(fast_launch, "__getitem__", lambda self, grid: self.kernel[grid]),
    ):
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


def launch_all(E: int, K: int, config: RouterConfig) -> None:
    """Every kernel of the router, for B = 4 sequences where the losses are per sequence."""
    operations: RouterOperations = import_module("sonic_ep.kernels.route.fused")  # type: ignore[assignment]
    logits_TE, ids_TK = meta(4096, E), meta(4096, K, dtype=torch.int64)
    tokens_N, experts_N = meta(9000, dtype=torch.int32), meta(9000, dtype=torch.int64)
    operations.compute_topk(logits_TE, meta(E) if config.expert_bias else None, K, config)
    operations.weights_of_pairs(logits_TE, ids_TK, tokens_N, experts_N, config)
    if config.balance != "none" or config.z_loss_coef:
        B = 4 if config.balance == "sequence" else 1
        operations.losses(logits_TE, ids_TK, meta(8, E, dtype=torch.int64), B, config)
    pairs = PairGradients(tokens_N, experts_N, meta(9000))
    loss = LossGradient(meta(), meta(4, E) if config.balance != "none" else None)
    operations.logits_gradient(logits_TE, ids_TK, pairs, loss, config)


def launch_linear(T: int, E: int, H: int) -> None:
    operations: RouterLinear = import_module("sonic_ep.kernels.route.linear.triton")  # type: ignore[assignment]
    x_TH, weight_EH = meta(T, H, dtype=torch.bfloat16), meta(E, H)
    operations.logits(x_TH, weight_EH, meta(E))
    operations.gradients(meta(T, E), x_TH, weight_EH, of_x=True, of_weight=True)


LOSSES: dict[str, Any] = {"balance": "sequence", "balance_coef": 0.01, "z_loss_coef": 0.001}
DEEPSEEK = RouterConfig(
    score="sigmoid", expert_bias=True, num_groups=8, groups_per_token=4, check_logits=True, scale=2.5, **LOSSES
)
ROUTERS: dict[str, tuple[int, int, RouterConfig]] = {
    "8": (8, 2, RouterConfig(**LOSSES)),
    "60": (60, 4, RouterConfig(renormalize=False)),
    "128": (128, 8, RouterConfig()),
    "128-losses": (128, 8, RouterConfig(check_logits=True, **LOSSES)),
    "128-global": (128, 8, RouterConfig(balance="global", balance_coef=0.01)),
    "deepseek": (256, 8, DEEPSEEK),
    "384-sigmoid": (384, 8, RouterConfig(score="sigmoid", expert_bias=True)),
    "512": (512, 10, RouterConfig(**LOSSES)),
    "1024": (1024, 16, RouterConfig()),
    "4096": (4096, 16, RouterConfig(score="sigmoid", **LOSSES)),
}


@pytest.mark.parametrize("router", [*ROUTERS.values()], ids=[*ROUTERS])
@pytest.mark.parametrize("arch", TARGETS)
def test_compiles_without_spills(arch: str, router: tuple[int, int, RouterConfig], tmp_path: Path) -> None:
    with only_compiled(TARGETS[arch]) as compiled:
        launch_all(*router)
    assert len(compiled) == 4 + 2 * (router[2].balance != "none")
    assert_no_spills(compiled, arch, tmp_path)


@pytest.mark.parametrize(
    "sizes", [(16384, 128, 2048), (24576, 128, 1536), (24576, 60, 112), (16384, 8, 4096), (32768, 512, 7168)], ids=str
)
@pytest.mark.parametrize("arch", TARGETS)
def test_linear_compiles_onto_the_tensor_cores(arch: str, sizes: tuple[int, int, int], tmp_path: Path) -> None:
    kernels = import_module("sonic_ep.kernels.route.linear.triton")
    hopper = patch.object(kernels, "_is_hopper", lambda _device: arch == "sm_90a")
    with hopper, only_compiled(TARGETS[arch]) as compiled:
        launch_linear(*sizes)
    assert_no_spills(compiled, arch, tmp_path)
    products = [kernel.asm["ptx"] for kernel in compiled if "_multiply" in kernel.asm["ptx"]]
    assert len(products) == 2
    instruction = {"sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma"}[arch]
    assert all(instruction in ptx for ptx in products)


def assert_no_spills(compiled: list[Any], arch: str, tmp_path: Path) -> None:
    for kernel in compiled:
        raised = resources(kernel, arch, tmp_path)
        assert "0 bytes spill stores, 0 bytes spill loads" in raised, raised
        assert re.search(r"Used \d+ registers", raised)
