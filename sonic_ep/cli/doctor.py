"""`sonic-ep doctor`: what this machine will run and why, and a layer tested against plain torch in float64.

Under torchrun it tests the ranks together. A finding is "ok", a "note" (it runs, but not as fast as it could, or not as
tested) or a "problem" (it will not run, or computes something wrong); the latter two say what to do.
"""

import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sonic_ep.config import MoEConfig, TransportConfig
from sonic_ep.extras import missing_extra
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import problem_with_expert_kernels
from sonic_ep.kernels.common.cache import cache_folder, quack_cache_folder
from sonic_ep.kernels.common.versions import SUPPORTED, installed_version
from sonic_ep.kernels.program.c_library import UnavailableError, compiled_library
from sonic_ep.layer import MoE
from sonic_ep.symmetric_memory import problem_with_peers

_TESTED_TORCH = ("2.11", "2.13")
_TOKENS, _EXPERTS = 512, 8  # of a rank, in the self-test
_LIMITS = {torch.bfloat16: 5e-2, torch.float32: 1e-4}  # of relative errors of the layer, by dtype
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Finding:
    """topic: what it is about. text: what was found. fix: what to do unless it is ok."""

    state: Literal["ok", "note", "problem"]
    topic: str
    text: str
    fix: str | None = None


def diagnose(*, as_json: bool = False) -> int:
    """Prints the findings. Returns the exit status, the same on every rank: 1 if there is a problem, else 0."""
    group, device = _join()
    findings = [*_machine(device), *_kernels(device), *_transport(group, device), *_caches(), _self_test(group, device)]
    of_ranks = group.all_gather_object(findings)
    has_problem = any(finding.state == "problem" for found in of_ranks for finding in found)
    if group.rank == 0:
        _print(of_ranks, as_json=as_json)
    if group.size > 1:
        dist.destroy_process_group()
    return int(has_problem)


def _join() -> tuple[EPGroup, torch.device]:
    """Returns all ranks that torchrun started, or this one alone, and this rank's device."""
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    has_gpu = 0 < local_size <= torch.cuda.device_count()
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return EPGroup.alone(), device
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    return EPGroup(), device


def _machine(device: torch.device) -> list[Finding]:
    found = [Finding("ok", "python", f"{platform.python_version()}, sonic-ep {installed_version('sonic-ep')}")]
    tested = torch.__version__.startswith(_TESTED_TORCH)
    fix = None if tested else f"tests run with torch {' and '.join(_TESTED_TORCH)}"
    found.append(Finding("ok" if tested else "note", "torch", f"{torch.__version__}, CUDA {torch.version.cuda}", fix))
    if device.type == "cpu":
        count = torch.cuda.device_count()
        text = f"{count} GPUs for more processes" if count else "none"
        found.append(Finding("note", "GPU", text, "experts and routing run on the CPU in plain torch"))
        return found
    properties = torch.cuda.get_device_properties(device)
    capability = f"compute capability {properties.major}.{properties.minor}"
    memory = f"{properties.total_memory // _MIB} MiB"
    found.append(Finding("ok", "GPU", f"{properties.name}, {capability}, {memory}"))
    return [*found, *_peer_access()]


def _peer_access() -> list[Finding]:
    count = torch.cuda.device_count()
    if count < 2:
        return []
    reaches = torch.cuda.can_device_access_peer
    missing = [f"{i} to {j}" for i in range(count) for j in range(count) if i != j and not reaches(i, j)]
    if not missing:
        return [Finding("ok", "peer access", f"each of {count} GPUs to every other")]
    return [Finding("note", "peer access", f"none from GPU {', '.join(missing)}", "rows travel over NCCL between them")]


def _kernels(device: torch.device) -> list[Finding]:
    found = []
    for package, supported in {"triton": None, **SUPPORTED}.items():
        installed = installed_version(package)
        wrong = device.type == "cuda" and (installed is None or supported not in (None, installed))
        text = f"{installed or 'not installed'}{f', tested with {supported}' if supported else ''}"
        found.append(
            Finding("problem" if wrong else "ok", package, text, "pip install 'sonic-ep[cuda]'" if wrong else None)
        )
    if device.type == "cpu":
        return [*found, Finding("ok", "experts", "plain torch, on the CPU"), Finding("ok", "router", "plain torch")]
    reason = problem_with_expert_kernels(device, torch.bfloat16, True, "swiglu")
    if reason is None:
        found.append(Finding("ok", "experts", "fused grouped GEMMs, in bf16 and fp16"))
    else:
        found.append(Finding("problem", "experts", "plain torch, which is slow on a GPU", reason))
    reason = missing_extra("cuda", "triton")
    text = "Triton kernels" if reason is None else "plain torch, which is slow on a GPU"
    found.append(Finding("ok" if reason is None else "problem", "router", text, reason))
    return [*found, _programs()]


