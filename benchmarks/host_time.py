"""Host time of one MoE layer, forward and backward, by mode: what launching costs where the device has little to do.

    python benchmarks/host_time.py --out host_time.json [--shape sonic_7b] [--tokens 2048] [--only nearest torch ...]
    torchrun --nproc-per-node 2 benchmarks/host_time.py --out host_time_2_ranks.json
    python benchmarks/host_time.py --device cpu --shape tiny --tokens 512       counts alone, of the reference path

Contestants: `sonic_ep.MoE` by rounding mode, with exact and with static buffers, over several ranks by symmetric memory
and by all-to-all; a plain torch grouped_mm layer, and on one rank sonic-moe's where it is installed. All have the same
tokens and weights (layer_contestants.py). They take turns in one run; medians over rounds, and the largest of all
ranks.

Times, in milliseconds a step of forward and backward:
    step          back to back for a second, of the host or the device, whichever is slower
    host          calls of one step until they return, the device idle before; with what they wait for
    host_forward, host_backward     its two parts
    host_of_5     the same of five steps behind each other, by step
    one_thread    the same as host, backward launched by the thread that launches forward
    device        of all kernels, copies and fills, by CUPTI, and `graph`: a replay of the step's CUDA graph
    device_us     the same by name, microseconds
    driver        of the calls into the CUDA runtime and driver, by CUPTI, which slows them down
Counts of a step of the first rank, each in a pass of its own: kernels, copies, fills (CUPTI); aten (operations that
reach a dispatch mode, views and allocations too) and the most frequent ones; python and builtin (calls of functions);
calls (into the CUDA runtime and driver, by name); programs, the number that the layer has (0: its code runs; the log
says why).
Profile: functions of most own time and of most time in all, [function, calls, own us, us in all] a step, by cProfile,
which makes short functions look longer than they are.
"""

import argparse
import gc
import json
import logging
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from across_ranks import captured
from host_counts import count_calls, on_device, profiled
from layer_contestants import Contestant, Problem

from sonic_ep import EPGroup, load_config
from sonic_ep.kernels.common.versions import installed_version

