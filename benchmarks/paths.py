"""One step of `sonic_ep.MoE` in every way that users run it: lengths that change, checkpointing, compile, transports.

    python benchmarks/paths.py --out paths_1_gpu.json [--case sonic_7b:8192 ...] [--only "any length" ...]
    torchrun --nproc-per-node 4 benchmarks/paths.py --out paths_4_gpus.json

All ways of a case have the same tokens and weights, and take turns of back-to-back steps, forward and backward:

    fixed                    T tokens in every step
    forward                  forward alone, with what backward would need
    code                     without programs
    8 lengths                one of eight lengths, the same on every rank, drawn anew in each step
    any length               any multiple of 8 between 3/4 T and T, drawn anew in each step, and on each rank
    checkpoint               torch's activation checkpointing, not reentrant
    checkpoint, reentrant    likewise, reentrant
    checkpoint, replay       not reentrant, with sonic_ep.replay_contexts
    compiled                 torch.compile(fullgraph=True), of y
    static                   transport.buffers = "static", on several ranks
    graphed                  likewise, by sonic_ep.graph_layers
    all_to_all, two_hop      transports; the ranks are two hosts of the second one

Medians over rounds, the largest of all ranks. step and host are milliseconds for T tokens: a step of t tokens counts
t / T. host is until the calls return. warm_s is the seconds that the steps before the first turn took, slow how many of
them took above 50 ms, and programs how many the layer has at the end. peak_gib is of torch's allocator.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from layer_contestants import HOSTS, Problem
from runs import attempt, group_of_ranks, leave, new_record, parser_of, say, shown, write
from sonic_ep import EPGroup, MoE, graph_layers, replay_contexts
from sonic_ep.config import TransportKind
from sustained import parsed
from timing import Clock

CASES = {1: ["sonic_7b:8192", "sonic_7b:2048"], 2: ["qwen3_30b_a3b:8192", "sonic_7b:8192"]}
SLOW = 0.05  # seconds
_WARM_UP = {"fixed": 12, "8 lengths": 100, "any length": 100}  # steps: enough for what the layer learns of lengths

Function = Callable[[Tensor], Tensor]


class Way(NamedTuple):
    """A way to run a layer. of: makes the function of x; lengths: a key of `_WARM_UP`."""

    of: Callable[[MoE], Function]
    lengths: str = "fixed"
    kind: TransportKind = "auto"
    static: bool = False
    programs: bool = True
    backward: bool = True


def _plain(layer: MoE) -> Function:
    return lambda x: layer(x).y


def _checkpointed(layer: MoE, **arguments: Any) -> Function:
    return lambda x: checkpoint(_plain(layer), x, **arguments)


def _compiled(layer: MoE) -> Function:
    torch._dynamo.reset()
    return torch.compile(_plain(layer), fullgraph=True)  # of a block, too, statistics are no output


def _graphed(layer: MoE) -> Function:
    def function(x: Tensor) -> Tensor:
        if "forward" not in vars(layer):
            graph_layers([layer], x)
        return layer(x).y

    return function


_CHECKPOINTED = partial(_checkpointed, use_reentrant=False)
WAYS = {
    "fixed": Way(_plain),
    "forward": Way(_plain, backward=False),
    "code": Way(_plain, programs=False),
    "8 lengths": Way(_plain, "8 lengths"),
    "any length": Way(_plain, "any length"),
    "checkpoint": Way(_CHECKPOINTED),
    "checkpoint, reentrant": Way(partial(_checkpointed, use_reentrant=True)),
    "checkpoint, replay": Way(partial(_CHECKPOINTED, context_fn=replay_contexts)),
    "compiled": Way(_compiled),
    "static": Way(_plain, static=True),
    "graphed": Way(_graphed, static=True),
    "all_to_all": Way(_plain, kind="all_to_all"),
    "two_hop": Way(_plain, kind="two_hop"),
}


def lengths_of(kind: str, T: int, rank: int) -> Iterator[int]:
    """Returns the number of tokens of each step."""
    if kind == "fixed":
        return repeat(T)
    rng = random.Random(7 if kind == "8 lengths" else rank)
    if kind == "8 lengths":
        choices = [T - T // 64 * number for number in range(8)]
        return (rng.choice(choices) for _ in repeat(None))
    return (8 * rng.randint(3 * T // 32, T // 8) for _ in repeat(None))


class Runner:
    """A layer that runs in one way. `step` adds the tokens of a step to `tokens`."""

    def __init__(self, way: Way, problem: Problem) -> None:
        mode = "nearest" if problem.group.size == 1 else "apportion"
        static = ["static"] if way.static and problem.group.size > 1 else []
        contestant = problem.contestant(", ".join((mode, way.kind, *static, *([] if way.programs else ["code"]))))
        assert contestant.layer is not None
        self.layer, self._weights, self._way, self._problem = contestant.layer, contestant.inputs[1:], way, problem
        self._function = way.of(self.layer)
        self._lengths = lengths_of(way.lengths, len(problem.x), problem.group.rank)
        self.tokens = 0

    def step(self) -> None:
        t = next(self._lengths)
        self.tokens += t
        x = self._problem.x.detach()[:t].requires_grad_()
        y = self._function(x)
        if self._way.backward:
            y.backward(self._problem.dout[:t])
            for weight in self._weights:
                weight.grad = None

    def warm_up(self, clock: Clock) -> dict[str, float]:
        clock.ready()
        start, slow = time.perf_counter(), 0
        for _ in range(_WARM_UP[self._way.lengths]):
            begun = time.perf_counter()
            self.step()
            slow += time.perf_counter() - begun > SLOW
        clock.ready()
        return {"warm_s": time.perf_counter() - start, "slow": slow}

    def turn(self, clock: Clock, number: int) -> dict[str, float]:
        self.tokens = 0
        step, host = clock.back_to_back(self.step, number)
        scale = number * len(self._problem.x) / self.tokens
        return {"step": scale * step, "host": scale * host}


def warmed_up(way: Way, problem: Problem, clock: Clock) -> tuple[Runner, dict[str, Any]]:
    """Returns a runner that has taken its first steps, and what they took."""
    runner = Runner(way, problem)
    return runner, clock.largest(runner.warm_up(clock))


def measure(case: str, group: EPGroup, options: argparse.Namespace, errors: dict[str, str]) -> dict[str, Any]:
    config, T = parsed(case)
    clock, problem = Clock(group, options.device), Problem(config, T, group, options.device)
    records: dict[str, dict[str, Any]] = {}
    runners: dict[str, Runner] = {}
    for name in options.only or WAYS:
        kind = WAYS[name].kind
        if (kind == "all_to_all" and group.size == 1) or (kind == "two_hop" and group.size < 2 * HOSTS):
            continue
        made = attempt(lambda name=name: warmed_up(WAYS[name], problem, clock), f"{case}: {name}", errors)
        if made is not None:
            runners[name], records[name] = made
    gc.collect()
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in runners}
    numbers = {}
    for name, runner in runners.items():
        estimate = clock.largest(runner.turn(clock, options.least))["step"]
        numbers[name] = max(options.least, round(1000 * options.seconds / estimate))
    for _ in range(options.rounds):
        for name, runner in runners.items():
            if options.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            turn = runner.turn(clock, numbers[name])
            peak = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else 0.0
            turns[name].append({**turn, "peak_gib": peak})
    for name, each in turns.items():
        medians = {key: statistics.median(turn[key] for turn in each) for key in each[0]}
        records[name] |= clock.largest({**medians, "programs": runners[name].layer.num_programs})
    return {"T": T, "ways": records}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--case", nargs="+", help="a config and the tokens of a rank; default: CASES")
    parser.add_argument("--only", nargs="+", choices=WAYS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--least", type=int, default=20, help="steps of a turn")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    group = group_of_ranks(options.device)
    errors: dict[str, str] = {}
    cases: dict[str, dict[str, Any]] = {}
    results = new_record(options.device, errors=errors, cases=cases)
    for case in options.case or CASES[min(group.size, 2)]:
        cases[case] = measured = measure(case, group, options, errors)
        for name, record in measured["ways"].items():
            say(f"{case:24} {name:24} {shown(record)}")
        write(results, options.out)
        gc.collect()
    leave()


if __name__ == "__main__":
    main()
