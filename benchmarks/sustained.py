"""Sustained speed of MoE layers with their routers: eager, back to back for a second a turn, forward and backward.

    python benchmarks/sustained.py --out sustained_1_gpu.json [--case qwen3_30b_a3b:16384 ...] [--only off torch ...]
    torchrun --nproc-per-node 2 benchmarks/sustained.py --out sustained_2_gpus.json

A case is a config, the tokens of a rank, and optionally fields that differ from the config:
sonic_7b:24576 or qwen3_30b_a3b:8192:E=32,K=2. All contestants of a case (layer_contestants.py) have the same tokens and
weights, and take turns. Times are medians over rounds, in milliseconds a step, and the largest of all ranks:

    step        of the host or the device, whichever is slower
    host        of calls until they return, the device idle before
    tflops      18 T K d n / step, in TFLOP/s of a rank: what tokens need, without the router
    programs    the number that the layer has; 0: its code runs, and the log says why
    wire_mib    MiB that a rank sends to other ranks in a step, and across_mib those to the other host: of the
                transports over torch.distributed, where "two_hop" takes the ranks for two hosts
"""

import argparse
import gc
import logging
import statistics
from importlib.util import find_spec
from typing import Any

import torch

from layer_contestants import BF16_ROUTER, Contestant, Problem
from runs import attempt, group_of_ranks, leave, new_record, parser_of, say, write
from sonic_ep import EPGroup, MoEConfig, load_config
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.two_hop import TwoHopTransport
from sonic_ep.transports import GroupTransport
from timing import Clock

WARM_UP, SAMPLES = 5, 20  # steps
CASES = {
    1: ["sonic_7b:24576", "qwen3_30b_a3b:16384", "qwen3_30b_a3b:16384:E=256,K=4,n=1024"],
    2: ["qwen3_30b_a3b:8192", "sonic_7b:8192", "qwen3_30b_a3b:8192:E=32,K=2"],
}
CONTESTANTS = {
    1: ["off", "nearest", f"off, {BF16_ROUTER}", f"nearest, {BF16_ROUTER}", "torch", "sonic_moe"],
    2: [
        "off, symmetric",
        f"off, symmetric, {BF16_ROUTER}",
        "off, symmetric, code",
        "apportion, symmetric",
        "apportion, symmetric, static",
        "off, all_to_all",
        "torch",
    ],
}


def parsed(case: str) -> tuple[MoEConfig, int]:
    """Returns the config of a case, and the tokens of a rank."""
    shape, tokens, *rest = case.split(":")
    fields = dict(field.split("=") for field in ",".join(rest).split(",") if field)
    config = load_config(shape).replace(activation="swiglu", bias=False)
    return config.replace(**{name: int(value) for name, value in fields.items()}), int(tokens)


def measure(case: str, group: EPGroup, options: argparse.Namespace, errors: dict[str, str]) -> dict[str, Any]:
    config, T = parsed(case)
    clock, problem = Clock(group, "cuda"), Problem(config, T, group)
    contestants: dict[str, Contestant] = {}
    for name in options.only or CONTESTANTS[min(group.size, 2)]:
        if name != "sonic_moe" or find_spec("sonicmoe") is not None:
            made = attempt(lambda name=name: warm(problem.contestant(name)), f"{case}: {name}", errors)
            if made is not None:
                contestants[name] = made
    flops = 18 * T * config.K * config.d * config.n
    times = race(contestants, clock, options.rounds, options.seconds)
    for name, record in times.items():
        record["tflops"] = flops / record["step"] / 1e9
        layer = contestants[name].layer
        if layer is not None:
            record["programs"] = layer.num_programs
            record |= clock.largest(mib_of_a_step(contestants[name]))
    sizes = {"T": T, "E": config.E, "K": config.K, "d": config.d, "n": config.n}
    return {"sizes": sizes, "contestants": times}


def warm(contestant: Contestant) -> Contestant:
    """Returns it, compiled and traced."""
    for _ in range(WARM_UP):
        contestant.step()
    return contestant


def race(contestants: dict[str, Contestant], clock: Clock, rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Median times of each, taking turns."""
    steps = {}
    for name, each in contestants.items():
        estimate = clock.largest({"ms": clock.back_to_back(each.step, SAMPLES)[0]})["ms"]
        steps[name] = max(SAMPLES, round(1000 * seconds / estimate) + 1)
    gc.collect()
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, each in contestants.items():
            host = statistics.median(clock.back_to_back(each.step, 1)[1] for _ in range(SAMPLES))
            turns[name].append((clock.back_to_back(each.step, steps[name])[0], host))
    return {
        name: clock.largest(dict(zip(("step", "host"), map(statistics.median, zip(*each, strict=True)), strict=True)))
        for name, each in turns.items()
    }


def mib_of_a_step(contestant: Contestant) -> dict[str, float]:
    assert contestant.layer is not None
    transport = contestant.layer.transport
    chosen = transport.on(contestant.dout) if isinstance(transport, GroupTransport) else transport
    if isinstance(chosen, AllToAllTransport | TwoHopTransport):
        counters = {"wire_mib": chosen.wire_bytes}
        if isinstance(chosen, TwoHopTransport):
            counters["across_mib"] = chosen.bytes_across_hosts
        before = {name: counter.total() for name, counter in counters.items()}
        contestant.step()
        return {name: (counter.total() - before[name]) / 2**20 for name, counter in counters.items()}
    return {}


def main() -> None:
    logging.basicConfig()
    logging.getLogger("sonic_ep.launches").setLevel(logging.INFO)
    parser = parser_of(__doc__)
    parser.add_argument("--case", nargs="+", help="default: CASES of this number of ranks")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--only", nargs="+", help="contestants by name")
    parser.add_argument("--short-tuning", action="store_true", help="tune sonic-moe's GEMMs in fewer launches")
    options = parser.parse_args()
    if options.short_tuning:
        from short_tuning import tune_in_short

        tune_in_short()
    group, errors = group_of_ranks(), {}
    record = new_record(cases={}, errors=errors)
    for case in options.case or CASES[min(group.size, 2)]:
        record["cases"][case] = measured = measure(case, group, options, errors)
        for name, found in measured["contestants"].items():
            say(f"{case:40} {name:30} {' '.join(f'{key} {found[key]:.3f}' for key in ('step', 'host', 'tflops'))}")
        write(record, options.out)
        gc.collect()
        torch.cuda.empty_cache()
    leave()


if __name__ == "__main__":
    main()
