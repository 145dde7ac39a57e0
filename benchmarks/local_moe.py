"""The local MoE layer, forward and backward, against sonic-moe and a plain torch grouped_mm layer, on one GPU.

    python benchmarks/local_moe.py --out results.json [--shape sonic_7b ...]

All contestants get the same tokens, weights and (token, expert, score) pairs and take turns in one run. The router is
left out, index lists are not: `sonic_ep` is `sonic_ep.functional.moe` from a routing, `sonic_moe` is
`moe_general_routing_inputs` of the sonic-moe 0.1.2 wheel, whose GEMMs quack autotunes before the clock starts, and
`sonic_ep_kernels`, timed right after the others, is our work once its lists exist. Times are medians over CUDA events;
kept is what autograd holds after forward beside inputs, weights and output.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sonic_ep import EPGroup, Routing, load_config
from sonic_ep.functional import moe, transport_for
from sonic_ep.kernels import expert_mlp
from sonic_ep.kernels.activations import activation_named
from sonic_ep.kernels.cuda import operations
from sonic_ep.kernels.expert_mlp import ExpertWeights, PairLists

TOKENS = {"sonic_7b": 24576, "qwen3_30b_a3b": 16384, "qwen3_next_80b_a3b": 16384}  # by config
Step = Callable[[], tuple[Tensor, list[Tensor]]]


class Problem:
    """Random tokens, weights and a plain top-K routing, as leaves that want gradients."""

    def __init__(self, T: int, E: int, K: int, d: int, n: int) -> None:
        self.T, self.E = T, E

        def leaf(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, device="cuda") * scale).bfloat16().requires_grad_(True)

        self.x = leaf(T, d)
        self.w1, self.w2 = leaf(E, 2 * n, d, scale=d**-0.5), leaf(E, d, n, scale=n**-0.5)
        self.dout = torch.randn(T, d, device="cuda").bfloat16()
        scores, ids = torch.rand(T, E, device="cuda").topk(K)
        self.experts = ids.flatten()
        self.tokens = torch.arange(T, device="cuda").repeat_interleave(K)
        self.gates = (scores / scores.sum(1, keepdim=True)).flatten().requires_grad_(True)
        self.flops = 6 * T * K * d * n

    def sonic_ep(self) -> Step:
        group = EPGroup.alone()
        routing = Routing.from_pairs(
            self.tokens, self.experts, self.gates.detach(), num_tokens=self.T, E=self.E, group=group
        )
        gates = routing.gates_N.requires_grad_(True)
        transport = transport_for(group)
        inputs = [self.x, self.w1, self.w2, gates]
        return lambda: (moe(self.x, routing, self.w1, self.w2, transport=transport, group=group), inputs)

    def kernels(self) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Forward and backward of the kernels alone."""
        order = torch.argsort(self.experts * self.T + self.tokens)
        rows = self.tokens[order].int()
        starts = F.pad(torch.bincount(self.experts, minlength=self.E).cumsum(0), (1, 0)).int()
        by_row = rows.long().sort(stable=True)
        row_starts = torch.searchsorted(by_row.values, torch.arange(self.T + 1, device="cuda")).int()
        lists = PairLists(rows, by_row.indices.int(), row_starts, starts)
        gates, act = self.gates.detach()[order].contiguous(), activation_named("swiglu")
        weights = ExpertWeights(self.w1.detach(), self.w2.detach())
        ops: Any = operations
        x = self.x.detach()
        _, h = expert_mlp.forward(ops, x, gates, weights, lists, act)

        def backward() -> None:
            grads, _ = expert_mlp.backward_activations(ops, self.dout, h, gates, weights, lists, act)
            expert_mlp.backward_up_weights(ops, x, grads, lists)
            expert_mlp.backward_down_weights(ops, self.dout, grads, lists)

        return lambda: expert_mlp.forward(ops, x, gates, weights, lists, act), backward

    def sonic_moe(self) -> Step:
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs

        w1, w2 = self.w1.permute(1, 2, 0), self.w2.permute(1, 2, 0)
        tokens, experts = self.tokens.int(), self.experts.int()
        inputs = [self.x, self.w1, self.w2, self.gates]
        stream = torch.cuda.current_stream().cuda_stream

        def forward() -> tuple[Tensor, list[Tensor]]:
            arguments = (self.x, self.gates, tokens, experts, w1, None, w2, None, self.E, stream)
            return moe_general_routing_inputs(*arguments, ActivationType.SWIGLU)[0], inputs

        return forward

    def torch_grouped(self) -> Step:
        inputs = [self.x, self.w1, self.w2, self.gates]

        def forward() -> tuple[Tensor, list[Tensor]]:
            order = self.experts.sort(stable=True).indices
            tokens = self.tokens[order]
            ends = torch.bincount(self.experts, minlength=self.E).cumsum(0).int()
            h = torch._grouped_mm(self.x[tokens], self.w1.mT, offs=ends)
            a = F.silu(h[:, ::2]) * h[:, 1::2]
            y = torch._grouped_mm(a, self.w2.mT, offs=ends) * self.gates[order, None]
            out = torch.zeros(self.T, self.x.shape[1], device="cuda").index_add(0, tokens, y.float())
            return out.bfloat16(), inputs

        return forward


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # a backlog, so that Python's launches are ahead of the device
    start.record()
    result = call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop), result


