"""Token rounding against plain top-K on one GPU: the whole layer, forward and backward, router time included and apart.

    python benchmarks/token_rounding.py --out results.json [--shape sparse_256]

The same layer, tokens and weights with rounding "off" and "nearest" (every expert's count to the nearest multiple of
128), the latter with exact and with static buffers, taking turns in one run; "off" also with tiles that are computed
whole, as sonic-moe has them, where ours compute an expert's last tile only as far as it has rows. That layer runs as
code, the others as programs. `router` is the router's forward alone: scores, choice, decision, selection, weights.
`experts` is `sonic_ep.functional.moe` on either routing. Times are medians over CUDA events. The device has a backlog
when the host begins, as in the middle of a model; where rounding makes the host wait for sizes, the time that the
device then waits for launches is in. changed_share is the share of pairs that rounding changed.
"""

import dataclasses
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from other_kernels import whole_tiles
from random_layer import layer_without_experts
from runs import new_record, parser_of, shown, write
from sonic_ep import EPGroup, MoEConfig, RoundingConfig, TransportConfig
from sonic_ep.config import Buffers, RoundingMode
from sonic_ep.functional import moe
from sonic_ep.transports import transport_for
from timing import BACKLOG

# T, E, K, d, n. The first: few tokens per expert (2 tiles each), where the paper's gain is largest.
SHAPES = {
    "sparse_256": (16384, 256, 4, 2048, 1024),
    "qwen3_next_80b_a3b": (16384, 512, 10, 2048, 512),
}
WHOLE_TILES = "off, whole tiles"
MODES: dict[str, tuple[RoundingMode, Buffers]] = {
    "off": ("off", "exact"),
    WHOLE_TILES: ("off", "exact"),
    "nearest": ("nearest", "exact"),
    "nearest, static": ("nearest", "static"),
}
CAPACITY = 1.25  # of static buffers; rounding to the nearest tile stays far below it
Timed = tuple[float, float]


def between(begin: Callable[[], Any], end: Callable[[Any], Any]) -> Timed:
    """Milliseconds of the two halves of a step: forward, and backward of what it returned."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda._sleep(BACKLOG)  # a backlog, as in the middle of a model: the host is ahead until it waits
    marks[0].record()
    result = begin()
    marks[1].record()
    end(result)
    marks[2].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])


class Contestant:
    """One layer and its steps. Every contestant of a race has the same weights."""

    def __init__(self, config: MoEConfig, mode: str, T: int) -> None:
        rounding_mode, buffers = MODES[mode]
        capacity = CAPACITY if buffers == "static" else None
        rounding = dataclasses.replace(config.rounding, mode=rounding_mode, capacity_factor=capacity)
        transport = TransportConfig(buffers=buffers)
        # As code: a program has one counter for all of its launches, which quack's kernels do not return to zero.
        as_programs = mode != WHOLE_TILES
        config = config.replace(rounding=rounding, transport=transport, record_launches=as_programs)
        self.layer = layer_without_experts(config, router_std=config.d**-0.5)  # logits of unit scale
        generator = torch.Generator("cuda").manual_seed(0)
        for parameter in self.layer.experts.parameters():
            torch.nn.init.normal_(parameter, std=config.init_std, generator=generator)
        self.x = torch.randn(T, config.d, device="cuda", generator=generator).bfloat16().requires_grad_()
        self.dy = torch.randn(T, config.d, device="cuda", generator=generator).bfloat16()
        self.group = EPGroup.alone()
        self.transport = transport_for(self.group, config.transport)
        with torch.no_grad():
            self.routed = self.layer.router(self.x, group=self.group, sequence_length=T)

    def step(self) -> Timed:
        inputs = [self.x, *self.layer.parameters()]
        return between(lambda: self.layer(self.x).y, lambda y: torch.autograd.grad(y, inputs, self.dy))

    def experts(self) -> Timed:
        w1, w2 = self.layer.experts.w1, self.layer.experts.w2
        pair_weights = self.routed.routing.weights_N.detach().requires_grad_()
        routing = dataclasses.replace(self.routed.routing, weights_N=pair_weights)

        def forward() -> Tensor:
            return moe(self.x, routing, w1, w2, transport=self.transport, group=self.group)

        return between(forward, lambda y: torch.autograd.grad(y, [self.x, w1, w2, pair_weights], self.dy))

    @torch.no_grad()
    def router(self) -> Timed:
        return between(
            lambda: self.layer.router(self.x, group=self.group, sequence_length=self.x.shape[0]), lambda _: None
        )


def race(contestants: dict[str, Contestant], rounds: int) -> dict[str, dict[str, float]]:
    times: dict[str, dict[str, list[Timed]]] = {
        mode: {"layer": [], "experts": [], "router": []} for mode in contestants
    }
    for round_number in range(rounds + 3):
        for mode, contestant in contestants.items():
            with whole_tiles() if mode == WHOLE_TILES else nullcontext():
                measured = {"layer": contestant.step(), "experts": contestant.experts(), "router": contestant.router()}
            if round_number >= 3:
                for name, value in measured.items():
                    times[mode][name].append(value)
    results: dict[str, dict[str, float]] = {}
    for mode, contestant in contestants.items():
        row: dict[str, float] = {}
        for name, values in times[mode].items():
            row[f"{name}_forward_ms"] = statistics.median(a for a, _ in values)
            if name != "router":
                row[f"{name}_backward_ms"] = statistics.median(b for _, b in values)
        row["changed_share"] = float(contestant.routed.stats().changed_share)
        results[mode] = row
    return results


def main() -> None:
    parser = parser_of(__doc__, out_required=True)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    results = new_record(shapes={})
    for shape in options.shape:
        T, E, K, d, n = SHAPES[shape]
        config = MoEConfig(d=d, n=n, E=E, K=K, rounding=RoundingConfig())
        record = race({mode: Contestant(config, mode, T) for mode in MODES}, options.rounds)
        print(shape, SHAPES[shape], flush=True)
        for mode, row in record.items():
            total = row["layer_forward_ms"] + row["layer_backward_ms"]
            print(f"  {mode:16} {total:.3f} ms", shown(row), flush=True)
        results["shapes"][shape] = {"sizes": SHAPES[shape], "modes": record}
        write(results, options.out)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
