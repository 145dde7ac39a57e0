"""Training steps of Megatron-Core with Qwen3-30B-A3B's layers: its MoE layer and ours, in turns of one run.

    torchrun --nproc-per-node 2 benchmarks/megatron_step.py --layers 6 --out megatron_step_2_gpus.json
    torchrun --nproc-per-node 2 benchmarks/megatron_step.py --device cpu --shape tiny --layers 2 --tokens 64 --length 32

A GPT with EP over all ranks, Megatron's DDP with distributed optimizer, overlapped gradient reduction and parameter
gather, bf16, flash attention, fp32 router, and the same weights for all. Where Transformer Engine is installed, all but
the MoE layers is its kernels for every contestant, and stock routers and permutation are fused (megatron_model.py).
Contestants:

    MoELayer, TEGroupedMLP     stock: all-to-all, Transformer Engine's grouped GEMMs; needs Transformer Engine
    MoELayer, SequentialMLP    stock: the experts of Megatron-Core that train without it, one after the other
    sonic_ep                   ours
    sonic_ep, apportion        ours, with token rounding
    sonic_ep, fused router     ours, with our router's kernels in place of Megatron's router; with rounding, too
    sonic_ep, graphs           ours, with Megatron's CUDA graphs of router and preprocessing; its rounds come last

A round builds one model after the other, each in the memory of the last, and its contestants take their turns of
--seconds. A turn begins once its contestant has no launches left to record. Medians over --rounds, and the largest of
all ranks, in milliseconds unless said otherwise:

    step, host            forward and backward of --micro-batches, and optimizer, back to back; its calls until they
                          return
    tokens_per_second     of one GPU
    mfu                   pretrain_model.flops_per_token, as a share of the card's dense bf16 peak
    peak_gib              the most that torch allocated in a turn of steps
    layer, layer_host     forward and backward of the first MoE layer, back to back, as in a microbatch that is not the
                          last: gradients of weights go to main_grad; its calls until they return
    layer_tflops          18 T K d n / layer, in TFLOP/s of a rank: what tokens need, without the router
    layer_device          the same, launched while the device is busy: forward and backward, each from when all devices
                          are free until this one is done. The stock dispatcher is given its row counts, for which it
                          would wait
    saved_mib             what one MoE layer holds between forward and backward, without input and output
    first_loss            of the first rank before any step: contestants without rounding agree but for bf16

With graphs the layer is not called alone. What fails is in `errors`, and the others go on.
"""

import argparse
import json
import logging
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from across_ranks import timed
from host_time import Clock, machine
from megatron_model import FAMILIES, GRAPHED, TE_GROUPED, Model, has_te, known_sizes, megatron, release_memory
from pretrain_model import DENSE, flops_per_token
from step_options import parsed_options, start_rank, step_parser, train_until_recorded
from torch import Tensor

from sonic_ep import EPGroup, load_config
from sonic_ep.kernels.common.versions import installed_version

WARM_UP = 5  # steps of a new model, or calls of a layer alone, which records its launches in them
SHARE_OF_LAYER = 0.3  # of a turn's seconds
HIDDEN = 4  # samples of layer_device in a turn
BUSY = 60_000_000  # cycles, some 35 ms: longer than the launches of a stock layer's forward or backward
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0}  # dense bf16
LAST_LINES = 6  # of an error
VERSIONS = ("megatron-core", "transformer-engine", "flash-attn")


class LayerAlone:
    """The first MoE layer of a model on random rows."""

    def __init__(self, layer: Any, options: argparse.Namespace) -> None:
        self.layer, parameter = layer, layer.experts.parameters()
        d, B = layer.config.hidden_size, options.tokens // options.length
        like: dict[str, Any] = {"device": options.device, "dtype": next(parameter).dtype}
        torch.manual_seed(dist.get_rank())
        self.x = torch.randn(options.length, B, d, **like).requires_grad_()
        self.dout = torch.randn(options.length, B, d, **like)

    def forward(self) -> Tensor:
        self.x.grad = None
        return self.layer(self.x)[0]

    def step(self) -> None:
        self.forward().backward(self.dout)

    def saved_bytes(self) -> int:
        self.x.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        out = self.forward()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
        out.backward(self.dout)
        return held

    def device_ms(self) -> float:
        """Returns median milliseconds of forward and backward with their launches hidden."""
        with known_sizes(self.layer):
            self.step()
            times = []
            for _ in range(HIDDEN):
                self.x.grad = None
                forward, out = timed(lambda: self.layer(self.x)[0], backlog=BUSY)
                times.append(forward + timed(lambda out=out: out.backward(self.dout), backlog=BUSY)[0])
        return statistics.median(times)


