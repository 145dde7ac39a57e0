"""The grid of test_parity.py: every division of the work with both optimizers, every feature within pipeline stages.

With pipeline stages Megatron runs its 1F1B schedule, here over four microbatches. `make test-all` runs one of twelve
neighbouring cells, `make test-exhaustive` the others.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")

from tests.helpers.megatron_parity import (
    DISTRIBUTED,
    FULL,
    GROUP_LIMITED,
    OVERLAPPED,
    SELECTIVE,
    SHARED,
    SIGMOID,
    TWO_EXPERTS,
    Case,
    assert_alike,
    both_curves,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
STEPS = 8  # a division that is wrong shows in the second step

OPTIMIZERS: dict[str, dict[str, Any]] = {"plain": {"overlap": True}, "distributed": DISTRIBUTED}
# (ranks, TP, PP, EP, ETP): every one of EP 1, 2, 4, TP 1, 2 with ETP 1 and 2, and PP 1, 2.
DIVISIONS = [
    (max(4, pp * max(tp, ep * etp)), tp, pp, ep, etp)
    for pp in (1, 2)
    for ep in (1, 2, 4)
    for tp, etp in ((1, 1), (2, 1), (2, 2))
]
BALANCING: dict[str, dict[str, Any]] = {
    "aux-loss": {"moe_z_loss_coeff": 0.1},
    "seq-aux-loss": {"moe_router_load_balancing_type": "seq_aux_loss"},
    "global-aux-loss": {"moe_router_load_balancing_type": "global_aux_loss"},
    "all-losses": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.02, 0.01, 0.03],
    },
    "none-with-expert-bias": {"moe_router_load_balancing_type": "none"} | SIGMOID | GROUP_LIMITED,
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    "quantile-balancing": {"moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": 0.0},
}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "full": FULL,
    "full-block": FULL | {"recompute_method": "block"},
    "moe": SELECTIVE | {"recompute_modules": ["moe"]},
    "moe-layer": SELECTIVE | {"moe_layer_recompute": True},
    "shared-experts": SELECTIVE | SHARED | {"recompute_modules": ["shared_experts"]},
    "shared-experts-and-moe": SELECTIVE | SHARED | {"recompute_modules": ["shared_experts", "moe"]},
    "core-attention": SELECTIVE | {"recompute_modules": ["core_attn"]},
}
SHARED_EXPERTS: dict[str, dict[str, Any]] = {
    "plain": SHARED,
    "gate": SHARED | {"moe_shared_expert_gate": True},
    "overlap": SHARED | {"moe_shared_expert_overlap": True},
}
FEATURES = {
    f"{kind}-{name}": changes
    for kind, each in {"balancing": BALANCING, "recomputed": RECOMPUTED, "shared": SHARED_EXPERTS}.items()
    for name, changes in each.items()
}


def cells(rows: Iterable[Any]) -> list[Any]:
    """Every row with every optimizer. One cell of every sixth row is slow, with each optimizer in turn."""
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            optimizer,
            marks=pytest.mark.slow if i % 6 == 0 and i // 6 % 2 == j else pytest.mark.exhaustive,
        )
        for i, row in enumerate(rows)
        for j, optimizer in enumerate(OPTIMIZERS)
    ]


@pytest.mark.parametrize(("size", "tp", "pp", "ep", "etp", "optimizer"), cells(DIVISIONS))
def test_every_division_of_the_work(
    ranks: Ranks, size: int, tp: int, pp: int, ep: int, etp: int, optimizer: str
) -> None:
    groups = {"tensor": tp, "pipeline": pp, "expert": ep, "expert_tensor": etp}
    run = OPTIMIZERS[optimizer] | {"batch": 4 * size // (tp * pp) if pp > 1 else size}
    assert_alike(ranks(size).run(both_curves, Case(size, groups, SHARED, run), STEPS, timeout=900)[0])


@pytest.mark.parametrize(("tp", "pp", "ep", "etp", "optimizer"), cells([(2, 1, 2, 2), (2, 2, 1, 2), (1, 1, 1, 4)]))
def test_experts_in_parts(ranks: Ranks, tp: int, pp: int, ep: int, etp: int, optimizer: str) -> None:
    groups = {"tensor": tp, "pipeline": pp, "expert": ep, "expert_tensor": etp}
    experts = TWO_EXPERTS if ep * etp == 4 else {"num_moe_experts": 3}
    case = Case(4, groups, SHARED | experts, OPTIMIZERS[optimizer] | {"batch": 4})
    assert_alike(ranks(4).run(both_curves, case, STEPS, timeout=900)[0])


@pytest.mark.parametrize(("feature", "optimizer"), cells(FEATURES))
def test_every_feature_within_pipeline_stages(ranks: Ranks, feature: str, optimizer: str) -> None:
    tp = 2 if optimizer == "distributed" else 1
    groups, run = {"tensor": tp, "pipeline": 2, "expert": 2}, OPTIMIZERS[optimizer] | {"batch": 8 // tp}
    assert_alike(ranks(4).run(both_curves, Case(4, groups, FEATURES[feature], run), STEPS, timeout=900)[0])


# The overlapped schedule reads layers without DDP's hooks, which complete an overlapped gather.
@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [
        pytest.param(schedule, optimizer, marks=pytest.mark.slow if is_run else pytest.mark.exhaustive)
        for schedule, *both in (("interleaved", 0, 1), ("overlapped", 1, 0))
        for optimizer, is_run in zip(({}, {"distributed_optimizer": True}), both, strict=True)
    ],
    ids=[f"{s}-{o}" for s in ("interleaved", "overlapped") for o in ("plain", "distributed")],
)
def test_every_schedule_of_interleaved_stages(ranks: Ranks, schedule: str, optimizer: dict[str, Any]) -> None:
    tp = 2 if optimizer else 1
    groups = {"tensor": tp, "pipeline": 2, "virtual_pipeline": 2, "expert": 2}
    config: dict[str, Any] = {"num_layers": 4} | SHARED | SIGMOID
    config |= {"moe_router_load_balancing_type": "seq_aux_loss"} | (OVERLAPPED if schedule == "overlapped" else {})
    run = optimizer | {"batch": 8 // tp}
    case = Case(4, groups, config, run)
    assert_alike(ranks(4).run(both_curves, case, STEPS, timeout=900)[0])
