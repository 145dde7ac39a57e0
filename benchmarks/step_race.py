"""The race of all benchmarks of whole training steps, and their options.

A round builds one model after the other, each in the memory of the last, and its contestants take their turns of
--seconds: whole steps back to back, once no step traces a program, then the first MoE layer alone. Where all
contestants train one model, it is built once. Results are written after each round. A contestant that fails is in
`errors`, and the others go on.
"""

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pretrain_model import Dense, flops_per_token
from runs import new_record, parser_of, say, shown, write
from sonic_ep import EPGroup, MoEConfig
from timing import Clock, device_ms

WARM_UP = 5  # steps of a model, or calls of a layer alone, which traces its programs in them
SHARE_OF_LAYER = 0.3  # of a turn's seconds
HIDDEN = 4  # samples of layer_device in a turn
BUSY = 60_000_000  # cycles, some 35 ms: longer than the launches of a stock layer's forward or backward
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0}  # dense bf16
LAST_LINES = 6  # of an error
FEW, MOST = 3, 24  # steps before a turn
ATTEMPTS = 3  # of a turn


def step_parser(
    description: str | None, *, shape: str, shapes: Iterable[str], tokens: int, seconds: float
) -> argparse.ArgumentParser:
    """Returns a parser with the options of all of them. The values are the defaults."""
    parser = parser_of(description)
    parser.add_argument("--shape", default=shape, choices=shapes)
    parser.add_argument("--tokens", type=int, default=tokens, help="of each rank in a forward")
    parser.add_argument("--length", type=int, default=4096, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=seconds, help="of a turn")
    parser.add_argument("--only", nargs="+", help="contestants by name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser


def parsed_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.tokens % options.length:
        parser.error(f"--tokens {options.tokens} must be a multiple of --length {options.length}")
    return options


@dataclass(frozen=True)
class LayerAlone:
    """A MoE layer on random rows.

    forward: returns its output. backward: computes from that all gradients of a step. known_sizes: a context in which
    the layer takes from the host what it reads there otherwise; None if there is none, and launches cannot be hidden.
    """

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor], object]
    known_sizes: Callable[[], AbstractContextManager[object]] | None = None

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

    def device_ms(self, known_sizes: Callable[[], AbstractContextManager[object]]) -> float:
        """Returns median milliseconds of forward and backward with their launches hidden."""
        with known_sizes():
            self.step()
            times = []
            for _ in range(HIDDEN):
                forward, out = device_ms(self.forward, backlog=BUSY)
                times.append(forward + device_ms(lambda out=out: self.backward(out), backlog=BUSY)[0])
        return statistics.median(times)


class StepModel(Protocol):
    """The model of a family of contestants."""

    def choose(self, name: str) -> None:
        """Says which contestant trains it from now on."""

    def loss(self) -> float: ...

    def step(self) -> None: ...

    def num_programs(self) -> int:
        """Returns the number of all layers of ours."""
        ...

    def warmed_up(self) -> None:
        """Is called when the programs of a turn's steps have been traced."""

    def more_figures(self) -> dict[str, float]:
        """Returns more figures of a turn, at its end."""
        return {}

    @contextmanager
    def layer_alone(self) -> Generator[LayerAlone | None]:
        """A context with the first MoE layer; None if it is not to be called alone."""
        yield None

    def free(self) -> None:
        """Gives the model's memory back."""