class Race:
    def __init__(self, options: argparse.Namespace, clock: Clock) -> None:
        self.options, self.clock, self.on_gpu = options, clock, options.device == "cuda"
        self.turns: dict[str, list[dict[str, float]]] = {}
        self.steps: dict[str, int] = {}
        self.first_losses: dict[str, float] = {}
        self.errors: dict[str, str] = {}
        if not has_te():
            self.errors[TE_GROUPED] = "Transformer Engine is not installed, or there is no GPU"
        if not has_te() and self.on_gpu:
            self.errors[GRAPHED] = "Megatron's graphs need Transformer Engine"

    def run(self) -> None:
        families = [family for family in FAMILIES if GRAPHED not in family]
        for number in range(self.options.rounds):
            for family in families:
                self.round(family)
            self.report(f"round {number + 1}")
        if self.on_gpu:
            for number in range(self.options.rounds):
                self.round((GRAPHED,))
                self.report(f"graphs, round {number + 1}")

    def round(self, family: tuple[str, ...]) -> None:
        """Builds the model of a family, lets its contestants take their turns, and frees it."""
        only = self.options.only
        names = [name for name in family if name not in self.errors and (only is None or name in only)]
        if not names:
            return
        start, built = time.perf_counter(), []
        self.attempt(names[0], lambda: built.append(Model(family, self.options)))
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

    def first_loss(self, name: str, model: Model) -> None:
        if name not in self.first_losses:
            model.choose(name)
            self.first_losses[name] = model.loss()

    def turn(self, name: str, model: Model) -> None:
        model.choose(name)
        is_first, start = name not in self.steps, time.perf_counter()
        self.clock.back_to_back(model.step, WARM_UP)
        train_until_recorded(model.step, model.num_recorded, self.clock)
        if name == GRAPHED:
            model.capture()
            self.clock.back_to_back(model.step, WARM_UP)
        if is_first:
            estimate = self.clock.largest({"ms": self.clock.back_to_back(model.step, 2)[0]})["ms"]
            self.steps[name] = max(2, round(1000 * self.options.seconds / estimate))
            say(f"{name}: warm after {time.perf_counter() - start:.1f} s, {estimate:.1f} ms a step")
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times: dict[str, float] = {}
        times["step"], times["host"] = self.clock.back_to_back(model.step, self.steps[name])
        if self.on_gpu:
            times["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if name != GRAPHED:
            with model.outside_steps():
                times |= self.layer_times(LayerAlone(model.layers[0], self.options))
        self.turns.setdefault(name, []).append(times)

    def layer_times(self, alone: LayerAlone) -> dict[str, float]:
        self.clock.back_to_back(alone.step, WARM_UP)
        estimate = self.clock.largest({"ms": self.clock.back_to_back(alone.step, 2)[0]})["ms"]
        steps = max(2, round(1000 * SHARE_OF_LAYER * self.options.seconds / estimate))
        times: dict[str, float] = {}
        times["layer"], times["layer_host"] = self.clock.back_to_back(alone.step, steps)
        if self.on_gpu:
            times["saved_mib"] = alone.saved_bytes() / 2**20
            times["layer_device"] = alone.device_ms()
        return times

    def figures(self) -> dict[str, dict[str, float]]:
        """Returns medians by contestant, the largest of all ranks."""
        options, moe, dense = self.options, load_config(self.options.shape), DENSE[self.options.shape]
        results = {}
        for name, turns in self.turns.items():
            times = self.clock.largest({key: statistics.median(turn[key] for turn in turns) for key in turns[0]})
            rate = 1000 * options.micro_batches * options.tokens / times["step"]
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
        names = ("shape", "layers", "micro_batches", "tokens", "length", "attention")
        sizes = {key: getattr(self.options, key) for key in names}
        record = {"command": sys.argv, "machine": machine(self.options.device), "ranks": dist.get_world_size()}
        record["machine"]["packages"] |= {name: installed_version(name) for name in VERSIONS}
        record |= {**sizes, "contestants": figures, "errors": self.errors}
        if self.options.out is not None:
            self.options.out.write_text(json.dumps(record, indent=1) + "\n")
        for name, each in figures.items():
            print(f"{when}  {name:34}", " ".join(f"{key} {value:.4g}" for key, value in each.items()), flush=True)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def parsed() -> argparse.Namespace:
    parser = step_parser(__doc__, shape="qwen3_30b_a3b", shapes=DENSE, tokens=8192, seconds=1.5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--micro-batches", type=int, default=1, help="of --tokens each, before the optimizer's step")
    parser.add_argument("--attention", choices=("te", "torch"), default="te", help="te: where it is installed")
    return parsed_options(parser)


def main() -> None:
    options = parsed()
    warnings.filterwarnings("ignore")
    logging.basicConfig()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    start_rank(options.device)
    with megatron(options):
        Race(options, Clock(EPGroup(), options.device)).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
