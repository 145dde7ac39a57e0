"""A whole routing on the kernels, from logits to index lists, is the plain one, bit for bit: many random cases.

The kernels have tests of their own; here they meet. Scores are the fused kernel's on both sides, since its softmax may
differ from torch's in the last bit.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep.config import MoEConfig, RoundingConfig, RoundingMode, RouterConfig
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.route.linear import reference as linear
from sonic_ep.kernels.route.topk.reference import top_experts
from sonic_ep.routers.route import RoutingContext, decide_pairs
from sonic_ep.routers.router import Router
from sonic_ep.routers.topk import TopK, compute_topk
from sonic_ep.routers.weights_and_losses import weights_and_losses
from sonic_ep.routing import Routing
from tests.helpers.tolerances import assert_near
from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
CASES = 200 if DEVICE == "cuda" else 24
# The interpreter computes in numpy, which warns of inf - inf.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), *([pytest.mark.gpu] if DEVICE == "cuda" else [])]


@contextmanager
def routing_by(*, kernels: bool) -> Iterator[None]:
    """Every choice between plain torch and a kernel, made for all of them."""

    fused = import_module("sonic_ep.kernels.route.fused") if kernels else None
    made = {
        "routers.topk.router_operations": lambda *_: fused,
        "routers.weights_and_losses.router_operations": lambda *_: fused,
        "routers.route.allows_spare_capacity": lambda _: kernels,
        "dispatch.local.allows_spare_capacity": lambda _: kernels,
        "kernels.backend.runs_triton": lambda _: kernels,
    }
    with ExitStack() as stack:
        for name, value in made.items():
            stack.enter_context(patch(f"sonic_ep.{name}", value))
        yield


@dataclass(frozen=True)
class Case:
    config: MoEConfig
    logits_TE: Tensor
    bias_E: Tensor | None

    @classmethod
    def draw(cls, seed: int) -> "Case":
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        E = draw.choice([1, 2, 5, 8, 16, 33, 128] if DEVICE == "cuda" else [1, 2, 5, 8, 16])
        K = min(E, 16) if draw.random() < 0.2 else draw.randint(1, min(E, 16))
        T = draw.choice([1, 2, 31, 32, 33, 100, 257, 700] if DEVICE == "cuda" else [1, 2, 31, 33, 70])
        G = draw.choice([8, 16, 32, 128])
        rounding = RoundingConfig(
            mode=draw.choice(get_args(RoundingMode)),
            t=draw.choice(["auto", G, G // 2, 1]),
            G=G,
            capacity_factor=draw.choice([None, None, 1.0, 1.25]),
        )
        groups = draw.choice(
            [number for number in (1, 1, 2, 4) if number == 1 or (E % number == 0 and E >= 2 * number)]
        )
        router = RouterConfig(
            score=draw.choice(["softmax", "sigmoid"]),
            renormalize=draw.random() < 0.5 and (K > 1 or E == 1),
            expert_bias=draw.random() < 0.5,
            num_groups=groups,
            groups_per_token=draw.choice([each for each in range(1, groups + 1) if K <= each * (E // groups)]),
        )
        logits_TE = torch.randn(T, E, generator=generator)
        match draw.randrange(4):
            case 0:  # everything ties
                logits_TE = torch.full((T, E), 0.5)
            case 1:  # many do
                logits_TE = logits_TE.round()
            case 2:  # one expert gets nobody
                logits_TE[:, draw.randrange(E)] = -30.0
        bias_E = torch.randn(E, generator=generator).mul(0.01).to(DEVICE) if router.expert_bias else None
        config = MoEConfig(d=8, n=8, E=E, K=K, router=router, rounding=rounding)
        return cls(config, logits_TE.to(DEVICE), bias_E)

    def routed(self, topk: TopK) -> dict[str, Tensor]:
        """Every integer and weight of the routing that follows from a choice, and of its lists."""
        context = RoutingContext(config=self.config, group=EPGroup.alone(), dtype=torch.bfloat16, training=True)
        torch.manual_seed(1)  # what stochastic rounding draws
        chosen = decide_pairs(self, topk, context)
        T = self.logits_TE.shape[0]
        weights_N, _ = weights_and_losses(self.logits_TE, topk, chosen, T, self.config.router)
        plan = plan_for(chosen.counts, 0)
        prepared = LocalTransport().prepare(
            Routing(weights_N, chosen.token_ids_N, chosen.counts, T, chosen.max_rows), plan
        )
        N, P = (
            int(chosen.counts.pairs_SE.sum()),
            int(chosen.counts.rows_SE.sum()),
        )  # the kernels' lists have spare entries
        counts, handle = chosen.counts, prepared.handle
        return {
            "chosen_SE": chosen.counts.chosen_SE,
            **{f"counts.{name}": getattr(counts, name) for name in ("chosen_SE", "rows_SE", "pairs_SE", "cut_S", "t")},
            "tokens": chosen.token_ids_N[:N],
            "experts": chosen.expert_ids_N[:N],
            "chosen": chosen.chosen_N[:N],
            "gates": weights_N[:N],
            **{f"plan.{name}": value for name, value in plan._asdict().items()},
            "gates of rows": prepared.weights_P[:P],
            "row_of_pair": handle.row_of_pair_P[:P],
            "pairs_by_row": handle.pairs_by_row_V[:N],
            "pair_starts": handle.pair_starts_R,
            "slots": handle.slot_V[:N],
            "expert_starts": handle.expert_starts_e,
        }


@pytest.mark.parametrize("seed", range(CASES))
def test_the_kernels_route_as_plain_torch(seed: int) -> None:
    case = Case.draw(seed)
    with routing_by(kernels=True):
        topk = compute_topk(case.logits_TE, case.bias_E, case.config.K, case.config.router)
        by_kernels = case.routed(topk)
    assert torch.equal(topk.topk_ids_TK, top_experts(topk.ranking_TE, topk.allowed_TE, case.config.K))
    with routing_by(kernels=False):
        plainly = case.routed(replace(topk, plain_counts_E=None, plain_entropy_T=None))
    for name, wanted in plainly.items():
        # Weights are quotients, whose last bit is the compiler's.
        share = 1e-6 if name.startswith("gates") else 0.0
        assert_near(by_kernels[name], wanted, share=share, msg=f"{name} differ")


@pytest.mark.parametrize("kernels", [False, True])
def test_the_better_tokens_stay_though_score_plus_bias_rounds_alike(*, kernels: bool) -> None:
    """All three tokens choose expert 0, which keeps two."""
    scores_T = torch.tensor([0.009951794, 0.009951798, 0.009951803], dtype=torch.float64)
    logits_TE = torch.stack([torch.logit(scores_T), torch.full((3,), -20.0)], 1).float().to(DEVICE)
    assert len({*logits_TE[:, 0].sigmoid().tolist()}) == 3
    assert len({*(logits_TE[:, 0].sigmoid() + 1).tolist()}) < 3
    config = MoEConfig(
        d=16,
        n=16,
        E=2,
        K=1,
        router=RouterConfig(score="sigmoid", expert_bias=True, renormalize=False),
        rounding=RoundingConfig(mode="down", t=2),
    )
    context = RoutingContext(config=config, group=EPGroup.alone(), dtype=torch.float32, training=True)
    with routing_by(kernels=kernels):
        topk = compute_topk(logits_TE, torch.ones(2, device=DEVICE), 1, config.router)
        pairs = decide_pairs(object(), topk, context)
    assert [token for token in pairs.token_ids_N.tolist() if token >= 0] == [1, 2]


LOSSES = {
    "none": {},
    "balance": {"balance": "batch", "balance_coef": 0.3},
    "z": {"z_loss_coef": 0.2},
    "both": {"balance": "sequence", "balance_coef": 0.3, "z_loss_coef": 0.2, "expert_bias": True},
}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_one_function_of_autograd_is_the_separate_operations(score: Any, losses: dict[str, Any]) -> None:
    settings = RouterConfig(score=score, linear_bias=bool(losses), **losses)
    router = Router(MoEConfig(d=16, n=8, E=8, K=2, router=settings, rounding=RoundingConfig(mode="off")), device=DEVICE)
    for values in router.state_dict().values():
        torch.nn.init.normal_(values)
    x_TH, passed_TH = (torch.randn(32, 16, device=DEVICE) for _ in range(2))
    weights_N = torch.randn(64, device=DEVICE)
    leaves = [x_TH.requires_grad_(True), *router.parameters()]
    results = []
    for kernels in (None, (linear, import_module("sonic_ep.kernels.route.fused"))):
        with routing_by(kernels=False), patch("sonic_ep.routers.router.kernels_of_route", lambda *_, k=kernels: k):
            routed = router(x_TH, group=EPGroup.alone(), sequence_length=16)
        loss = routed.aux_loss + (routed.routing.weights_N * weights_N).sum() + (routed.x_TH * passed_TH).sum()
        results.append((routed.routing.token_ids_N, routed.aux_loss, *torch.autograd.grad(loss, leaves)))
    for place, (wanted, got) in enumerate(zip(*results, strict=True)):
        assert_near(got, wanted, share=1e-5, msg=f"{('tokens', 'loss', 'dx', 'dweight', 'dbias')[place]} differ")
    assert (results[0][1] != 0) == bool(losses)
