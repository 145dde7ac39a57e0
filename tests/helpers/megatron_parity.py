"""The curves of stock Megatron-Core and ours, from one config: loss, gradient norm and auxiliary losses by step."""

from dataclasses import dataclass, field
from typing import Any

import pytest

STEPS = 20
Curve = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """groups: of the parallel state; config: fields of TransformerConfig; run: arguments of Run. stock_groups: of the
    stock run, where they differ. mixed: dense and MoE layers by moe_layer_freq.
    """

    ranks: int
    groups: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    stock_groups: dict[str, int] | None = None
    mixed: bool = False


DISTRIBUTED = {"distributed_optimizer": True, "overlap": True}
SHARED = {"moe_shared_expert_intermediate_size": 40}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
GROUP_LIMITED = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
BIASES, DECAY = {"add_bias_linear": True}, {"optimizer": {"weight_decay": 0.5}}
TWO_EXPERTS = {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
OVERLAPPED = {"overlap_moe_expert_parallel_comm": True}


def curve(case: Case, groups: dict[str, int], *, ours: bool, steps: int) -> Curve:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import Run, gpt_config, parallel_state

    with parallel_state(**groups):
        config = gpt_config(**case.config)
        if case.mixed:
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
        else:
            spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
        # Gentle steps: 20 of them must not blow up what the order of a sum may change.
        settings = {"batch": case.ranks, **case.run, "optimizer": {"lr": 3e-3, **case.run.get("optimizer", {})}}
        spec = use_sonic_ep(spec) if ours else spec
        run = Run(config, spec, **settings)
        return [tuple(step) for step in run.train(steps)]


def both_curves(rank: int, case: Case, steps: int = STEPS) -> tuple[Curve, Curve]:
    stock_groups = case.groups if case.stock_groups is None else case.stock_groups
    return curve(case, stock_groups, ours=False, steps=steps), curve(case, case.groups, ours=True, steps=steps)


def assert_alike(curves: tuple[Curve, Curve]) -> None:
    """Asserts that stock learns, and that ours has its curve to 1e-5."""
    stock, ours = curves
    assert stock[-1][0] < stock[0][0]
    for (loss, norm, aux), (stock_loss, stock_norm, stock_aux) in zip(ours, stock, strict=True):
        assert (loss, norm) == pytest.approx((stock_loss, stock_norm), abs=1e-5)
        assert aux == pytest.approx(stock_aux, abs=1e-5)
