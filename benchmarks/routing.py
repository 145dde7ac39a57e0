"""From logits to index lists: choice, counts, rounding, selection, weights and plan, in microseconds of device time.

    python benchmarks/routing.py --out results.json [--shape qwen3_30b_a3b ...]
    torchrun --nproc-per-node 4 benchmarks/routing.py --out results.json      # with the all-gather of counts

All that is timed is captured in a CUDA graph, so launches cost nothing; on several ranks the slowest counts. One rank
ends with the index lists of its pair buffer, several with the plan, since what follows is the dispatch. In the same
run, on one rank: the local layer's forward on the kernels (plain top-K), the same routing in plain torch on the GPU
(eager, for it reads sizes), sonic-moe's top-K and index lists, and Megatron-Core's choice where they are installed.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from runs import group_of_ranks, leave, new_record, parser_of, say, write
from sonic_ep import EPGroup, MoEConfig, RoundingConfig, load_config
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.functional import moe
from sonic_ep.kernels import backend as operations
from sonic_ep.kernels.common.replaced import replaced
from sonic_ep.routers.route import RoutingContext
from sonic_ep.routers.router import route
from sonic_ep.routing import Routing
from sonic_ep.transports import transport_for
from timing import captured_us, eager_us, slowest

# By config: tokens of a rank.
TOKENS = {"sonic_7b": 24576, "qwen3_30b_a3b": 16384, "qwen3_next_80b_a3b": 16384, "deepseek_v3": 8192}
SMALL = ("qwen3_30b_a3b", 8192)
MODES = ("off", "nearest", "apportion")


class Case:
    """One shape in one mode. logits_TE: of random tokens and weights, so that experts are as unequal as at the start of
    training."""

    def __init__(self, config: MoEConfig, T: int, mode: str, group: EPGroup) -> None:
        self.config = MoEConfig(
            d=config.d,
            n=config.n,
            E=config.E,
            K=config.K,
            router=config.router,
            rounding=RoundingConfig(mode=mode),  # type: ignore[arg-type]
        )
        self.group, self.T = group, T
        torch.manual_seed(group.rank)
        self.x_TH = torch.randn(T, config.d, device="cuda", dtype=torch.bfloat16)
        self.logits_TE = torch.randn(T, config.E, device="cuda")
        self.bias_E = torch.zeros(config.E, device="cuda") if config.router.expert_bias else None
        self.context = RoutingContext(
            config=self.config,
            group=group,
            dtype=torch.bfloat16,
            training=True,
            exchange=transport_for(group),
        )

    def route(self) -> Routing:
        given = self.x_TH, self.logits_TE, self.bias_E, self.context
        return route(self, *given, sequence_length=self.T).routing

    def to_lists(self) -> Any:
        routing = self.route()
        plan = plan_for(routing.counts, self.group.rank)
        return LocalTransport().prepare(routing, plan) if self.group.size == 1 else plan

    def forward(self) -> Callable[[], Tensor]:
        """The experts' forward on this routing."""
        c, bf16 = self.config, {"dtype": torch.bfloat16, "device": "cuda"}
        w1_eJH = torch.randn(c.E, 2 * c.n, c.d, **bf16) * 0.02  # type: ignore[call-overload]
        w2_eHI = torch.randn(c.E, c.d, c.n, **bf16) * 0.02  # type: ignore[call-overload]
        transport, routing = LocalTransport(), self.route()
        return lambda: moe(self.x_TH, routing, w1_eJH, w2_eHI, transport=transport, group=self.group)

    def sonic_moe(self) -> Callable[[], Any]:
        """Its softmax top-K and the lists it makes of it; no rounding."""
        from sonicmoe.functional import TC_Softmax_Topk_Router_Function, TC_topk_router_metadata_triton

        E, N = self.config.E, self.T * self.config.K
        sizes = (E, E + 1, N, N, N)
        logits_TE = self.logits_TE.bfloat16()

        def call() -> None:
            _, ids_TK = TC_Softmax_Topk_Router_Function.apply(logits_TE, E, self.config.K, False, True)
            lists = [torch.empty(size, dtype=torch.int32, device="cuda") for size in sizes]
            TC_topk_router_metadata_triton(ids_TK, E, *lists)

        return call

    def megatron(self) -> Callable[[], Any]:
        """Its choice alone, without the permutation that its dispatcher makes of it."""
        from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

        router = self.config.router
        grouped = router.num_groups > 1
        return lambda: topk_routing_with_score_function(
            self.logits_TE,
            self.config.K,
            num_groups=router.num_groups if grouped else None,
            group_topk=router.groups_per_token if grouped else None,
            score_function=router.score,
            expert_bias=self.bias_E,
        )


def in_plain_torch(call: Callable[[], Any]) -> float:
    operations._router_on_gpu.cache_clear()
    try:
        with replaced(operations, _has_triton=lambda: False):
            return eager_us(call)
    finally:
        operations._router_on_gpu.cache_clear()


def times_of(case: Case) -> dict[str, float]:
    times = {"sonic_ep": captured_us(case.to_lists)}
    if case.group.size == 1:
        times["sonic_ep, eager launches"] = eager_us(case.to_lists)
        times["plain torch, eager"] = in_plain_torch(case.to_lists)
        if case.config.rounding.mode == "off":
            times["local layer, forward"] = captured_us(case.forward())
            if find_spec("sonicmoe") is not None:
                times["sonic-moe, top-K and lists"] = captured_us(case.sonic_moe())
            if find_spec("megatron") is not None:
                times["Megatron-Core, choice, eager"] = eager_us(case.megatron())
    return {name: round(slowest(time, case.group), 1) for name, time in times.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=TOKENS, nargs="+", default=list(TOKENS))
    options = parser.parse_args()
    group = group_of_ranks()
    record = new_record(unit="microseconds", cases=[])
    for shape, T in [*((shape, TOKENS[shape]) for shape in options.shape), SMALL]:
        config = load_config(shape)
        for mode in MODES:
            times = times_of(Case(config, T, mode, group))
            case = {"shape": shape, "T": T, "E": config.E, "K": config.K, "mode": mode, "times": times}
            record["cases"].append(case)
            say(f"{shape:20} T={T} E={config.E} K={config.K} {mode:10} {times}")
            write(record, options.out)
    leave()


if __name__ == "__main__":
    main()
