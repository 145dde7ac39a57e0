"""Published MoE recipes for Megatron-Core, as fields of TransformerConfig: what concerns a MoE layer, with its source.

Read in NVIDIA/Megatron-LM (tests/functional_tests/test_cases, examples) and ROCm/Megatron-LM (examples) in November
2026. Those of Megatron-Bridge are in megatron_bridge_recipes.py. Of test cases that generate text alone, one is here;
those with transformer_impl="inference_optimized" are not of a layer for training.
"""

from megatron.core.fusions.fused_bias_geglu import quick_gelu

from tests.helpers.megatron_bridge_recipes import BRIDGE
from tests.helpers.megatron_model_cases import MODEL_TESTS
from tests.helpers.megatron_moe_cases import MOE_TESTS
from tests.helpers.megatron_recipe import (
    DEEPSEEK_V3,
    FP8,
    HYBRIDEP,
    MIXTRAL,
    MIXTRAL_8X7B,
    NEMOTRON,
    NEMOTRON_SUPER,
    QWEN3_30B,
    QWEN3_235B,
    SIGMOID_BIAS,
    SWIGLU,
    Recipe,
    parallel,
)

MOE_RECOMPUTED = {"moe_layer_recompute": True, "recompute_granularity": "selective"}
GPT_OSS = {
    "hidden_size": 2880,
    "ffn_hidden_size": 2880,
    "moe_ffn_hidden_size": 2880,
    "activation_func": quick_gelu,
    "gated_linear_unit": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "moe_router_dtype": "fp32",
    "moe_router_topk": 4,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
}
ENGRAM = (
    SWIGLU
    | SIGMOID_BIAS
    | HYBRIDEP
    | {
        "hidden_size": 512,
        "ffn_hidden_size": 1344,
        "num_moe_experts": 256,
        "moe_ffn_hidden_size": 256,
        "moe_shared_expert_intermediate_size": 256,
        "moe_router_topk": 8,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 3.66,
        "moe_router_bias_update_rate": 1e-3,
        "moe_router_dtype": "fp32",
        "moe_permute_fusion": True,
        "moe_grouped_gemm": True,
    }
)
DEEPSEEK_V2_LITE = SWIGLU | {
    "hidden_size": 2048,
    "ffn_hidden_size": 10944,
    "num_moe_experts": 64,
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2816,
    "moe_router_topk": 6,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": True,
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-3,
    "moe_token_dispatcher_type": "alltoall",
    "moe_token_drop_policy": "probs",
    "moe_grouped_gemm": True,
}
NEMOTRON_RL = (
    NEMOTRON
    | parallel(2, 1, 32, 1)
    | {
        "moe_router_dtype": "fp64",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "cuda_graph_impl": "local",
    }
)
LLAMA_4 = SWIGLU | {
    "hidden_size": 5120,
    "ffn_hidden_size": 16384,
    "num_moe_experts": 16,
    "moe_ffn_hidden_size": 8192,
    "moe_shared_expert_intermediate_size": 8192,
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 1.0,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-3,
    "moe_token_dispatcher_type": "alltoall",
    "moe_apply_probs_on_input": True,
}

