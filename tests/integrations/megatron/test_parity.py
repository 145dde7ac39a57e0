"""Rounding off, a GPT with our layer trains as one with Megatron's own: 20 steps, loss and gradient norm to 1e-5.

Stock is MoELayer with the alltoall dispatcher and SequentialMLP. fp32 over gloo: four processes where the division of
the work is the point, two where a feature is. test_parity_grid.py has the other combinations.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")

from tests.helpers.megatron_parity import (
    BIASES,
    DECAY,
    DISTRIBUTED,
    FULL,
    GROUP_LIMITED,
    OVERLAPPED,
    SELECTIVE,
    SHARED,
    SIGMOID,
    Case,
    assert_alike,
    both_curves,
)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]

CASES = {
    "EP1": Case(4, {"expert": 1}, {"moe_z_loss_coeff": 0.1}),
    "EP2-distributed": Case(4, {"expert": 2}, run=DISTRIBUTED),
    "EP4": Case(4, {"expert": 4}, FULL | SHARED, {"overlap": True}),
    "EP4-distributed": Case(4, {"expert": 4}, SHARED | {"moe_shared_expert_gate": True}, DISTRIBUTED),
    "TP2-EP2-distributed": Case(4, {"tensor": 2, "expert": 2}, SHARED, DISTRIBUTED),
    "TP2-EP4": Case(4, {"tensor": 2, "expert": 4}, run={"batch": 2}),
    "overlapped-batches": Case(2, {"expert": 2}, SHARED | OVERLAPPED, {"batch": 8}),
    "PP2-EP2": Case(4, {"pipeline": 2, "expert": 2}, FULL, DISTRIBUTED),
    "TP2-PP2-EP2": Case(
        4, {"tensor": 2, "pipeline": 2, "expert": 2}, SELECTIVE | {"recompute_modules": ["moe"]}, {"batch": 2}
    ),
    "TP2-EP1": Case(2, {"tensor": 2, "expert": 1}, run=DISTRIBUTED),
    # Stock cuts an expert's width over the tensor-parallel ranks, ours deals experts to them.
    "TP2-ETP2-EP1": Case(2, {"tensor": 2, "expert_tensor": 2, "expert": 1}, run=DISTRIBUTED),
    "TP2-ETP2-EP2": Case(4, {"tensor": 2, "expert_tensor": 2, "expert": 2}, SHARED, {"overlap": True, "batch": 4}),
    # Fewer experts than ranks: ours holds the same parts as stock.
    "ETP2-EP1-cut": Case(2, {"expert_tensor": 2, "expert": 1}, {"num_moe_experts": 3}),
    "ETP2-EP2": Case(4, {"expert_tensor": 2, "expert": 2}, run=DISTRIBUTED),
    # Megatron decays no bias, and no expert's either.
    "biases": Case(2, {"expert": 2}, BIASES, DECAY),
    # Stock sums the gradients of its experts' second biases over TP ranks, which hold different experts.
    "TP2-biases": Case(2, {"tensor": 2, "expert": 2}, BIASES, DECAY, stock_groups={"expert": 2}),
    "moe-layer-recompute": Case(2, {"expert": 2}, SELECTIVE | {"moe_layer_recompute": True} | SIGMOID),
    "shared-recompute": Case(2, {"expert": 2}, SELECTIVE | SHARED | {"recompute_modules": ["shared_experts", "moe"]}),
    "shared-overlap": Case(2, {"tensor": 2, "expert": 2}, SHARED | {"moe_shared_expert_overlap": True}),
    "seq-aux-loss": Case(
        2, {"expert": 2}, {"moe_router_load_balancing_type": "seq_aux_loss", "moe_input_jitter_eps": 0.01}
    ),
    "global-aux-loss": Case(
        2, {"expert": 2}, {"moe_router_load_balancing_type": "global_aux_loss"} | SIGMOID | GROUP_LIMITED
    ),
    "list-of-losses": Case(
        2,
        {"expert": 2},
        {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.02, 0.01, 0.03],
        },
    ),
    "sinkhorn": Case(2, {"expert": 2}, {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}),
    "quantile-balancing": Case(
        2, {"expert": 2}, {"moe_router_load_balancing_type": "quantile_balancing", "moe_aux_loss_coeff": 0.0}
    ),
    "sqrtsoftplus": Case(2, {"expert": 2}, {"moe_router_score_function": "sqrtsoftplus"}),
    "exact-gelu": Case(2, {"expert": 2}, {"activation_func": F.gelu, "gated_linear_unit": False}),
    "exact-geglu": Case(2, {"expert": 2}, {"activation_func": F.gelu}),
    "none": Case(2, {"expert": 2}, {"moe_router_load_balancing_type": "none"} | SIGMOID),
    "dropping": Case(2, {"expert": 2}, {"moe_expert_capacity_factor": 1.0}),
    "z-loss": Case(2, {"expert": 2}, {"moe_z_loss_coeff": 0.1, "moe_router_dtype": "fp32"}, DISTRIBUTED),
    "recomputed-groups": Case(2, {"expert": 2}, FULL | SIGMOID | GROUP_LIMITED | {"calculate_per_token_loss": True}),
    "global-loss-TP2": Case(
        4,
        {"tensor": 2, "expert": 2},
        {"moe_router_load_balancing_type": "global_aux_loss", "calculate_per_token_loss": True} | SIGMOID,
        {"batch": 4},
    ),
    "dense-and-moe": Case(2, {"expert": 2}, {"moe_layer_freq": [0, 1, 0], "num_layers": 3}, mixed=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_our_layer_trains_as_megatrons(ranks: Ranks, case: Case) -> None:
    assert_alike(ranks(case.ranks).run(both_curves, case, timeout=900)[0])