PACKAGES = ("triton", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi", "sonic-moe")
WARM_UP, SAMPLES, PROFILED = 5, 20, 50  # steps
BEHIND_EACH_OTHER = 5
REPLAYS = 20


class Clock:
    """What all ranks agree on, and when they and the device are ready."""

    def __init__(self, group: EPGroup, device: str) -> None:
        self.group, self.device = group, device

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def ready(self) -> None:
        self.wait()
        if self.group.size > 1:
            dist.barrier()
            self.wait()

    def largest(self, values: dict[str, float]) -> dict[str, float]:
        of_ranks = self.group.all_gather_object(values)
        return {name: max(each[name] for each in of_ranks if name in each) for name in values}

    def milliseconds(self, call: Callable[[], Any], times: int = 1, *, until_done: bool = False) -> float:
        self.ready()
        start = time.perf_counter()
        for _ in range(times):
            call()
        if until_done:
            self.wait()
        return 1000 * (time.perf_counter() - start) / times

    def back_to_back(self, call: Callable[[], object], times: int, *, untimed: int = 0) -> tuple[float, float]:
        """Returns milliseconds a call until all are done, and until the calls return. untimed: calls before these."""
        for _ in range(untimed):
            call()
        self.ready()
        start = time.perf_counter()
        for _ in range(times):
            call()
        host = time.perf_counter() - start
        self.wait()
        return 1000 * (time.perf_counter() - start) / times, 1000 * host / times


def host_times(contestant: Contestant, clock: Clock) -> dict[str, float]:
    """Medians over steps, each of which finds the device idle."""
    rows = []
    for _ in range(SAMPLES):
        clock.ready()
        start = time.perf_counter()
        out = contestant.forward()
        middle = time.perf_counter()
        gradients = torch.autograd.grad(out, contestant.inputs, contestant.dout)
        rows.append((middle - start, time.perf_counter() - middle))
        del out, gradients
    of_5 = [clock.milliseconds(contestant.step, BEHIND_EACH_OTHER) for _ in range(SAMPLES // 2)]
    with torch.autograd.set_multithreading_enabled(False):
        one_thread = [clock.milliseconds(contestant.step) for _ in range(SAMPLES // 2)]
    forward, backward = ([1000 * value for value in column] for column in zip(*rows, strict=True))
    return {
        "host": statistics.median(map(sum, zip(forward, backward, strict=True))),
        "host_forward": statistics.median(forward),
        "host_backward": statistics.median(backward),
        "host_of_5": statistics.median(of_5),
        "one_thread": statistics.median(one_thread),
    }


def race(
    contestants: dict[str, Contestant], clock: Clock, rounds: int, seconds: float, errors: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Median times of each, taking turns."""
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    steps = {}
    for name, each in contestants.items():
        estimate = clock.largest({"ms": clock.milliseconds(each.step, SAMPLES, until_done=True)})["ms"]
        steps[name] = max(SAMPLES, round(1000 * seconds / estimate) + 1)
    gc.collect()
    for _ in range(rounds):
        for name, each in contestants.items():
            times = attempt(lambda each=each: host_times(each, clock), f"{name}: host", errors)
            if times is not None:
                step = clock.milliseconds(each.step, steps[name], until_done=True)
                turns[name].append({"step": step, **times})
    return {
        name: clock.largest({key: statistics.median(turn[key] for turn in each) for key in each[0]})
        for name, each in turns.items()
        if each
    }


def graph_ms(step: Callable[[], object]) -> float:
    """Device time of a step in a CUDA graph, one replay behind the other."""
    replay = captured(step)
    replay()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(REPLAYS):
        replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / REPLAYS


def attempt(call: Callable[[], Any], what: str, errors: dict[str, str]) -> Any:
    """Its result, or None and an entry in `errors`: the other parts go on."""
    try:
        return call()
    except Exception:  # noqa: BLE001
        errors[what] = traceback.format_exc()
        print(f"{what} failed: {errors[what]}", file=sys.stderr, flush=True)
        return None


def measure(problem: Problem, clock: Clock, options: argparse.Namespace, errors: dict[str, str]) -> dict[str, Any]:
    contestants: dict[str, Contestant] = {}
    for name, make in problem.makers().items():
        if options.only is None or name in options.only:
            contestant = attempt(lambda make=make: warm(make()), name, errors)
            if contestant is not None:
                contestants[name] = contestant
    on_gpu = options.device == "cuda"
    records: dict[str, dict[str, Any]] = {name: {} for name in contestants}
    for name, each in contestants.items():
        if each.layer is not None:
            records[name]["programs"] = each.layer.num_programs
    if on_gpu:
        for name, times in race(contestants, clock, options.rounds, options.seconds, errors).items():
            records[name] |= times
    steps = PROFILED if on_gpu else WARM_UP
    passes: dict[str, Callable[[Contestant], dict[str, Any]]] = {
        "calls": lambda each: count_calls(each.step),
        "profile": lambda each: {"profile": profiled(each.step, clock.ready, steps)},
    }
    if on_gpu:  # CUPTI slows down what is timed after it, and a capture that fails may leave the device useless
        passes["CUPTI"] = lambda each: on_device(each.step, clock.ready)
        passes["graph"] = lambda each: {"graph": graph_ms(each.step)} if each.capturable else {}
    for what, count in passes.items():
        for name, each in contestants.items():
            records[name] |= attempt(lambda count=count, each=each: count(each), f"{name}: {what}", errors) or {}
    return records


def warm(contestant: Contestant) -> Contestant:
    """Returns it, compiled and traced."""
    for _ in range(WARM_UP):
        contestant.step()
    return contestant


def machine(device: str) -> dict[str, Any]:
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
        "packages": {name: installed_version(name) for name in PACKAGES},
        "nccl_environment": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
    }


def show(records: dict[str, dict[str, Any]]) -> None:
    for name, record in records.items():
        numbers = {key: round(value, 3) for key, value in record.items() if isinstance(value, int | float)}
        print(f"{name:28} {' '.join(f'{key} {value}' for key, value in numbers.items())}", flush=True)


def main() -> None:
    logging.basicConfig()
    logging.getLogger("sonic_ep.launches").setLevel(logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="sonic_7b")
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--only", nargs="+", help='contestants by name, as "nearest, static"; default: all')
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    group = EPGroup.alone()
    if "LOCAL_RANK" in os.environ:
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")
        group = EPGroup()
    config, errors = load_config(options.shape), {}
    config = config.replace(activation="swiglu", bias=False)
    results: dict[str, Any] = {"command": sys.argv, "machine": machine(options.device), "ranks": group.size}
    results |= {"shape": options.shape, "sizes": {"T": options.tokens, "E": config.E, "K": config.K}}
    results["sizes"] |= {"d": config.d, "n": config.n}
    clock = Clock(group, options.device)
    results["contestants"] = measure(Problem(config, options.tokens, group, options.device), clock, options, errors)
    results["errors"] = errors
    if group.rank == 0:
        show(results["contestants"])
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    if group.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