def race(problem: Problem, steps: dict[str, Step], rounds: int) -> dict[str, dict[str, float]]:
    """Median forward and backward milliseconds and kept MiB of each contestant, taking turns."""
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for round_number in range(rounds + 2):
        for name, step in steps.items():
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            forward_ms, (out, inputs) = timed(step)
            kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
            backward_ms, _ = timed(lambda out=out, inputs=inputs: torch.autograd.grad(out, inputs, problem.dout))
            del out
            if round_number >= 2:
                times[name].append((forward_ms, backward_ms, kept / 2**20))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    keys = ("forward_ms", "backward_ms", "kept_mib")
    return {name: dict(zip(keys, values, strict=True)) for name, values in medians.items()}


def check(problem: Problem, steps: dict[str, Step]) -> dict[str, float]:
    """Relative error of every contestant's output and dx to the first one's."""
    results = {}
    for name, step in steps.items():
        out, inputs = step()
        results[name] = (out.float(), torch.autograd.grad(out, inputs[:1], problem.dout)[0].float())
    first = next(iter(results.values()))
    return {
        name: max(
            float((got - want).detach().norm() / want.detach().norm()) for got, want in zip(result, first, strict=True)
        )
        for name, result in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=TOKENS, nargs="+", default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "shapes": {}}
    for shape in options.shape:
        torch.manual_seed(0)
        config = load_config(shape)
        sizes = (TOKENS[shape], config.E, config.K, config.d, config.n)
        problem = Problem(*sizes)
        steps = {"torch_grouped_mm": problem.torch_grouped(), "sonic_ep": problem.sonic_ep()}
        if find_spec("sonicmoe") is not None:
            steps["sonic_moe"] = problem.sonic_moe()
        errors = check(problem, steps)
        record = race(problem, steps, options.rounds)
        forward, backward = problem.kernels()
        alone = [(timed(forward)[0], timed(backward)[0]) for _ in range(options.rounds + 2)][2:]
        record["sonic_ep_kernels"] = {
            "forward_ms": statistics.median(a for a, _ in alone),
            "backward_ms": statistics.median(b for _, b in alone),
        }
        print(shape, dict(zip("TEKdn", sizes, strict=True)), "errors to torch", errors, flush=True)
        for name, row in record.items():
            total = row["forward_ms"] + row["backward_ms"]
            rate = 3 * problem.flops / total / 1e9
            text = " ".join(f"{key} {value:.3f}" for key, value in row.items())
            print(f"  {name:18} {text} both {total:.3f} ms ({rate:.0f} TFLOP/s)", flush=True)
        results["shapes"][shape] = {"sizes": sizes, "errors": errors, "contestants": record}
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        del problem, steps
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
