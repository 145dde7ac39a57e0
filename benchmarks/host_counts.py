"""What a step of a layer does on the host and on the device, counted, each in a pass of its own.

Backward is launched by the thread that is watched, which autograd's own thread is not.
"""

import cProfile
import json
import pstats
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

COUNTED = 5  # steps
TOP, TOP_ATEN = 40, 12
_NAME = 80  # characters of a kernel's name

Row = tuple[str, float, float, float]


def on_device(step: Callable[[], object], ready: Callable[[], object]) -> dict[str, Any]:
    """Kernels, copies, fills, calls into the CUDA runtime and driver, and their milliseconds, by CUPTI."""
    ready()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(COUNTED):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = {"kernel": "kernels", "gpu_memcpy": "copies", "gpu_memset": "fills"}
    counts = Counter(kinds[event["cat"]] for event in events if event.get("cat") in kinds)
    device: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in kinds:
            device[event["name"][:_NAME]] += event.get("dur", 0)
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    by_name = Counter(event["name"] for event in calls)
    return {
        **{name: counts[name] / COUNTED for name in kinds.values()},
        "device": device.total() / 1000 / COUNTED,
        "device_us": {name: round(us / COUNTED, 2) for name, us in device.most_common()},
        "driver": sum(event.get("dur", 0) for event in calls) / 1000 / COUNTED,
        "calls": {name: number / COUNTED for name, number in by_name.most_common()},
    }


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def count_calls(step: Callable[[], object]) -> dict[str, Any]:
    """Calls of operations and of functions."""
    calls: Counter[str] = Counter()

    def watch(frame: Any, event: str, argument: Any) -> None:
        calls[event] += 1

    with torch.autograd.set_multithreading_enabled(False):
        with _Operations() as operations:
            step()
        sys.setprofile(watch)
        try:
            step()
        finally:
            sys.setprofile(None)
    aten = operations.calls
    return {
        "aten": aten.total(),
        "python": calls["call"],
        "builtin": calls["c_call"],
        "most_frequent_aten": dict(aten.most_common(TOP_ATEN)),
    }


def profiled(step: Callable[[], object], ready: Callable[[], object], steps: int) -> dict[str, list[Row]]:
    """Functions with most own time, and with most time in all."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(steps):
            ready()
            profiler.enable()
            step()
            profiler.disable()
    rows = [
        (_short(*place), calls / steps, round(own / steps * 1e6, 2), round(total / steps * 1e6, 2))
        for place, (_, calls, own, total, _) in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    ]
    return {
        "own": sorted(rows, key=lambda row: -row[2])[:TOP],
        "in_all": sorted(rows, key=lambda row: -row[3])[:TOP],
    }


def _short(file: str, line: int, name: str) -> str:
    return name if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"
