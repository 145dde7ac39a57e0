"""The expert-parallel layer over several GPUs: forward and backward of dispatch, experts and combine, by transport.

    torchrun --nproc-per-node 4 benchmarks/ep_layer.py --out results.json [--shape qwen3_30b_a3b ...] [--tokens 8192]
                                                       [--compiled]

Contestants alternate in one run; medians over rounds, the slowest rank counts. A layer starts from a routing (plain
top-K of random scores) and waits for whatever its transport waits for, launches included; "behind a backlog" the
devices have been busy and the host is ahead, as in the middle of a model, else they are idle. "symmetric, graph"
replays a CUDA graph of forward, or of forward and backward, whose difference is its backward. "with router" is a `MoE`
with rounded tokens, behind a backlog, and with `--compiled` also under torch.compile. TFLOP/s are of useful work of the
experts: 6 T K d n forward and 12 backward, a GPU.
"""

import functools
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from across_ranks import measure_layer, summary, topk_routing
from random_layer import layer_without_experts
from runs import group_of_ranks, leave, new_record, parser_of, say, shown, write
from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, TransportConfig, load_config
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.protocol import Transport
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.functional import moe
from sonic_ep.symmetric_memory import symmetric_memory
from timing import BACKLOG, captured, device_ms

SHAPES = ("qwen3_30b_a3b", "qwen3_next_80b_a3b", "sonic_7b")
WARM_UP, ROUNDS = 3, 15
CAPACITY = 1.25  # of static buffers
WITH_ROUTER = {
    "all_to_all": TransportConfig(kind="all_to_all"),
    "symmetric": TransportConfig(kind="symmetric"),
    "symmetric, static": TransportConfig(kind="symmetric", buffers="static"),
}


class Problem:
    def __init__(self, config: MoEConfig, T: int, group: EPGroup) -> None:
        self.config, self.group = config, group
        generator = torch.Generator("cuda").manual_seed(group.rank)
        bf16 = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        e = config.E // group.size
        self.x, self.dout = (torch.randn(T, config.d, **bf16) for _ in range(2))  # type: ignore[call-overload]
        self.w1 = torch.randn(e, 2 * config.n, config.d, **bf16) * 0.02  # type: ignore[call-overload]
        self.w2 = torch.randn(e, config.d, config.n, **bf16) * 0.02  # type: ignore[call-overload]
        for leaf in (self.x, self.w1, self.w2):
            leaf.requires_grad_()
        routing = topk_routing(T, config.E, config.K, group, generator)
        received_Q = routing.counts.rows_SE.sum(0).view(group.size, e).sum(1)
        most = round(CAPACITY * T * config.K)
        assert int(received_Q.max()) <= most
        self.routing = replace(routing, max_received=most)

    def layer(self, transport: Transport) -> Callable[[], Tensor]:
        return lambda: moe(self.x, self.routing, self.w1, self.w2, transport=transport, group=self.group)

    def with_router(self, transport: TransportConfig) -> MoE:
        rounding = RoundingConfig(capacity_factor=CAPACITY)
        config = replace(self.config, shared_n=0, shared_gate=False, rounding=rounding, transport=transport)
        layer = layer_without_experts(config, self.group, router_std=config.d**-0.5)  # logits of unit scale
        layer.experts.w1.data, layer.experts.w2.data = self.w1.data, self.w2.data
        return layer

    def step(self, transport: Transport) -> tuple[Tensor, ...]:
        y = self.layer(transport)()
        return torch.autograd.grad(y, [self.x, self.w1, self.w2], self.dout)


def measure(
    problem: Problem, transports: dict[str, Transport], static: Transport, *, compiled: bool
) -> dict[str, dict[str, float]]:
    samples: dict[str, list[dict[str, float]]] = {}
    layers = {name: problem.with_router(config) for name, config in WITH_ROUTER.items()}
    models: dict[str, Any] = {f"{name}, with router": each for name, each in layers.items()}
    if compiled:
        models |= {f"{name}, compiled": torch.compile(each, fullgraph=True) for name, each in layers.items()}
    leaves = [problem.x, problem.w1, problem.w2]
    forward = captured(problem.layer(static))
    both = captured(lambda: problem.step(static))
    for number in range(WARM_UP + ROUNDS):
        sample = {}
        for name, transport in transports.items():
            layer = problem.layer(transport)
            sample[name] = measure_layer(layer, leaves, problem.dout)
            behind = measure_layer(layer, leaves, problem.dout, backlog=BACKLOG)
            sample[f"{name}, behind a backlog"] = behind
        for name, model in models.items():
            sample[name] = measure_layer(
                # one sequence: a router that balances each wants (B, L, d)
                lambda model=model: model(problem.x.unsqueeze(0)).y.squeeze(0),
                [problem.x, *model.parameters()],
                problem.dout,
                backlog=BACKLOG,
            )
        for name, backlog in (("symmetric, graph", 0), ("symmetric, graph, behind a backlog", BACKLOG)):
            forward_ms, both_ms = (device_ms(graph, backlog=backlog)[0] for graph in (forward, both))
            sample[name] = {"forward_ms": forward_ms, "backward_ms": both_ms - forward_ms}
        if number >= WARM_UP:
            for name, each in sample.items():
                samples.setdefault(name, []).append(each)
    return {name: summary(each) for name, each in samples.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    parser.add_argument("--compiled", action="store_true", help="time `MoE` under torch.compile too")
    options = parser.parse_args()
    group = group_of_ranks()
    allocate = functools.partial(symmetric_memory, group, torch.device("cuda", torch.cuda.current_device()))
    exact: dict[str, Transport] = {
        "all_to_all": AllToAllTransport(group),
        "symmetric": SymmetricTransport(group, allocate, timeout=60),
    }
    record = new_record(cases=[])
    for name in options.shape:
        config = load_config(name)
        for T in options.tokens:
            static = SymmetricTransport(group, allocate, timeout=60, static=True)
            problem = Problem(config, T, EPGroup())  # which has transports of its own, and static ones keep to their T
            transports = {**exact, "symmetric, static": static}
            times = measure(problem, transports, static, compiled=options.compiled)
            del problem, transports, static
            gc.collect()
            torch.cuda.empty_cache()
            useful = 6 * T * config.K * config.d * config.n / 1e9
            for each in times.values():
                each["forward_tflops"] = useful / each["forward_ms"]
                each["backward_tflops"] = 2 * useful / each["backward_ms"]
            record["cases"].append({"shape": name, "T": T, "times": times})
            for transport, each in times.items():
                say(f"{name:20} T={T} {transport:36} {shown(each)}")
            write(record, options.out)
    leave()


if __name__ == "__main__":
    main()
