"""Token rounding behind Megatron's router does what sonic_ep's own layer does, and leaves losses and counts alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig
from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")

Ranks = Callable[[int], RankPool]
S, B, G = 24, 4, 16
ROUNDING = RoundingConfig(t=8, G=G)
GROUP_LIMITED = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4}
# Fields of TransformerConfig, and what they are called here.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax": ({"moe_router_topk_scaling_factor": 2.5}, {"scale": 2.5}),
    "pre-softmax": ({"moe_router_pre_softmax": True}, {"renormalize": False}),
    "sigmoid-bias-groups": (
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            **GROUP_LIMITED,
        },
        {"score": "sigmoid", "expert_bias": True, "num_groups": 4, "groups_per_token": 2},
    ),
    "switch": (
        {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
        {"score": "sigmoid", "renormalize": False},
    ),
}
NO_LOSS = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}


def layer_of(config: Any, rounding: RoundingConfig | None) -> Any:

    from sonic_ep.integrations.megatron import SonicEPOptions, get_sonic_ep_moe_spec

    torch.manual_seed(3)
    spec = get_sonic_ep_moe_spec(config.num_moe_experts, options=SonicEPOptions(rounding=rounding))
    layer: Any = spec(config=config)
    layer.set_layer_number(1)
    layer.router.weight.data *= 20  # far from uniform
    return layer


def own_layer(layer: Any, changes: dict[str, Any], group: EPGroup) -> MoE:
    c = layer.config
    router = RouterConfig(**changes)
    sizes = {"d": c.hidden_size, "n": c.moe_ffn_hidden_size, "E": c.num_moe_experts, "K": c.moe_router_topk}
    own = MoE(MoEConfig(**sizes, router=router, rounding=ROUNDING), group, seed=0)
    with torch.no_grad():
        own.router.weight.copy_(layer.router.weight)
        own.experts.w1.copy_(layer.experts.weight1)
        own.experts.w2.copy_(layer.experts.weight2)
        if own.router.expert_bias is not None:
            own.router.expert_bias.copy_(layer.router.expert_bias)
    return own


def hidden_states(rank: int, config: Any) -> Tensor:
    return torch.randn(S, B, config.hidden_size, generator=torch.Generator().manual_seed(rank))


def against_own_layer(rank: int, variant: str) -> tuple[dict[str, float], list[int]]:
    """Largest relative differences of outputs and gradients, and the group's pairs of each expert."""
    from tests.helpers.megatron_training import gpt_config, note_routings, parallel_state

    fields, changes = VARIANTS[variant]
    routings: list[Any] = []
    with parallel_state(expert=4):
        config = gpt_config(**fields, **NO_LOSS)
        layer = layer_of(config, ROUNDING)
        if layer.router.expert_bias is not None:
            layer.router.expert_bias.copy_(torch.linspace(-0.2, 0.2, config.num_moe_experts))
        own = own_layer(layer, changes, EPGroup())
        note_routings(layer, routings)
        results = []
        for run in (lambda x: layer(x)[0], lambda x: own(x).y):
            x = hidden_states(rank, config).requires_grad_()
            y = run(x)
            y.square().sum().backward()
            results.append([y.detach(), x.grad])
    results[0] += [layer.router.weight.grad, layer.experts.weight1.grad, layer.experts.weight2.grad]
    results[1] += [own.router.weight.grad, own.experts.w1.grad, own.experts.w2.grad]
    names = ("y", "dx", "drouter", "dw1", "dw2")
    differences = {
        name: float((got - wanted).abs().max() / wanted.abs().max()) if wanted.numel() else 0.0
        for name, got, wanted in zip(names, *results, strict=True)
    }
    return differences, routings[0].counts.rows_SE.sum(0).tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_rounds_as_our_own_layer(ranks: Ranks, variant: str) -> None:
    for differences, rows in ranks(4).run(against_own_layer, variant, timeout=600):
        assert all(difference < 1e-5 for difference in differences.values()), differences
        assert all(count % G == 0 for count in rows)


