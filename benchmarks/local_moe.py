"""The local MoE layer, forward and backward, against sonic-moe and a plain torch grouped_mm layer, on one GPU.

    python benchmarks/local_moe.py --out results.json [--shape sonic_7b ...] [--only sonic_moe sonic_moe_layer]
                                   [--short-tuning] [--tuning tuned.json]

All contestants get the same tokens and weights and take turns in one run, in two races. *Experts*: the (token, expert,
gate) pairs of a top-K routing are given, their index lists are not: `sonic_ep` is `sonic_ep.functional.moe`,
`sonic_moe` is `moe_general_routing_inputs` of the sonic-moe 0.1.2 wheel, whose GEMMs quack autotunes before the clock
starts. *Layer*: with a softmax top-K router and its gradients: `sonic_ep_layer` is `sonic_ep.MoE`, rounding off, fp32
router; `sonic_ep_layer_bf16_router` is it with `router.linear_dtype="input"`; `sonic_moe_layer` is
`moe_TC_softmax_topk_layer`, bf16 router. `sonic_ep_kernels`, timed right after them, is our work once its lists exist.
Times are medians over CUDA events; kept is what autograd holds after forward beside inputs, weights and output; peak is
the most that backward holds beside those, the gradients it returns left out. With `--only` some of them race:
sonic-moe on the quack that pip gives it, which is not ours, must be a process of its own, in turns with the others.
`--short-tuning` spares minutes of its tuning where GEMMs are large (short_tuning.py), `--tuning` all of it where the
file holds what an earlier run has found; what is missing is found and added (tuned_choices.py).
"""

import dataclasses
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from across_ranks import measure_layer, summary
from layer_contestants import grouped_mm_experts, sonic_moe_layer
from local_problem import LocalProblem, topk_pairs
from random_layer import layer_without_experts
from runs import new_record, parser_of, shown, write
from sonic_ep import EPGroup, MoEConfig, RoundingConfig, RouterConfig, load_config
from sonic_ep.config import LinearDtype
from sonic_ep.functional import moe
from sonic_ep.transports import transport_for
from timing import BACKLOG, medians_ms
from tuned_choices import restore, save_choices

# Tokens by config: as the paper has them, else 16384, and less where weights and gradients take most of the memory.
TOKENS = {
    "sonic_1_4b": 40960,
    "sonic_7b": 24576,
    "sonic_30b": 32768,
    "sonic_120b": 32768,
    "qwen3_30b_a3b": 16384,
    "qwen3_next_80b_a3b": 16384,
    "qwen3_235b_a22b": 16384,
    "olmoe": 16384,
    "mixtral_8x7b": 16384,
    "mixtral_8x22b": 16384,
    "deepseek_v3": 16384,
    "kimi_k2": 16384,
}
PAPER = ["sonic_7b", "qwen3_30b_a3b", "qwen3_next_80b_a3b"]
OURS = ("sonic_ep", "sonic_ep_layer", "sonic_ep_layer_bf16_router", "sonic_ep_kernels")
OTHERS = ("torch_grouped_mm", "sonic_moe", "sonic_moe_layer")


class Step(NamedTuple):
    """inputs: the leaves that `forward` computes from."""

    forward: Callable[[], Tensor]
    inputs: list[Tensor]


