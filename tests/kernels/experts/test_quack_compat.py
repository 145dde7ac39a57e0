"""What stands between our kernels and another quack: versions, digests of methods, hooks that our epilogue drops."""

import json
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from sonic_ep.kernels import backend
from sonic_ep.kernels.common import versions
from sonic_ep.kernels.experts import reference
from tests.helpers.machine_code import needs_compilers

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "kernels" / "experts"
HOOKS = ("epi_needs_acc_prepass", "_epi_store_quant", "epi_tile_load_s2r")


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)


def test_supported_versions_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = dict(line.split("==") for line in project["optional-dependencies"]["cuda"])
    of_extra = {package.split("[")[0]: pinned for package, pinned in pins.items()}
    assert versions.SUPPORTED.items() <= of_extra.items()


@needs_compilers
def test_installed_versions_are_supported() -> None:
    assert versions.problem_with_versions() is None


@pytest.fixture
def newer_quack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda package: versions.SUPPORTED[package].replace("0.6.5", "0.7.0"))


def test_another_version_is_named_with_the_one_that_works(newer_quack: None) -> None:
    assert versions.problem_with_versions() == (
        "quack-kernels 0.7.0 is installed, the GPU kernels work with 0.6.5; pip install 'sonic-ep[cuda]'"
    )


def test_a_package_without_a_version_is_one_that_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise versions.PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", missing)
    assert str(versions.problem_with_versions()).startswith("quack-kernels without a version is installed")