EXAMPLES = (
    Recipe(
        "examples/mixtral/train_mixtral_8x7b_distributed.sh",
        MIXTRAL
        | {"hidden_size": 256, "ffn_hidden_size": 896, "num_moe_experts": 2, "moe_grouped_gemm": False}
        | parallel(ep=2),
    ),
    Recipe(
        "examples/gptoss/02_train.sh",
        GPT_OSS
        | FP8
        | {
            "hidden_size": 512,
            "ffn_hidden_size": 2048,
            "num_moe_experts": 4,
            "moe_ffn_hidden_size": 2048,
            "moe_router_topk": 2,
            "moe_aux_loss_coeff": 1e-3,
            "moe_z_loss_coeff": 1e-3,
            "moe_permute_fusion": True,
            "moe_per_layer_logging": True,
            "fp8_recipe": "delayed",
        }
        | parallel(pp=8),
    ),
    Recipe("examples/engram/pretrain_moe_baseline.sh", ENGRAM | parallel(ep=8, etp=1)),
    Recipe("examples/engram/pretrain_moe_engram.sh", ENGRAM | {"num_moe_experts": 208} | parallel(ep=8, etp=1)),
    Recipe("examples/rl/model_configs/qwen3_30b_a3b_moe.sh", QWEN3_30B | {"moe_router_dtype": None} | parallel(4)),
    Recipe(
        "examples/rl/model_configs/dsv2_lite_moe.sh",
        DEEPSEEK_V2_LITE
        | {"moe_router_dtype": "fp64", "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
        | {"calculate_per_token_loss": True}
        | parallel(2),
    ),
    Recipe(
        "examples/rl/model_configs/nemotron6_3b_moe.sh",
        NEMOTRON_RL | {"moe_pad_experts_for_cuda_graph_inference": True},
    ),
    # Megatron generates with such graphs over several ranks only if it pads experts: test_generation.py.
    Recipe("examples/rl/model_configs/nemotron6_3b_moe_explicit.sh", NEMOTRON_RL, "cuda_graph_modules", by_stock=True),
    # examples/post_training/modelopt/conf: models, for which the caller chooses the ranks.
    Recipe("modelopt/conf/Qwen/Qwen3-30B-A3B.sh", QWEN3_30B | parallel(ep=8)),
    Recipe("modelopt/conf/Qwen/Qwen3-235B-A22B.sh", QWEN3_235B | MOE_RECOMPUTED | parallel(ep=8)),
    Recipe(
        "modelopt/conf/deepseek-ai/DeepSeek-R1.sh",
        DEEPSEEK_V3 | MOE_RECOMPUTED | {"moe_shared_expert_overlap": True} | parallel(ep=8),
    ),
    Recipe("modelopt/conf/deepseek-ai/DeepSeek-V2-Lite.sh", DEEPSEEK_V2_LITE | parallel(ep=8)),
    Recipe(
        "modelopt/conf/moonshotai/Kimi-K2-Instruct.sh",
        DEEPSEEK_V3
        | MOE_RECOMPUTED
        | {
            "num_moe_experts": 384,
            "moe_router_num_groups": None,
            "moe_router_group_topk": None,
            "moe_router_topk_scaling_factor": 2.827,
            "moe_shared_expert_overlap": True,
        }
        | parallel(ep=8),
    ),
    Recipe("modelopt/conf/meta-llama/Llama-4-Scout-17B-16E-Instruct.sh", LLAMA_4 | parallel(ep=8)),
    Recipe(
        "modelopt/conf/meta-llama/Llama-4-Maverick-17B-128E-Instruct.sh",
        LLAMA_4 | MOE_RECOMPUTED | {"num_moe_experts": 128} | parallel(ep=8),
    ),
    Recipe("modelopt/conf/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.sh", NEMOTRON | parallel(ep=8)),
    Recipe("modelopt/conf/nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16.sh", NEMOTRON_SUPER | parallel(ep=8)),
    Recipe(
        "modelopt/conf/nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16.sh",
        NEMOTRON_SUPER
        | {
            "hidden_size": 8192,
            "ffn_hidden_size": 5120,
            "moe_latent_size": 2048,
            "moe_shared_expert_intermediate_size": 10240,
            "moe_token_dispatcher_type": "alltoall",
        }
        | parallel(ep=8),
    ),
    Recipe(
        "modelopt/conf/openai/gpt-oss-20b.sh",
        GPT_OSS | {"num_moe_experts": 32, "add_bias_linear": True} | parallel(ep=8),
    ),
    Recipe(
        "modelopt/conf/openai/gpt-oss-120b.sh",
        GPT_OSS | {"num_moe_experts": 128, "add_bias_linear": True} | parallel(ep=8),
    ),
    # Examples of ROCm/Megatron-LM, with their own defaults.
    Recipe("ROCm: examples/mixtral/train_mixtral_moe.sh", MIXTRAL_8X7B | parallel(8, 1, 8, 1)),
    Recipe(
        "ROCm: examples/mixtral/train_mixtral_moe.sh, 8x22B",
        MIXTRAL | {"hidden_size": 6144, "ffn_hidden_size": 16384} | parallel(8, 1, 8, 1),
    ),
    Recipe(
        "ROCm: examples/deepseek_v3/train_deepseekv3.sh",
        DEEPSEEK_V2_LITE
        | {
            "moe_router_pre_softmax": False,
            "moe_router_num_groups": 1,
            "moe_router_group_topk": 1,
            "moe_shared_expert_overlap": True,
            "moe_aux_loss_coeff": 1e-2,
        }
        | parallel(),
    ),
)

RECIPES = (*MOE_TESTS, *MODEL_TESTS, *EXAMPLES, *BRIDGE)