def allowed_and_chosen(rank: int, fields: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(T, E) bool each: what rounding may add, what the router chose."""
    from unittest.mock import patch

    from sonic_ep.routers import topk_pairs
    from tests.helpers.megatron_training import gpt_config, parallel_state

    with (
        parallel_state(),
        patch.object(topk_pairs, "decide_pairs", wraps=topk_pairs.decide_pairs) as round_counts,
    ):
        config = gpt_config(**GROUP_LIMITED, **fields, **NO_LOSS)
        layer_of(config, ROUNDING)(hidden_states(rank, config))
    round_counts.assert_called_once()
    topk = round_counts.call_args.args[1]
    chosen_TE = torch.zeros_like(topk.allowed_TE).scatter_(1, topk.topk_ids_TK, True)
    return topk.allowed_TE, chosen_TE


@pytest.mark.parametrize(
    "fields", [{}, {"moe_router_pre_softmax": True}, {"moe_router_score_function": "sigmoid"}], ids=str
)
def test_what_the_router_chose_is_in_the_groups_that_rounding_keeps_to(ranks: Ranks, fields: dict[str, Any]) -> None:
    ((allowed_TE, chosen_TE),) = ranks(1).run(allowed_and_chosen, fields)
    assert bool((allowed_TE.sum(1) == allowed_TE.shape[1] // 2).all())
    assert bool((allowed_TE | ~chosen_TE).all())


def plain_parts(rank: int) -> dict[str, list[Any]]:
    """What must not change with rounding on; without it first."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    from tests.helpers.megatron_training import gpt_config, parallel_state

    parts: dict[str, list[Any]] = {}
    with parallel_state(expert=2):
        config = gpt_config(
            moe_z_loss_coeff=0.1, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True
        )
        x = hidden_states(rank, config)
        for rounding in (None, ROUNDING):
            layer = layer_of(config, rounding)
            parts.setdefault("training", []).append(layer(x)[0].detach())
            tracker = get_moe_metrics_tracker()
            parts.setdefault("losses", []).append({name: each.values.clone() for name, each in tracker.metrics.items()})
            parts.setdefault("counts", []).append(layer.router.local_tokens_per_expert.clone())
            tracker.clear()
            layer.eval()
            parts.setdefault("eval", []).append(layer(x)[0].detach())
    return parts


def test_losses_counts_and_evaluation_are_those_of_plain_topk(ranks: Ranks) -> None:
    parts = ranks(4).run(plain_parts, timeout=600)[0]
    assert not torch.equal(*parts["training"])
    assert torch.equal(*parts["eval"])
    assert torch.equal(*parts["counts"])
    plain, rounded = parts["losses"]
    assert set(plain) == {"load_balancing_loss", "z_loss"}
    torch.testing.assert_close(rounded, plain)


def rounded_curve(rank: int, changes: dict[str, Any]) -> list[tuple[Any, ...]]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from sonic_ep.integrations.megatron import SonicEPOptions, use_sonic_ep
    from tests.helpers.megatron_training import Run, gpt_config, parallel_state

    options = SonicEPOptions(rounding=RoundingConfig(mode="stochastic", t=4, G=8))
    with parallel_state(expert=2):
        spec = use_sonic_ep(get_gpt_layer_local_spec(num_experts=8, normalization="RMSNorm"), options)
        return [tuple(step) for step in Run(gpt_config(**changes), spec).train(6)]


def test_batches_that_overlap_decide_alike(ranks: Ranks) -> None:
    separate = ranks(2).run(rounded_curve, {}, timeout=600)[0]
    overlapped = ranks(2).run(rounded_curve, {"overlap_moe_expert_parallel_comm": True}, timeout=600)[0]
    for step, wanted in zip(overlapped, separate, strict=True):
        assert step[:2] == pytest.approx(wanted[:2], abs=1e-5)


def test_recomputation_decides_alike(ranks: Ranks) -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    moe = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    saved = ranks(2).run(rounded_curve, {}, timeout=600)[0]
    assert saved[-1][0] < saved[0][0]
    assert ranks(2).run(rounded_curve, full, timeout=600)[0] == saved
    assert ranks(2).run(rounded_curve, moe, timeout=600)[0] == saved
