"""The race of benchmarks that build a model for each family of contestants: megatron_step.py and deepspeed_layer.py.

A round builds one model after the other, each in the memory of the last, and its contestants take their turns of
--seconds: whole steps back to back, once no step traces a program, then the first MoE layer alone. Results
are written after each round. A contestant that fails is in `errors`, and the others go on.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from across_ranks import timed
from host_time import Clock, machine
from pretrain_model import DENSE, flops_per_token
from step_options import train_until_traced, turn_without_tracing
from torch import Tensor

from sonic_ep import load_config
from sonic_ep.kernels.common.versions import installed_version

WARM_UP = 5  # steps of a new model, or calls of a layer alone, which traces its programs in them
SHARE_OF_LAYER = 0.3  # of a turn's seconds
HIDDEN = 4  # samples of layer_device in a turn
BUSY = 60_000_000  # cycles, some 35 ms: longer than the launches of a stock layer's forward or backward
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0}  # dense bf16
LAST_LINES = 6  # of an error


@dataclass(frozen=True)
class LayerAlone:
    """A MoE layer on random rows.

    forward: returns its output. backward: computes from that all gradients of a step. known_sizes: a context in which
    the layer takes from the host what it reads there otherwise. num_programs: None if the layer is not ours.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], object]
    known_sizes: Callable[[], AbstractContextManager[object]] = nullcontext
    num_programs: int | None = None

    def step(self) -> None:
        self.backward(self.forward())

    def saved_bytes(self) -> int:
        """Returns what the layer holds between forward and backward, without input and output."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = self.forward()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
        self.backward(out)
        return held

    def device_ms(self) -> float:
        """Returns median milliseconds of forward and backward with their launches hidden."""
        with self.known_sizes():
            self.step()
            times = []
            for _ in range(HIDDEN):
                forward, out = timed(self.forward, backlog=BUSY)
                times.append(forward + timed(lambda out=out: self.backward(out), backlog=BUSY)[0])
        return statistics.median(times)


class StepModel(Protocol):
    """The model of a family. `choose` says which of its contestants trains it.

    num_programs: of all layers of ours. warmed_up: is called when the programs of a turn's steps have been traced.
    layer_alone: a context with the first MoE layer, None if it is not to be called alone.
    """

    def choose(self, name: str) -> None: ...
    def loss(self) -> float: ...
    def step(self) -> None: ...
    def num_programs(self) -> int: ...
    def warmed_up(self) -> None: ...
    def layer_alone(self) -> AbstractContextManager[LayerAlone | None]: ...
    def free(self) -> None: ...


class Race:
    """errors: by contestant, the last lines.

    build: makes the model of a family. sizes, versions: options and packages to report. forwards: of --tokens each, in
    a step.
    """

    def __init__(
        self,
        families: Iterable[tuple[str, ...]],
        build: Callable[[tuple[str, ...]], StepModel],
        clock: Clock,
        options: argparse.Namespace,
        *,
        sizes: Iterable[str] = ("shape", "layers", "tokens", "length"),
        versions: Iterable[str] = (),
        forwards: int = 1,
    ) -> None:
        self.families, self.build, self.clock, self.options = [*families], build, clock, options
        self.sizes, self.versions, self.on_gpu = [*sizes], [*versions], options.device == "cuda"
        self.tokens_of_step = forwards * options.tokens
        self.turns: dict[str, list[dict[str, float]]] = {}
        self.steps: dict[str, int] = {}
        self.first_losses: dict[str, float] = {}
        self.errors: dict[str, str] = {}

    def run(self) -> None:
        for number in range(self.options.rounds):
            for family in self.families:
                self.round(family)
            self.report(f"round {number + 1}")

    def round(self, family: tuple[str, ...]) -> None:
        """Builds the model of a family, lets its contestants take their turns, and frees it."""
        only = self.options.only
        names = [name for name in family if name not in self.errors and (only is None or name in only)]
        if not names:
            return
        start, built = time.perf_counter(), []
        self.attempt(names[0], lambda: built.append(self.build(family)))
        if built:
            say(f"{names[0]}: built after {time.perf_counter() - start:.1f} s")
        for part in (self.first_loss, self.turn):
            for name in names:
                if built and name not in self.errors:
                    self.attempt(name, lambda part=part, name=name: part(name, built[0]))
        if built:
            self.attempt(f"{names[0]}: free", built.pop().free)
        release_memory()

    def attempt(self, name: str, call: Callable[[], Any]) -> None:
        """Calls it. If it fails on any rank, `errors` says how on all."""
        problem = ""
        try:
            call()
        except Exception:  # noqa: BLE001
            problem = "\n".join(traceback.format_exc().splitlines()[-LAST_LINES:])
        problems = [each for each in self.clock.group.all_gather_object(problem) if each]
        if problems:
            self.errors[name] = problems[0]
            say(f"{name} failed:\n{problems[0]}")

    def first_loss(self, name: str, model: StepModel) -> None:
        if name not in self.first_losses:
            model.choose(name)
            self.first_losses[name] = model.loss()

    def turn(self, name: str, model: StepModel) -> None:
        model.choose(name)
        start = time.perf_counter()
        self.clock.back_to_back(model.step, WARM_UP)
        train_until_traced(model.step, model.num_programs, self.clock)
        model.warmed_up()
        if name not in self.steps:
            estimate = self.clock.largest({"ms": self.clock.back_to_back(model.step, 2)[0]})["ms"]
            self.steps[name] = max(2, round(1000 * self.options.seconds / estimate))
            say(f"{name}: warm after {time.perf_counter() - start:.1f} s, {estimate:.1f} ms a step")
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times: dict[str, float] = {}
        turn = turn_without_tracing(model.step, self.steps[name], model.num_programs, self.clock)
        times["step"], times["host"], times["traced_in_turn"] = turn
        if self.on_gpu:
            times["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        times |= self.layer_times(name, model)
        self.turns.setdefault(name, []).append(times)

    def layer_times(self, name: str, model: StepModel) -> dict[str, float]:
        times: dict[str, float] = {}
        with model.layer_alone() as alone:
            if alone is None:
                return times
            self.clock.back_to_back(alone.step, WARM_UP)
            estimate = self.clock.largest({"ms": self.clock.back_to_back(alone.step, 2)[0]})["ms"]
            steps = max(2, round(1000 * SHARE_OF_LAYER * self.options.seconds / estimate))
            times["layer"], times["layer_host"] = self.clock.back_to_back(alone.step, steps)
            if self.on_gpu:
                times["saved_mib"] = alone.saved_bytes() / 2**20
                times["layer_device"] = alone.device_ms()
            if alone.num_programs is not None:
                times["programs"] = alone.num_programs
        return times

    def figures(self) -> dict[str, dict[str, float]]:
        """Returns medians by contestant, the largest of all ranks."""
        options, moe, dense = self.options, load_config(self.options.shape), DENSE[self.options.shape]
        results = {}
        for name, turns in self.turns.items():
            times = self.clock.largest({key: statistics.median(turn[key] for turn in turns) for key in turns[0]})
            rate = 1000 * self.tokens_of_step / times["step"]
            times |= {"turns": len(turns), "tokens_per_second": rate, "first_loss": self.first_losses[name]}
            if "layer" in times:
                times["layer_tflops"] = 18 * options.tokens * moe.K * moe.d * moe.n / times["layer"] / 1e9
            card = torch.cuda.get_device_name() if self.on_gpu else ""
            for each, peak in PEAK_TFLOPS.items():
                if each in card:
                    times["mfu"] = flops_per_token(moe, dense, options.layers, options.length) * rate / peak / 1e12
            results[name] = times
        return results

    def report(self, when: str) -> None:
        """Prints and writes what is known so far."""
        figures = self.figures()
        if dist.get_rank() != 0:
            return
        record = {"command": sys.argv, "machine": machine(self.options.device), "ranks": dist.get_world_size()}
        record["machine"]["packages"] |= {name: installed_version(name) for name in self.versions}
        record |= {name: getattr(self.options, name) for name in self.sizes}
        record |= {"contestants": figures, "errors": self.errors}
        if self.options.out is not None:
            self.options.out.write_text(json.dumps(record, indent=1) + "\n")
        for name, each in figures.items():
            print(f"{when}  {name:34}", " ".join(f"{key} {value:.4g}" for key, value in each.items()), flush=True)


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)
