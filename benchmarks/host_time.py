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
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from host_counts import count_calls, on_device, profiled
from layer_contestants import Contestant, Problem
from runs import attempt, group_of_ranks, leave, new_record, parser_of, say, shown, write
from sonic_ep import load_config
from timing import Clock, captured, eager_us

WARM_UP, SAMPLES, PROFILED = 5, 20, 50  # steps
BEHIND_EACH_OTHER = 5
CONTESTANTS = {
    1: ["off", "off, code", "nearest", "nearest, code", "torch"],
    2: [
        *(f"{mode}, {how}" for mode in ("off", "apportion") for how in ("symmetric", "symmetric, code", "all_to_all")),
        "apportion, symmetric, static",
        "torch",
    ],
}


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
    of_5 = [clock.back_to_back(contestant.step, BEHIND_EACH_OTHER)[1] for _ in range(SAMPLES // 2)]
    with torch.autograd.set_multithreading_enabled(False):
        one_thread = [clock.back_to_back(contestant.step, 1)[1] for _ in range(SAMPLES // 2)]
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
        estimate = clock.largest({"ms": clock.back_to_back(each.step, SAMPLES)[0]})["ms"]
        steps[name] = max(SAMPLES, round(1000 * seconds / estimate) + 1)
    gc.collect()
    for _ in range(rounds):
        for name, each in contestants.items():
            times = attempt(lambda each=each: host_times(each, clock), f"{name}: host", errors)
            if times is not None:
                step = clock.back_to_back(each.step, steps[name])[0]
                turns[name].append({"step": step, **times})
    return {
        name: clock.largest({key: statistics.median(turn[key] for turn in each) for key in each[0]})
        for name, each in turns.items()
        if each
    }


def measure(problem: Problem, clock: Clock, options: argparse.Namespace, errors: dict[str, str]) -> dict[str, Any]:
    contestants: dict[str, Contestant] = {}
    for name in options.only or CONTESTANTS[min(problem.group.size, 2)]:
        contestant = attempt(lambda name=name: warm(problem.contestant(name)), name, errors)
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
        if problem.group.size == 1:
            passes["graph"] = lambda each: {"graph": eager_us(captured(each.step)) / 1000}
    for what, count in passes.items():
        for name, each in contestants.items():
            records[name] |= attempt(lambda count=count, each=each: count(each), f"{name}: {what}", errors) or {}
    return records


def warm(contestant: Contestant) -> Contestant:
    """Returns it, compiled and traced."""
    for _ in range(WARM_UP):
        contestant.step()
    return contestant


def main() -> None:
    logging.basicConfig()
    logging.getLogger("sonic_ep.launches").setLevel(logging.INFO)
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="sonic_7b")
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--only", nargs="+", help='contestants by name, as "nearest, static"; default: all')
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    group = group_of_ranks(options.device)
    config, errors = load_config(options.shape), dict[str, str]()
    config = config.replace(activation="swiglu", bias=False)
    sizes = {"T": options.tokens, "E": config.E, "K": config.K, "d": config.d, "n": config.n}
    problem, clock = Problem(config, options.tokens, group, options.device), Clock(group, options.device)
    records = measure(problem, clock, options, errors)
    for name, record in records.items():
        say(f"{name:28} {shown({key: value for key, value in record.items() if isinstance(value, int | float)})}")
    results = new_record(options.device, shape=options.shape, sizes=sizes, contestants=records, errors=errors)
    write(results, options.out)
    leave()


if __name__ == "__main__":
    main()
