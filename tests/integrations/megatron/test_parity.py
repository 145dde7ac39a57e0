"""Rounding off, a GPT with our layer trains as one with Megatron's own: 20 steps, loss and gradient norm to 1e-5.

Stock is MoELayer with the alltoall dispatcher and SequentialMLP. fp32 over gloo: four processes where the division of
the work is the point, two where a feature is.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
STEPS = 20
Ranks = Callable[[int], RankPool]
Curve = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """groups: of the parallel state; config: fields of TransformerConfig; run: arguments of Run. stock_groups: of the
    stock run, where they differ. mixed: dense and MoE layers by moe_layer_freq. router: of our run, see SonicEPOptions.
    """

    ranks: int
    groups: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    stock_groups: dict[str, int] | None = None
    mixed: bool = False
    router: Literal["megatron", "fused"] = "megatron"


DISTRIBUTED = {"distributed_optimizer": True, "overlap": True}
SHARED = {"moe_shared_expert_intermediate_size": 40}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
GROUP_LIMITED = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
BIASES, DECAY = {"add_bias_linear": True}, {"optimizer": {"weight_decay": 0.5}}
TWO_EXPERTS = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}

CASES = {
    "EP1": Case(4, {"expert": 1}, {"moe_z_loss_coeff": 0.1}),
    "EP2-distributed": Case(4, {"expert": 2}, run=DISTRIBUTED),
    "EP4": Case(4, {"expert": 4}, FULL | SHARED, {"overlap": True}),
    "EP4-distributed": Case(4, {"expert": 4}, SHARED | {"moe_shared_expert_gate": True}, DISTRIBUTED),
    "TP2-EP2-distributed": Case(4, {"tensor": 2, "expert": 2}, SHARED, DISTRIBUTED),
    "TP2-EP4": Case(4, {"tensor": 2, "expert": 4}, run={"batch": 2}),
    "PP2-EP2": Case(4, {"pipeline": 2, "expert": 2}, FULL, DISTRIBUTED),
    "TP2-PP2-EP2": Case(
        4, {"tensor": 2, "pipeline": 2, "expert": 2}, SELECTIVE | {"recompute_modules": ["moe"]}, {"batch": 2}
    ),
    "TP2-EP1": Case(2, {"tensor": 2, "expert": 1}, run=DISTRIBUTED),
    # Stock cuts an expert's width over the tensor-parallel ranks, ours deals experts to them.
    "TP2-ETP2-EP1": Case(2, {"tensor": 2, "expert_tensor": 2, "expert": 1}, run=DISTRIBUTED),
    "TP2-ETP2-EP2": Case(4, {"tensor": 2, "expert_tensor": 2, "expert": 2}, SHARED, {"overlap": True, "batch": 4}),
    # Fewer experts than ranks: ours holds the same parts as stock.
    "TP2-ETP2-EP2-cut": Case(4, {"tensor": 2, "expert_tensor": 2, "expert": 2}, SHARED | TWO_EXPERTS, DISTRIBUTED),
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
    "fused-router": Case(
        2, {"expert": 2}, {"moe_z_loss_coeff": 0.1, "moe_router_dtype": "fp32"}, DISTRIBUTED, router="fused"
    ),
    "fused-router-recomputed": Case(
        2, {"expert": 2}, FULL | SIGMOID | GROUP_LIMITED | {"calculate_per_token_loss": True}, router="fused"
    ),
    "fused-router-TP2": Case(
        4,
        {"tensor": 2, "expert": 2},
        {"moe_router_load_balancing_type": "global_aux_loss", "calculate_per_token_loss": True} | SIGMOID,
        {"batch": 4},
        router="fused",
    ),
    "dense-and-moe": Case(2, {"expert": 2}, {"moe_layer_freq": [0, 1, 0], "num_layers": 3}, mixed=True),
}


def curve(case: Case, groups: dict[str, int], ours: bool) -> Curve:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    from sonic_ep.integrations.megatron import SonicEPOptions, use_sonic_ep
    from tests.helpers.megatron_training import Run, gpt_config, parallel_state

    with parallel_state(**groups):
        config = gpt_config(**case.config)
        if case.mixed:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        else:
            spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
        # Gentle steps: 20 of them must not blow up what the order of a sum may change.
        settings = {"batch": case.ranks, **case.run, "optimizer": {"lr": 3e-3, **case.run.get("optimizer", {})}}
        spec = use_sonic_ep(spec, SonicEPOptions(router=case.router)) if ours else spec
        run = Run(config, spec, **settings)
        return [tuple(step) for step in run.train(STEPS)]


def both_curves(rank: int, case: Case) -> tuple[Curve, Curve]:
    stock_groups = case.groups if case.stock_groups is None else case.stock_groups
    return curve(case, stock_groups, ours=False), curve(case, case.groups, ours=True)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_our_layer_trains_as_megatrons(ranks: Ranks, case: Case) -> None:
    stock, ours = ranks(case.ranks).run(both_curves, case, timeout=900)[0]
    assert stock[-1][0] < stock[0][0]
    for (loss, norm, aux), (stock_loss, stock_norm, stock_aux) in zip(ours, stock, strict=True):
        assert (loss, norm) == pytest.approx((stock_loss, stock_norm), abs=1e-5)
        assert aux == pytest.approx(stock_aux, abs=1e-5)