class Problem(LocalProblem):
    """A plain top-K routing of random scores, and every contestant's step on it."""

    def __init__(self, T: int, config: MoEConfig) -> None:
        super().__init__(topk_pairs(T, config.E, config.K), T, config.E, config.d, config.n)
        self.config = config
        self.flops = 6 * self.P * self.d * self.n

    def experts(self, wanted: Collection[str]) -> dict[str, Step]:
        makers = {"torch_grouped_mm": self.torch_grouped, "sonic_ep": self.sonic_ep, "sonic_moe": self.sonic_moe}
        return {name: make() for name, make in makers.items() if name in wanted}

    def layers(self, wanted: Collection[str]) -> dict[str, Step]:
        makers: dict[str, Callable[[], Step]] = {
            "sonic_ep_layer": lambda: self.sonic_ep_layer("float32"),
            "sonic_ep_layer_bf16_router": lambda: self.sonic_ep_layer("input"),
            "sonic_moe_layer": self.sonic_moe_layer,
        }
        return {name: make() for name, make in makers.items() if name in wanted}

    def sonic_ep(self) -> Step:
        group = EPGroup.alone()
        pair_weights = self.routing.weights_N.detach().requires_grad_()
        routing = dataclasses.replace(self.routing, weights_N=pair_weights)
        transport = transport_for(group)
        inputs = [self.x, self.w1, self.w2, pair_weights]
        return Step(lambda: moe(self.x, routing, self.w1, self.w2, transport=transport, group=group), inputs)

    def sonic_ep_layer(self, linear_dtype: LinearDtype) -> Step:
        c = self.config
        router = RouterConfig(linear_dtype=linear_dtype)
        config = MoEConfig(d=c.d, n=c.n, E=c.E, K=c.K, router=router, rounding=RoundingConfig(mode="off"))
        layer = layer_without_experts(config, router_std=config.init_std)
        layer.experts.w1.data, layer.experts.w2.data = self.w1.data, self.w2.data
        inputs = [self.x, layer.experts.w1, layer.experts.w2, layer.router.weight]
        return Step(lambda: layer(self.x).y, inputs)

    def sonic_moe(self) -> Step:
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs

        w1, w2 = self.w1.permute(1, 2, 0), self.w2.permute(1, 2, 0)
        tokens, experts = self.pairs.tokens.int(), self.pairs.experts.int()
        pair_weights = self.pairs.pair_weights.detach().requires_grad_()
        inputs = [self.x, self.w1, self.w2, pair_weights]
        stream = torch.cuda.current_stream().cuda_stream

        def forward() -> Tensor:
            arguments = (self.x, pair_weights, tokens, experts, w1, None, w2, None, self.E, stream)
            return moe_general_routing_inputs(*arguments, ActivationType.SWIGLU)[0]

        return Step(forward, inputs)

    def sonic_moe_layer(self) -> Step:
        router = (torch.randn(self.E, self.d, device="cuda") * self.d**-0.5).bfloat16().requires_grad_()
        inputs = [self.x, self.w1, self.w2, router]
        return Step(lambda: sonic_moe_layer(self.x, router, self.w1, self.w2, self.config.K).y, inputs)

    def torch_grouped(self) -> Step:
        pair_weights = self.pairs.pair_weights.detach().requires_grad_()
        inputs = [self.x, self.w1, self.w2, pair_weights]

        def forward() -> Tensor:
            order = self.pairs.experts.sort(stable=True).indices
            tokens = self.pairs.tokens[order]
            ends = torch.bincount(self.pairs.experts, minlength=self.E).cumsum(0).int()
            return grouped_mm_experts(self.x, self.w1, self.w2, tokens, ends, pair_weights[order])

        return Step(forward, inputs)


def race(problem: Problem, steps: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Returns medians of `measure_layer` of each contestant, taking turns."""
    turns = [
        {name: measure_layer(step.forward, step.inputs, problem.dout, backlog=BACKLOG) for name, step in steps.items()}
        for _ in range(rounds + 2)
    ]
    return {name: summary([turn[name] for turn in turns[2:]]) for name in steps}


def check(problem: Problem, steps: dict[str, Step]) -> dict[str, float]:
    """Relative error of every contestant's output and dx to the first one's."""
    results = {}
    for name, step in steps.items():
        out = step.forward()
        results[name] = (out.float(), torch.autograd.grad(out, step.inputs[:1], problem.dout)[0].float())
    first = next(iter(results.values()))
    return {
        name: max(
            float((got - want).detach().norm() / want.detach().norm()) for got, want in zip(result, first, strict=True)
        )
        for name, result in results.items()
    }


def main() -> None:
    parser = parser_of(__doc__, out_required=True)
    parser.add_argument("--shape", choices=TOKENS, nargs="+", default=PAPER)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=(*OURS, *OTHERS), nargs="+", help="default: all that are installed")
    parser.add_argument("--short-tuning", action="store_true", help="tune sonic-moe's GEMMs in fewer launches")
    parser.add_argument("--tuning", type=Path, help="what sonic-moe's tuning found, read and added to")
    options = parser.parse_args()
    if options.tuning is not None:
        restore(options.tuning)
    if options.short_tuning:
        from short_tuning import tune_in_short

        tune_in_short()
    installed = find_spec("sonicmoe") is not None
    wanted = options.only or [name for name in (*OURS, *OTHERS) if installed or not name.startswith("sonic_moe")]
    tuning = options.tuning.name if options.tuning is not None and options.tuning.exists() else None
    results = new_record(short_tuning=options.short_tuning, tuning=tuning, shapes={})
    for shape in options.shape:
        torch.manual_seed(0)
        config = load_config(shape)
        problem = Problem(TOKENS[shape], config)
        sizes = (problem.T, config.E, config.K, config.d, config.n)
        steps = problem.experts(wanted)
        errors = check(problem, steps) if steps else {}
        record = race(problem, steps, options.rounds) | race(problem, problem.layers(wanted), options.rounds)
        if "sonic_ep_kernels" in wanted:
            forward, backward = problem.kernels()
            calls = {"forward_ms": forward, "backward_ms": backward}
            record["sonic_ep_kernels"] = medians_ms(calls, options.rounds, backlog=BACKLOG)
        print(shape, dict(zip("TEKdn", sizes, strict=True)), "errors to the first", errors, flush=True)
        for name, row in record.items():
            total = row["forward_ms"] + row["backward_ms"]
            rate = 3 * problem.flops / total / 1e9
            print(f"  {name:26} {shown(row)} both {total:.3f} ms ({rate:.0f} TFLOP/s)", flush=True)
        results["shapes"][shape] = {"sizes": sizes, "errors": errors, "contestants": record}
        write(results, options.out)
        if options.tuning is not None:
            save_choices(options.tuning)
        del problem, steps
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
