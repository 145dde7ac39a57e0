"""gpt-oss, MiniMax-M3 and DeepSeek-V4, scaled down, train with our layer as with Megatron's: 20 steps, loss to 1e-5.

Sizes are small; the structure of the MoE layer is the model's. The fields are those of Megatron-Bridge's
models/gpt_oss/gpt_oss_bridge.py, models/minimax_m3/minimax_m3_bridge.py and models/deepseek/deepseek_v4_bridge.py, the
functions those that they import. First layers of experts are large, so that clamps act.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")

from megatron.core.fusions.fused_bias_geglu import quick_gelu

from tests.helpers.megatron_parity import Curve, assert_alike

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")

GPT_OSS = {  # d = n, E = 32, K = 4
    "hidden_size": 32,
    "moe_ffn_hidden_size": 32,
    "num_moe_experts": 32,
    "moe_router_topk": 4,
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
    "moe_router_pre_softmax": False,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}
MINIMAX_M3 = {  # E = 128, K = 4, here of 16
    "num_moe_experts": 16,
    "moe_router_topk": 4,
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_router_topk_scaling_factor": 2.0,
    "moe_shared_expert_intermediate_size": 24,
}
DEEPSEEK_V4 = {  # d = 2n, E = 256, K = 6, here of 32; one shared expert
    "hidden_size": 32,
    "moe_ffn_hidden_size": 16,
    "num_moe_experts": 32,
    "moe_router_topk": 6,
    "activation_func": F.silu,
    "activation_func_clamp_value": 10.0,
    "moe_router_score_function": "sqrtsoftplus",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_router_topk_scaling_factor": 1.5,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_shared_expert_intermediate_size": 16,
}
SHAPES = {"gpt-oss": GPT_OSS, "MiniMax-M3": MINIMAX_M3, "DeepSeek-V4": DEEPSEEK_V4}
STEPS = 20


def curves(rank: int, shape: dict[str, Any]) -> tuple[Curve, Curve, Curve]:
    """Of Megatron's layer, of ours, and of Megatron's without a clamp."""
    return curve(shape, ours=False), curve(shape, ours=True), curve(shape | {"activation_func_clamp_value": None})


def curve(shape: dict[str, Any], *, ours: bool = False) -> Curve:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import Run, gpt_config, parallel_state

    with parallel_state(expert=2):
        config = gpt_config(**shape)
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
        run = Run(config, use_sonic_ep(spec) if ours else spec, batch=2, optimizer={"lr": 1e-3})
        with torch.no_grad():
            for name, parameter in run.models[0].named_parameters():
                if name.endswith("experts.weight1") or ("local_experts" in name and name.endswith("linear_fc1.weight")):
                    parameter *= 12
        return [tuple(step) for step in run.train(STEPS)]


@pytest.mark.parametrize("model", SHAPES)
def test_a_published_shape_trains_as_megatrons(ranks: Callable[[int], RankPool], model: str) -> None:
    stock, ours, unclamped = ranks(2).run(curves, SHAPES[model], timeout=600)[0]
    assert_alike((stock, ours))
    assert abs(stock[0][0] - unclamped[0][0]) > 1e-3, "no clamp acts"