def test_under_another_version_the_layer_runs_on_the_reference_and_says_so(
    newer_quack: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(backend, "missing_extra", lambda *_: None)
    with caplog.at_level(logging.WARNING, logger="sonic_ep.kernels"):
        chosen = backend._on_gpu.__wrapped__(torch.device("cuda"), torch.bfloat16, True, "swiglu")
    assert chosen is reference
    assert "slow on a GPU: quack-kernels 0.7.0 is installed, the GPU kernels work with 0.6.5" in caplog.text


COMPILE_UNDER_ANOTHER_VERSION = """
import importlib.metadata, sys
importlib.metadata.version = lambda package: "4.9.0" if package == "nvidia-cutlass-dsl" else "0.6.5"
from sonic_ep import cli
try:
    cli.main(["compile", "--config", "tiny", "--arch", "sm_90a"])
except SystemExit as end:
    print(end, "quack" in sys.modules)
"""


@needs_compilers
def test_under_another_version_nothing_is_compiled() -> None:
    raised = run(COMPILE_UNDER_ANOTHER_VERSION)
    assert raised.stdout == (
        "sonic-ep: error: nvidia-cutlass-dsl 4.9.0 is installed, the GPU kernels work with 4.8.1; "
        "pip install 'sonic-ep[cuda]' False\n"
    ), raised.stderr


@pytest.fixture
def compat() -> Any:
    return import_module("sonic_ep.kernels.experts.quack_compat")


@pytest.fixture
def methods(compat: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of quack_methods.json that may be changed."""
    copy = tmp_path / "quack_methods.json"
    copy.write_bytes((FOLDER / "quack_methods.json").read_bytes())
    monkeypatch.setattr(compat, "_METHODS", copy)
    return copy


@needs_compilers
def test_methods_of_the_installed_quack_are_the_known_ones(compat: Any) -> None:
    assert compat.problem_with_overrides() is None
    compat.require_known_methods()


@needs_compilers
@pytest.mark.parametrize("changed", ["signature", "sha256"])
def test_a_changed_method_is_named_with_what_to_do(changed: str, compat: Any, methods: Path) -> None:
    name, known = "quack.gemm_sm90:GemmSm90.mma", json.loads(methods.read_text())
    found = known[name][changed]
    known[name][changed] = "(self)"
    methods.write_text(json.dumps(known))
    compat.require_known_methods.cache_clear()
    with pytest.raises(RuntimeError) as error:
        compat.require_known_methods()
    line = f"{name} (overridden in varlen_m.py and wgrad.py): expected {changed} (self), found {found}"
    assert str(error.value).splitlines()[1:-1] == [line]
    assert "pip install --force-reinstall 'sonic-ep[cuda]'" in str(error.value)
    assert "python -m sonic_ep.kernels.experts.quack_compat" in str(error.value)


@needs_compilers
def test_a_method_that_is_gone_is_named(compat: Any, methods: Path) -> None:
    known = json.loads(methods.read_text())
    known["quack.gemm_sm90:GemmSm90.gone"] = known["quack.gemm_sm90:GemmSm90.mma"]
    methods.write_text(json.dumps(known))
    assert (
        "GemmSm90.gone (overridden in varlen_m.py and wgrad.py): expected signature" in compat.problem_with_overrides()
    )
    assert "found nothing of this name" in compat.problem_with_overrides()


@needs_compilers
def test_digests_are_renewed(compat: Any, methods: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, known = methods.read_text(), json.loads(methods.read_text())
    known["quack.gemm_sm90:GemmSm90.mma"]["sha256"] = "older"
    methods.write_text(json.dumps(known))
    compat._renew_methods()
    assert methods.read_text() == before
    assert capsys.readouterr().out.startswith(
        "quack.gemm_sm90:GemmSm90.mma (overridden in varlen_m.py and wgrad.py): expected"
    )


def overridden(ours: type, theirs: type) -> set[str]:
    """What our class overrides of quack's, as in quack_methods.json."""
    own = {
        name
        for base in ours.__mro__
        if base.__module__.startswith("sonic_ep")
        for name, value in vars(base).items()
        if isinstance(value, FunctionType)
    }
    return {
        f"{base.__module__}:{base.__qualname__}.{name}"
        for base in theirs.__mro__
        if base.__module__.startswith("quack")
        for name in own & vars(base).keys()
    }


@needs_compilers
def test_all_overridden_methods_are_known() -> None:
    def ours(module: str, name: str) -> type:
        return getattr(import_module(f"sonic_ep.kernels.experts.{module}"), name)

    sm90, frontend = import_module("quack.gemm_default_epi").GemmDefaultSm90, import_module("quack.epilogue.frontend")
    scheduler = import_module("quack.tile_scheduler")
    found = (
        overridden(ours("sm90.row_gemm", "_HopperRows"), sm90)
        | overridden(ours("split_gate_up", "_ReadsSplitGateUp"), sm90)
        | overridden(ours("sm90.wgrad", "_PrefetchesIndices"), sm90)
        | overridden(ours("sm90.varlen_m", "_RowsScheduler"), scheduler.VarlenMTileScheduler)
        | overridden(ours("sm90.wgrad", "_WeightScheduler"), scheduler.TileScheduler)
        | overridden(ours("quack_compat", "OverriddenEpiMod"), frontend.EpiMod)
    )
    known = json.loads((FOLDER / "quack_methods.json").read_text())
    assert found == {name for name, method in known.items() if method["why"].startswith("overridden")}


@pytest.fixture
def kernel_with(compat: Any) -> Callable[..., Any]:
    """Makes an object of a kernel class of quack's with other attributes, and without what it has when it is traced."""

    def made(**attributes: Any) -> Any:
        kernel = type("Kernel", (compat.ComposableEpiMixin, compat.GemmSm90), {"_epi_ops": ()} | attributes)
        return object.__new__(kernel)

    return made


@needs_compilers
def test_kernels_without_dropped_hooks_pass(compat: Any, kernel_with: Callable[..., Any]) -> None:
    vectors = compat.RowVecLoad("row"), compat.ColVecReduce("column")
    compat.require_no_dropped_hooks(kernel_with())
    compat.require_no_dropped_hooks(kernel_with(_epi_ops=vectors))


@needs_compilers
@pytest.mark.parametrize("hook", HOOKS)
def test_kernel_classes_with_dropped_hooks_are_refused(hook: str, compat: Any, kernel_with: Callable[..., Any]) -> None:
    kernel = kernel_with(**{hook: True if hook == "epi_needs_acc_prepass" else lambda *_: None})
    with pytest.raises(NotImplementedError, match=f"Kernel needs {hook}, which .*epilogue.py does not call"):
        compat.require_no_dropped_hooks(kernel)


@needs_compilers
def test_operations_of_dropped_hooks_are_refused(compat: Any, kernel_with: Callable[..., Any]) -> None:
    codec = type("Codec", (compat.EpiOp,), {"quant_output": "D"})("codec")  # as quack's BlockScaleFactorStore
    with pytest.raises(NotImplementedError, match="Kernel needs _epi_store_quant, which"):
        compat.require_no_dropped_hooks(kernel_with(_epi_ops=(codec,)))
    tile = import_module("quack.epilogue.ops").TileLoad("tile")
    with pytest.raises(NotImplementedError, match="Kernel needs epi_tile_load_s2r, which"):
        compat.require_no_dropped_hooks(kernel_with(_epi_ops=(tile,)))


SHARED_CACHE = """
from sonic_ep.kernels.common.compile_process import _has_another_cache
from sonic_ep.kernels.experts import quack_compat
import quack.cache
print(quack.cache.CACHE_ENABLED, _has_another_cache())
"""


@needs_compilers
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_cache_that_all_may_write_is_not_read(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    ran = run(SHARED_CACHE, QUACK_CACHE_DIR=str(tmp_path))
    is_shared = mode == 0o777
    assert ran.stdout.split() == [str(not is_shared), str(is_shared)], ran.stderr
    assert ("has mode 777: all may write" in ran.stderr) == is_shared


LEAVE_CLUSTERS = """
from unittest.mock import patch
import torch
from sonic_ep.kernels.experts import quack_compat
from sonic_ep.kernels.experts.grouped_gemm import _config
from sonic_ep.kernels.experts.tile_table import TileConfig


def meta(*size, dtype=torch.bfloat16):
    return torch.empty(size, dtype=dtype, device="meta")


A, B, D, starts = meta(256, 64), meta(2, 64, 128), meta(256, 128), meta(3, dtype=torch.int32)
for dynamic in (False, True):
    config = _config(TileConfig(128, 128, True, dynamic=dynamic), A)
    with quack_compat.without_launches(), patch.object(
        quack_compat._host, "get_max_active_clusters", lambda *_, **__: 132
    ):
        plan = quack_compat.identity_epi.plan(A, B, None, config=config, out={"D": D}, cu_seqlens_m=starts)
    quack_compat.leave_clusters(plan, 8)
    gemm = plan.gemm_plan
    scheduler = gemm.scheduler_static
    print(gemm.max_active_clusters, None if scheduler is None else scheduler[0].value)
"""


@needs_compilers
def test_a_plan_leaves_clusters_to_others(tmp_path: Path) -> None:
    """With a static schedule and with one that takes a counter."""
    ran = run(LEAVE_CLUSTERS, QUACK_ARCH="90", CUTE_DSL_ARCH="sm_90a", QUACK_CACHE_DIR=str(tmp_path))
    assert ran.stdout.splitlines() == ["116 116", "116 None"], ran.stderr


COMPILE_WITH_HOOK = """
import sys
import torch
from sonic_ep.kernels.experts.sm90.row_gemm import hopper_mod
from sonic_ep.kernels.experts.grouped_gemm import _config
from sonic_ep.kernels.experts.quack_compat import (
    OverriddenEpiMod,
    identity_epi,
    problem_with_overrides,
    without_launches,
)
from sonic_ep.kernels.experts.tile_table import TileConfig


class NeedsPrepass:
    def epi_to_underlying_arguments(self, *arguments, **options):
        params = super().epi_to_underlying_arguments(*arguments, **options)
        self.epi_needs_acc_prepass = True
        return params


class Quantizes:
    def _epi_store_quant(self, name):
        return None


class LoadsTiles:
    def epi_tile_load_s2r(self, params, tensors, stage):
        pass


def meta(*size, dtype=torch.bfloat16):
    return torch.empty(size, dtype=dtype, device="meta")


A, B, D, starts = meta(256, 64), meta(2, 64, 128), meta(256, 128), meta(3, dtype=torch.int32)
config = _config(TileConfig(128, 128, True), A)
for overrides in (NeedsPrepass, Quantizes, LoadsTiles):
    overrides.__module__ = "sonic_ep.kernels.experts.sm90.row_gemm"  # this script has no file to make a digest of
    mod = OverriddenEpiMod(hopper_mod(identity_epi), overrides, overrides.__name__)
    try:
        with without_launches():
            mod.plan(A, B, None, config=config, out={"D": D}, cu_seqlens_m=starts)
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "))
    else:
        print("compiled")
print(problem_with_overrides())
"""


@needs_compilers
def test_the_epilogue_is_not_traced_for_a_kernel_with_dropped_hooks(tmp_path: Path) -> None:
    raised = run(COMPILE_WITH_HOOK, QUACK_ARCH="90", CUTE_DSL_ARCH="sm_90a", QUACK_CACHE_DIR=str(tmp_path))
    *lines, problem = raised.stdout.splitlines()
    assert len(lines) == len(HOOKS), raised.stderr
    assert problem == "None"  # also after methods of quack's were traced
    for line, hook in zip(lines, HOOKS, strict=True):
        assert f"needs {hook}, which kernels/experts/sm90/epilogue.py does not call" in line
