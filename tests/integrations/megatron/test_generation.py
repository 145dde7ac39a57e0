"""Generation in CUDA graphs: Megatron pads experts to all tokens there, and captures whole layers."""

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import Tensor

from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")

from megatron.core.activations import quick_gelu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
S, B = 6, 3  # sequence length on a rank, microbatch
GPT_OSS = {
    "activation_func": quick_gelu,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
}
ON_INPUT = {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}
# The experts of ours: whole, dealt to ranks, cut in parts; and what else acts on them.
PADDED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "EP1": ({}, {"moe_shared_expert_intermediate_size": 40}),
    "EP2-gpt-oss": ({"expert": 2}, GPT_OSS),
    "EP2-probs-on-input": ({"expert": 2}, ON_INPUT),
    "ETP2-cut": ({"expert_tensor": 2}, {"num_moe_experts": 3}),
}


def both_models(**changes: Any) -> list[Any]:
    """GPTs of stock and ours, with the same weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_experts import module_of
    from tests.helpers.megatron_training import Run, gpt_config

    spec = get_gpt_layer_local_spec(num_experts=8, normalization="RMSNorm")
    return [module_of(Run(gpt_config(**changes), each)) for each in (spec, use_sonic_ep(spec))]


def padded_decoding(rank: int, case: str) -> tuple[Tensor, Tensor]:
    from megatron.core.inference import utils

    from tests.helpers.megatron_training import parallel_state

    outputs = []
    groups, changes = PADDED[case]
    with parallel_state(**groups):
        for model in both_models(**changes):
            layer = model.eval().decoder.layers[0].mlp
            utils.moe_layer_cache = None
            capacity = layer.config.num_moe_experts / layer.config.moe_router_topk
            utils.set_decode_expert_padding(layer, True, capacity_factor=capacity)
            x = torch.randn(S, B, layer.config.hidden_size, generator=torch.Generator().manual_seed(rank))
            with torch.no_grad():
                outputs.append(layer(x)[0])
            utils.set_decode_expert_padding(layer, False)
        utils.moe_layer_cache = None
    return outputs[0], outputs[1]


@pytest.mark.parametrize("case", PADDED)
def test_inference_may_pad_experts_for_a_graph(ranks: Ranks, case: str) -> None:
    for stock, ours in ranks(2 if PADDED[case][0] else 1).run(padded_decoding, case):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


def training_is_captured(rank: int) -> None:
    from sonic_ep.integrations.megatron import layer as layer_module
    from tests.helpers.megatron_training import gpt_config, parallel_state

    with parallel_state():
        config = gpt_config()
        config.cuda_graph_impl, config.moe_pad_experts_for_cuda_graph_inference = "local", True
        ours = layer_module.SonicEPMoELayer(config)
        ours.set_layer_number(1)
        x = torch.randn(S, B, config.hidden_size)
        ours(x)
        with (
            patch.object(layer_module, "host_may_wait", lambda _: False),
            pytest.raises(ValueError, match=r"^cuda_graph_modules=\[\] .*; call toggle_cuda_graphs"),
        ):
            ours(x)


def test_whole_layers_are_captured_in_generation_alone(ranks: Ranks) -> None:
    ranks(1).run(training_is_captured)


def test_megatron_wants_padding_for_these_graphs_too(ranks: Ranks) -> None:
    ranks(1).run(controller_without_padding)


def controller_without_padding(rank: int) -> None:
    from megatron.core.inference.text_generation_controllers.text_generation_controller import (
        TextGenerationController,
    )

    from tests.helpers.megatron_training import gpt_config, parallel_state

    with parallel_state():
        config = gpt_config()
        config.cuda_graph_impl, config.expert_model_parallel_size = "local", 32
        wrapped = MagicMock()
        wrapped.model.config = config
        wrapped.inference_context.config.num_speculative_tokens = 0
        wrapped.inference_context.config.pg_collection = None
        with pytest.raises(AssertionError, match="--moe-pad-experts-for-cuda-graph-inference must be set"):
            TextGenerationController(wrapped, MagicMock())
