"""Published MoE recipes for Megatron-Core, as fields of TransformerConfig: what concerns a MoE layer, with its source.

Read in NVIDIA/Megatron-LM (tests/functional_tests/test_cases, examples) and NVIDIA-NeMo/Megatron-Bridge
(src/megatron/bridge/recipes, scripts/performance/configs) in November 2026. Where several cases of a folder differ in
nothing that a MoE layer sees (one node or several, optimizer, order of ranks, resumption), one stands for all.
"""

from typing import Any, NamedTuple

import torch.nn.functional as F
from megatron.core.activations import squared_relu

Fields = dict[str, Any]


class Recipe(NamedTuple):
    """source: a path under one of the roots above, or a function there. refused: the field that refuses our layer."""

    source: str
    fields: Fields
    refused: str = ""


def parallel(tp: int = 1, pp: int = 1, ep: int = 1, etp: int | None = None, cp: int = 1) -> Fields:
    """etp: None where the recipe leaves it to its default, which is tp."""
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": tp if etp is None else etp,
        "context_parallel_size": cp,
        "sequence_parallel": tp > 1,
    }


SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True}
SIGMOID_BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
GRAPHED_ROUTER = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["moe_router", "moe_preprocess"]}

# tests/functional_tests/test_cases/moe/gpt3_*: exact GELU, TransformerConfig's own default.
GPT3 = {"hidden_size": 512, "ffn_hidden_size": 2048, "activation_func": F.gelu, "moe_grouped_gemm": True}
SINKHORN = GPT3 | {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1, "num_moe_experts": 8}
TOP2 = GPT3 | {"moe_router_load_balancing_type": "aux_loss", "moe_router_topk": 2, "num_moe_experts": 8}
TOP2_1024 = TOP2 | {"moe_ffn_hidden_size": 1024, "moe_router_dtype": "fp32"}

# The DeepSeek-like proxies of the same folder.
DEEPSEEK = (
    SWIGLU
    | SIGMOID_BIAS
    | {
        "hidden_size": 1024,
        "ffn_hidden_size": 4096,
        "num_moe_experts": 32,
        "moe_ffn_hidden_size": 1024,
        "moe_shared_expert_intermediate_size": 1024,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_topk": 4,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_pre_softmax": True,
        "moe_grouped_gemm": True,
        "moe_aux_loss_coeff": 1e-4,
        "moe_router_group_topk": 2,
        "moe_router_num_groups": 4,
        "moe_router_topk_scaling_factor": 2.0,
        "moe_router_bias_update_rate": 1e-3,
        "moe_router_dtype": "fp32",
        "moe_permute_fusion": True,
    }
)
FSDP_PROXY = DEEPSEEK | {"hidden_size": 512, "ffn_hidden_size": 2048, "num_moe_experts": 8} | parallel(ep=2, etp=1)
STASHED = {"moe_paged_stash": True, "cuda_graph_impl": "full_iteration", "use_transformer_engine_op_fuser": True}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mla_up_proj", "mlp", "moe_act"]}
OFFLOADED = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear", "core_attn", "attn_proj"],
}
DEEPSEEK_V3 = DEEPSEEK | {
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_moe_experts": 256,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8,
    "moe_router_group_topk": 4,
    "moe_router_num_groups": 8,
    "moe_router_topk_scaling_factor": 2.5,
}
FLEX = {"moe_token_dispatcher_type": "flex"}
HYBRIDEP = FLEX | {"moe_flex_dispatcher_backend": "hybridep"}
MIXTRAL = SWIGLU | {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
}
MIXTRAL_8X7B = MIXTRAL | {"hidden_size": 4096, "ffn_hidden_size": 14336}

