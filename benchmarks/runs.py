"""The frame of all benchmarks: their options, the ranks that they run on, and the record that they write."""

import argparse
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sonic_ep import EPGroup
from sonic_ep.kernels.common.versions import installed_version

PACKAGES = ("triton", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "sonic-moe")
_Result = TypeVar("_Result")


def parser_of(description: str | None, *, out_required: bool = False) -> argparse.ArgumentParser:
    """Returns a parser with the option --out, the file of the record."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=out_required)
    return parser


def group_of_ranks(device: str = "cuda") -> EPGroup:
    """Joins the other processes of torchrun, each with a GPU of its own on cuda. Alone without torchrun."""
    if "LOCAL_RANK" not in os.environ:
        return EPGroup.alone()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    return EPGroup()


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def machine(device: str = "cuda", packages: Iterable[str] = ()) -> dict[str, Any]:
    """Returns what the run depends on. packages: more whose versions count."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        models = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        cpu = models[0] if models else cpu
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": {name: installed_version(name) for name in (*PACKAGES, *packages)},
        "nccl_environment": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
    }


def new_record(device: str = "cuda", packages: Iterable[str] = (), **more: Any) -> dict[str, Any]:
    """Returns a record with what all records have: the command, the machine and the number of ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {"command": sys.argv, "machine": machine(device, packages), "ranks": ranks, **more}


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    if is_first():
        print(text, flush=True)


def write(record: dict[str, Any], out: Path | None) -> None:
    if out is not None and is_first():
        out.write_text(json.dumps(record, indent=1) + "\n")


def shown(figures: dict[str, float]) -> str:
    return " ".join(f"{key} {value:.4g}" for key, value in figures.items())


def attempt(call: Callable[[], _Result], what: str, errors: dict[str, str]) -> _Result | None:
    """Returns its result, or None with an entry in `errors`: the other parts go on."""
    try:
        return call()
    except Exception:  # noqa: BLE001
        errors[what] = traceback.format_exc()
        print(f"{what} failed: {errors[what]}", file=sys.stderr, flush=True)
        return None