class Race:
    """errors: by contestant, the last lines.

    build: makes the model of a family. moe, dense: of the model; without `dense` no MFU is reported. sizes, packages:
    options and packages to report. forwards: of --tokens each, in a step.
    """

    def __init__(
        self,
        families: Iterable[tuple[str, ...]],
        build: Callable[[tuple[str, ...]], StepModel],
        options: argparse.Namespace,
        *,
        moe: MoEConfig,
        dense: Dense | None,
        sizes: Iterable[str] = (),
        packages: Iterable[str] = (),
        forwards: int = 1,
    ) -> None:
        self.families, self.build, self.options, self.moe, self.dense = [*families], build, options, moe, dense
        self.clock, self.on_gpu = Clock(EPGroup(), options.device), options.device == "cuda"
        self.sizes, self.packages = ["shape", "layers", "tokens", "length", *sizes], [*packages]
        self.tokens_of_step = forwards * options.tokens
        self.turns: dict[str, list[dict[str, float]]] = {}
        self.steps: dict[str, int] = {}
        self.first_losses: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        self._only_model: StepModel | None = None  # the only model

    def run(self) -> None:
        for number in range(self.options.rounds):
            for family in self.families:
                self.round(family)
            self.report(f"round {number + 1}")

    def round(self, family: tuple[str, ...]) -> None:
        """Builds the model of a family, lets its contestants take their turns, and frees it."""
        only = self.options.only
        names = [name for name in family if name not in self.errors and (only is None or name in only)]
        model = self._only_model or (self.built(names[0], family) if names else None)
        if model is None:
            return
        for part in (self.first_loss, self.turn):
            for name in names:
                if name not in self.errors:
                    self.attempt(name, partial(part, name, model))
        if len(self.families) == 1:
            self._only_model = model
        else:
            self.attempt(f"{names[0]}: free", model.free)
        model = None  # its memory, too, goes to the next
        release_memory()

    def built(self, name: str, family: tuple[str, ...]) -> StepModel | None:
        start, built = time.perf_counter(), []
        self.attempt(name, lambda: built.append(self.build(family)))
        if not built:
            return None
        say(f"{name}: built after {time.perf_counter() - start:.1f} s")
        return built[0]

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
        self.train_until_traced(model)
        model.warmed_up()
        if name not in self.steps:
            estimate = self.clock.largest({"ms": self.clock.back_to_back(model.step, 2)[0]})["ms"]
            self.steps[name] = max(2, round(1000 * self.options.seconds / estimate))
            say(f"{name}: warm after {time.perf_counter() - start:.1f} s, {estimate:.1f} ms a step")
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = self.steps_without_tracing(model, self.steps[name])
        if self.on_gpu:
            times["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        times |= self.layer_times(model)
        self.turns.setdefault(name, []).append(times | model.more_figures())

    def train_until_traced(self, model: StepModel) -> None:
        """Trains until FEW steps behind each other have traced no program on any rank, but at most MOST steps.

        A program is traced at the first or second step of its kind. In the steps after it memory is arranged anew.
        """
        quiet = 0
        for _ in range(MOST):
            before = model.num_programs()
            model.step()
            quiet = quiet + 1 if self.new_programs(model, before) == 0 else 0
            if quiet == FEW:
                break

    def steps_without_tracing(self, model: StepModel, number: int) -> dict[str, float]:
        """Times steps back to back.

        A trace takes as long as many steps of a layer, and all lengths together need a handful. So a turn with one on
        any rank is repeated, at most ATTEMPTS - 1 times.
        """
        ms, host, new, attempts = 0.0, 0.0, 1.0, 0
        while new and attempts < ATTEMPTS:
            attempts, before = attempts + 1, model.num_programs()
            ms, host = self.clock.back_to_back(model.step, number)
            new = self.new_programs(model, before)
        return {"step": ms, "host": host, "traced_in_turn": new}

    def new_programs(self, model: StepModel, before: int) -> float:
        return self.clock.largest({"new": model.num_programs() - before})["new"]

    def layer_times(self, model: StepModel) -> dict[str, float]:
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
                if alone.known_sizes is not None:
                    times["layer_device"] = alone.device_ms(alone.known_sizes)
        return times

    def figures(self) -> dict[str, dict[str, float]]:
        """Returns medians by contestant, the largest of all ranks."""
        options, moe = self.options, self.moe
        results = {}
        for name, turns in self.turns.items():
            times = self.clock.largest({key: statistics.median(turn[key] for turn in turns) for key in turns[0]})
            rate = 1000 * self.tokens_of_step / times["step"]
            times |= {"turns": len(turns), "tokens_per_second": rate, "first_loss": self.first_losses[name]}
            if "layer" in times:
                times["layer_tflops"] = 18 * options.tokens * moe.K * moe.d * moe.n / times["layer"] / 1e9
            card = torch.cuda.get_device_name() if self.on_gpu else ""
            peak = next((peak for each, peak in PEAK_TFLOPS.items() if each in card), None)
            if peak is not None and self.dense is not None:
                flops = flops_per_token(moe, self.dense, options.layers, options.length)
                times["mfu"] = flops * rate / peak / 1e12
            results[name] = times
        return results

    def report(self, when: str) -> None:
        """Prints and writes what is known so far."""
        figures = self.figures()
        record = new_record(self.options.device, self.packages)
        record |= {name: getattr(self.options, name) for name in self.sizes}
        write(record | {"contestants": figures, "errors": self.errors}, self.options.out)
        for name, each in figures.items():
            say(f"{when}  {name:34} {shown(each)}")


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