def _programs() -> Finding:
    try:
        compiled_library()
    except UnavailableError as error:
        return Finding("note", "programs", "none: a step needs three times the host time", str(error))
    return Finding("ok", "programs", "steps of a layer run as programs")


def _transport(group: EPGroup, device: torch.device) -> list[Finding]:
    if group.size == 1:
        return [Finding("ok", "transport", "none, on one rank; torchrun -m sonic_ep.cli doctor tests several")]
    if device.type == "cpu":
        return [Finding("ok", "transport", f"all-to-all over gloo, {group.size} ranks")]
    problem = problem_with_peers(group, device, missing_extra("cuda", "triton"))
    if problem is None:
        return [Finding("ok", "transport", f"symmetric memory, {group.size} ranks")]
    return [Finding("note", "transport", f"all-to-all over NCCL, {group.size} ranks", problem)]


def _caches() -> list[Finding]:
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    folders = {"of quack": quack_cache_folder(), "of Triton": triton, "of sonic-ep": cache_folder()}
    return [Finding("ok", f"cache {package}", f"{folder}, {_size(folder)}") for package, folder in folders.items()]


def _size(folder: Path) -> str:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return f"{len(sizes)} files, {sum(sizes) / _MIB:.1f} MiB" if sizes else "empty"


def _self_test(group: EPGroup, device: torch.device) -> Finding:
    """Compares a layer, outputs and gradients, with plain torch in float64 over gloo, on the CPU."""
    if device.type == "cuda" and group.rank == 0:
        sys.stderr.write("self-test; with an empty cache, kernels are compiled first, which takes a minute\n")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    start, problem = time.perf_counter(), None
    errors: dict[str, float] = {}
    try:
        own = _step(group, device, dtype, TransportConfig())
        exact = _step(group, torch.device("cpu"), torch.float64, TransportConfig(kind="all_to_all"))
        errors = {name: _error(own[name], exact[name]) for name in exact}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    seconds = time.perf_counter() - start
    if problem is None and max(errors.values()) <= _LIMITS[dtype]:
        text = f"forward and backward agree with float64 to {max(errors.values()):.1e} ({dtype}, {seconds:.1f} s)"
        return Finding("ok", "self-test", text)
    shown = problem or "relative errors " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return Finding("problem", "self-test", shown, "report this with the output of sonic-ep doctor --json")


def _step(group: EPGroup, device: torch.device, dtype: torch.dtype, transport: TransportConfig) -> dict[str, Tensor]:
    """Returns outputs and gradients of a layer. Weights and tokens are the same for every device and dtype."""
    config = MoEConfig(d=256, n=128, E=_EXPERTS * group.size, K=4, transport=transport)
    layer = MoE(config, group, seed=0, device=device, dtype=dtype)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(weight.bfloat16())
    draw = torch.Generator().manual_seed(group.rank)
    x = torch.randn(_TOKENS, config.d, generator=draw).bfloat16().to(device, dtype).requires_grad_()
    out = layer(x)
    out.y.square().sum().backward()
    gradients = {name: weight.grad for name, weight in layer.named_parameters()}
    return {"y": out.y.detach(), "x": x.grad, **gradients}  # pyright: ignore[reportReturnType]


def _error(got: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return float((got.detach().cpu().double() - exact).norm() / exact.norm())


def _print(of_ranks: list[list[Finding]], *, as_json: bool) -> None:
    """Prints rank 0's findings, and what other ranks found that is not ok."""
    others = [
        Finding(finding.state, f"rank {rank}: {finding.topic}", finding.text, finding.fix)
        for rank, found in enumerate(of_ranks[1:], 1)
        for finding in found
        if finding.state != "ok" and finding not in of_ranks[0]
    ]
    findings = [*of_ranks[0], *others]
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
        return
    for finding in findings:
        sys.stdout.write(f"{finding.state:8} {finding.topic:20} {finding.text}\n")
        if finding.fix is not None:
            sys.stdout.write(f"{'':29} {finding.fix}\n")