# Values of the models themselves (Megatron-Bridge reads them from Hugging Face's configs).
QWEN3 = SWIGLU | {
    "num_moe_experts": 128,
    "moe_router_topk": 8,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
    "moe_router_pre_softmax": False,
    "moe_router_dtype": "fp32",
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_token_dispatcher_type": "alltoall",
}
QWEN3_30B = QWEN3 | {"hidden_size": 2048, "ffn_hidden_size": 6144, "moe_ffn_hidden_size": 768}
QWEN3_235B = QWEN3 | {"hidden_size": 4096, "ffn_hidden_size": 12288, "moe_ffn_hidden_size": 1536}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
NEMOTRON = SIGMOID_BIAS | {
    "activation_func": squared_relu,
    "hidden_size": 2688,
    "ffn_hidden_size": 1856,
    "num_moe_experts": 128,
    "moe_router_topk": 6,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-4,
    "moe_shared_expert_intermediate_size": 3712,
    "moe_token_dispatcher_type": "allgather",
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "use_fused_weighted_squared_relu": True,
}
MHC = GPT3 | {
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
OLMOE_LIKE = {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": 2.9e-6, "moe_router_bias_update_rate": 0.0}

RECIPES = (
    # Megatron-LM, tests/functional_tests/test_cases
    Recipe(
        "moe/gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel",
        SINKHORN | {"num_moe_experts": 4} | parallel(pp=2, ep=2, cp=2),
    ),
    Recipe(
        "moe/gpt3_mcore_tp2_cp2_pp2_ep2_te_4experts2parallel",
        SINKHORN | {"num_moe_experts": 4} | parallel(2, 2, 2, cp=2),
    ),
    Recipe(
        "moe/gpt3_mcore_tp2_pp2_ep2_etp2_te_4experts2parallel", SINKHORN | {"num_moe_experts": 4} | parallel(4, 2, 2, 2)
    ),
    Recipe("moe/gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel", SINKHORN | {"num_moe_experts": 4} | parallel(2, 2, 2)),
    Recipe("moe/gpt3_mcore_tp2_pp2_resume_torch_dist_te_2experts", SINKHORN | {"num_moe_experts": 2} | parallel(2, 2)),
    Recipe(
        "moe/gpt3_mcore_te_tp1_pp1_te_4experts_groupedGEMM_op_fuser",
        SINKHORN | SWIGLU | {"num_moe_experts": 4, "use_transformer_engine_op_fuser": True},
    ),
    Recipe(
        "moe/gpt3_mcore_te_tp1_pp2_resume_torch_dist_reshard_2x1x4_te_8experts2parallel_dist_optimizer",
        SINKHORN | parallel(1, 2, 2),
    ),
    Recipe(
        "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_overlap_grad_reduce_param_gather_groupedGEMM",
        SINKHORN | parallel(2, 1, 2),
    ),
    Recipe(
        "moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_top2router",
        TOP2 | {"moe_aux_loss_coeff": 1e-2} | parallel(2, 1, 2),
    ),
    Recipe(
        "moe/gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4", TOP2 | {"moe_aux_loss_coeff": 1e-2} | parallel(2, 1, 4, 1)
    ),
    Recipe(
        "moe/gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4",
        TOP2 | OVERLAP | {"moe_aux_loss_coeff": 1e-2, "moe_token_dispatcher_type": "alltoall"} | parallel(2, 1, 4, 1),
    ),
    Recipe(
        "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_optimizer",
        TOP2_1024 | {"moe_token_dispatcher_type": "allgather"} | parallel(ep=8),
    ),
    Recipe(
        "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon",
        TOP2_1024 | {"moe_token_dispatcher_type": "allgather"} | parallel(ep=8),
    ),
    Recipe(
        "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer",
        TOP2_1024 | {"moe_shared_expert_intermediate_size": 512} | parallel(4, 2, 2, 2),
    ),
    Recipe(
        "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph",
        TOP2_1024
        | SIGMOID_BIAS
        | FP8
        | parallel(4, 2, 2, 2)
        | {
            "moe_router_load_balancing_type": "global_aux_loss",
            "moe_router_fusion": True,
            "moe_router_pre_softmax": True,
            "moe_shared_expert_intermediate_size": 512,
            "moe_permute_fusion": True,
            "moe_token_dispatcher_type": "alltoall",
            "recompute_granularity": "selective",
            "recompute_modules": ["moe_act"],
            "moe_layer_freq": [0] * 4 + [1] * 9,
            "num_layers": 13,
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": ["attn", "mlp", "moe_router", "moe_preprocess"],
        },
    ),
    Recipe("moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed", DEEPSEEK | parallel(2, 2, 4, 1)),
    Recipe(
        "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_mtp_resume_torch_dist_fp8",
        DEEPSEEK | FP8 | {"mtp_num_layers": 1} | parallel(2, 2, 4, 1),
    ),
    Recipe(
        "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_resume_torch_dist_attn_cudagraph",
        DEEPSEEK | FP8 | {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn"} | parallel(2, 2, 4, 1),
    ),
    Recipe(
        "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental",
        DEEPSEEK | SELECTIVE | OVERLAP | parallel(2, 2, 4, 1),
    ),
    Recipe(
        "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_activation_func_fp8_input_store",
        DEEPSEEK | OVERLAP | {"activation_func_fp8_input_store": True} | parallel(2, 2, 4, 1),
    ),
    Recipe(
        "moe/gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_fine_grained_offloading",
        DEEPSEEK | SELECTIVE | OFFLOADED | OVERLAP | parallel(2, 2, 4, 1),
    ),
    Recipe(
        "moe/gpt3_moe_mcore_te_tp2_pp2_ep4_etp1_no_mtp_no_a2a_ovlp_fine_grained_offloading",
        DEEPSEEK | SELECTIVE | OFFLOADED | parallel(2, 2, 4, 1),
    ),
    Recipe(
        "moe/gpt3_mcore_te_tp1_pp1_ep8_etp1_cp_memory_speed",
        DEEPSEEK
        | OVERLAP
        | parallel(ep=8, etp=1)
        | {
            "hidden_size": 2560,
            "ffn_hidden_size": 12288,
            "num_moe_experts": 72,
            "moe_ffn_hidden_size": 1536,
            "moe_shared_expert_intermediate_size": 3072,
            "moe_router_topk": 8,
            "moe_router_group_topk": 4,
            "moe_router_num_groups": 8,
            "moe_expert_capacity_factor": 1.0,
        },
    ),
    Recipe("moe/deepseek_proxy_mfsdp_v2_ep2", FSDP_PROXY),
    Recipe("moe/deepseek_proxy_fsdp_ep2_fsdp2_ep_overlap", FSDP_PROXY | OVERLAP | {"delay_wgrad_compute": True}),
    Recipe("moe/deepseek_proxy_mfsdp_v2_ep2_ep_overlap", FSDP_PROXY | OVERLAP | {"delay_wgrad_compute": True}),
    Recipe(
        "moe/deepseek_proxy_mfsdp_v2_ep2_mxfp8_1node",
        FSDP_PROXY | FP8 | {"fp8_recipe": "mxfp8", "moe_router_padding_for_quantization": True},
    ),
    Recipe(
        "moe/deepseek_proxy_mfsdp_v2_ep2_bf16_cg",
        FSDP_PROXY | STASHED | {"moe_expert_rank_capacity_factor": 1.5},
        "moe_expert_rank_capacity_factor",
    ),
    Recipe(
        "moe/deepseek_proxy_mfsdp_v2_ep2_bf16_cg_optim_1node",
        FSDP_PROXY | STASHED | HYBRIDEP | {"moe_expert_rank_capacity_factor": 2.0},
        "moe_expert_rank_capacity_factor",
    ),
    Recipe(
        "moe/deepseek_fsdp_4node",
        DEEPSEEK_V3
        | FP8
        | {"fp8": "e4m3", "moe_router_fusion": True, "moe_token_dispatcher_type": "allgather"}
        | parallel(etp=16),
    ),
    Recipe(
        "mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release",
        DEEPSEEK_V3 | FLEX | {"num_moe_experts": 64, "moe_enable_deepep": True} | parallel(2, 4, 16, 1),
    ),
    Recipe(
        "mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release",
        DEEPSEEK_V3 | HYBRIDEP | {"num_moe_experts": 64} | parallel(2, 2, 8, 1),
    ),
    Recipe(
        "mixtral/mixtral_8x22b_tp2pp8ep8vpp1_release",
        MIXTRAL | {"hidden_size": 6144, "ffn_hidden_size": 16384} | parallel(2, 8, 8),
        "expert_tensor_parallel_size",
    ),
    Recipe("mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release", MIXTRAL_8X7B | parallel(2, 4, 4)),
    Recipe("mixtral/mixtral_8x7b_tp1pp4ep8vpp8_release", MIXTRAL_8X7B | parallel(2, 4, 8, 1)),
    Recipe("hybrid/hybrid_nemotron_nano_30b_a3b_tp2_ep4_ptq_kd_dgx_h100_1N8G", NEMOTRON | parallel(ep=8, etp=1)),
    Recipe(
        "hybrid/hybrid_flextron_nightly_tp2_pp1_ep2_dgx_h100_1N8G",
        NEMOTRON
        | parallel(2, 1, 2, 1)
        | {
            "hidden_size": 1024,
            "ffn_hidden_size": 512,
            "num_moe_experts": 32,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_shared_expert_intermediate_size": 512,
            "moe_shared_expert_overlap": True,
            "moe_token_dispatcher_type": "alltoall",
        },
    ),
    Recipe(
        "hybrid/hybrid_mr_mcore_te_tp1_pp1_ep8_cp2_kda_gated_mla_1N8G",
        DEEPSEEK
        | OLMOE_LIKE
        | FULL
        | parallel(ep=8, cp=2)
        | {
            "hidden_size": 512,
            "ffn_hidden_size": 1536,
            "moe_ffn_hidden_size": 256,
            "moe_shared_expert_intermediate_size": 256,
            "moe_router_topk": 8,
            "moe_router_group_topk": 4,
            "moe_router_num_groups": 8,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_pre_softmax": False,
        },
    ),
    Recipe(
        "hybrid/hybrid_mhc_te_moe_mtp",
        MHC | GRAPHED_ROUTER | {"cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"]} | parallel(2, 1, 2, 2),
    ),
    Recipe(
        "hybrid/hybrid_mhc_full_iteration_moe_mtp",
        MHC
        | {
            "cuda_graph_impl": "full_iteration",
            "cuda_graph_modules": [],
            "moe_expert_capacity_factor": 1.0,
            "moe_pad_expert_input_to_capacity": True,
        }
        | parallel(2, 1, 2, 2),
        "cuda_graph_modules",
    ),
    # Megatron-LM, examples
    Recipe(
        "examples/mixtral/train_mixtral_8x7b_distributed.sh",
        MIXTRAL
        | {"hidden_size": 256, "ffn_hidden_size": 896, "num_moe_experts": 2, "moe_grouped_gemm": False}
        | parallel(ep=2),
    ),
    # Megatron-Bridge, src/megatron/bridge/recipes
    Recipe("qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config", QWEN3_30B | FULL | parallel(4, 2, 4, 1)),
    Recipe("qwen3_30b_a3b_sft_8gpu_h100_bf16_config", QWEN3_30B | parallel(4, 2, 4, 1)),
    Recipe(
        "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config",
        QWEN3_30B
        | HYBRIDEP
        | GRAPHED_ROUTER
        | {"moe_hybridep_num_sms": 32, "moe_router_fusion": True}
        | parallel(ep=16, etp=1),
    ),
    Recipe("qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config", QWEN3_235B | parallel(4, 16, 8, 1, cp=2)),
    Recipe(
        "deepseek_v3_pretrain_1024gpu_h100_bf16_config",
        DEEPSEEK_V3 | HYBRIDEP | {"moe_hybridep_num_sms": 16, "mtp_num_layers": 1} | parallel(2, 16, 64, 1),
    ),
    Recipe(
        "deepseek_v3_pretrain_256gpu_h100_bf16_32nodes_config",
        DEEPSEEK_V3 | HYBRIDEP | FULL | {"mtp_num_layers": 1} | parallel(2, 8, 32, 1),
    ),
    # Megatron-Bridge, scripts/performance/configs
    Recipe(
        "QWEN3_30B_A3B_PRETRAIN_CONFIG_H100_BF16_V1", QWEN3_30B | HYBRIDEP | GRAPHED_ROUTER | parallel(ep=16, etp=1)
    ),
    Recipe("QWEN3_30B_A3B_PRETRAIN_CONFIG_H100_FP8_CS_V1", QWEN3_30B | HYBRIDEP | FP8 | parallel(ep=16, etp=1)),
    Recipe(
        "QWEN3_235B_A22B_PRETRAIN_CONFIG_H100_BF16_V1",
        QWEN3_235B | OVERLAP | {"delay_wgrad_compute": True} | parallel(2, 8, 32, 1),
    ),
    Recipe(
        "QWEN3_235B_A22B_PRETRAIN_CONFIG_H100_FP8_CS_V1",
        QWEN3_235B | OVERLAP | FP8 | {"delay_wgrad_compute": True} | parallel(2, 8, 32, 1),
    ),
    Recipe(
        "DEEPSEEK_V3_PRETRAIN_CONFIG_H100_BF16_V1",
        DEEPSEEK_V3
        | HYBRIDEP
        | parallel(2, 8, 64, 1)
        | {
            "recompute_granularity": "selective",
            "recompute_modules": ["mla_up_proj", "mlp"],
            "moe_router_force_load_balancing": True,
            "moe_router_fusion": True,
        },
    ),
    Recipe(
        "DEEPSEEK_V3_PRETRAIN_CONFIG_H100_FP8_SC_V1",
        DEEPSEEK_V3
        | HYBRIDEP
        | FP8
        | parallel(2, 8, 64, 1)
        | {
            "fp8_recipe": "blockwise",
            "recompute_granularity": "selective",
            "recompute_modules": ["mla_up_proj", "mlp"],
            "moe_router_fusion": True,
        },
    ),
)
