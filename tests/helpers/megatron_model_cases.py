"""The folders mixtral, hybrid and nemotron of Megatron-LM's tests/functional_tests/test_cases."""

from tests.helpers.megatron_recipe import (
    DEEPSEEK,
    DEEPSEEK_V3,
    FLEX,
    FP8,
    FULL,
    GRAPHED_ROUTER,
    HYBRIDEP,
    MHC,
    MIXTRAL,
    MIXTRAL_8X7B,
    NEMOTRON,
    NEMOTRON_SUPER,
    OLMOE_LIKE,
    SWIGLU,
    TOP2,
    TOP2_1024,
    Recipe,
    parallel,
)

NEMOTRON_1216 = NEMOTRON | {"hidden_size": 1216, "ffn_hidden_size": 896, "moe_token_dispatcher_type": "alltoall"}

CASES = (
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
    Recipe(
        "mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_gb_200_release",
        DEEPSEEK_V3 | HYBRIDEP | {"num_moe_experts": 64, "mtp_num_layers": 1} | parallel(2, 4, 16, 1),
    ),
    Recipe(
        "hybrid/hybrid_engram_tiny_ckpt_resume",
        SWIGLU
        | {
            "hidden_size": 128,
            "ffn_hidden_size": 256,
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 64,
            "moe_shared_expert_intermediate_size": 64,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "moe_token_dispatcher_type": "alltoall",
        }
        | parallel(),
    ),
    Recipe(
        "hybrid/hybrid_mr_mcore_te_tp1_pp2_dsv4_hybrid_mhc_mtp",
        TOP2
        | GRAPHED_ROUTER
        | {
            "moe_router_dtype": "fp32",
            "moe_aux_loss_coeff": 1e-4,
            "moe_token_dispatcher_type": "alltoall",
            "calculate_per_token_loss": True,
            "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
        }
        | parallel(1, 2, 1, 1, cp=2),
    ),
    Recipe(
        "hybrid/hybrid_mr_mcore_te_tp1_pp2_mhc_core_attn_offload_attn_cudagraph",
        TOP2_1024
        | {
            "num_moe_experts": 4,
            "moe_aux_loss_coeff": 1e-3,
            "moe_token_dispatcher_type": "alltoall",
            "fine_grained_activation_offloading": True,
            "offload_modules": ["core_attn"],
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": ["attn", "moe_router"],
        }
        | parallel(1, 2, 1, 1),
    ),
    Recipe(
        "hybrid/hybrid_dsa_moe_mamba_logitsmatch_tp2_pp1",
        SWIGLU
        | {
            "hidden_size": 256,
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 512,
            "moe_shared_expert_intermediate_size": 512,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": True,
        }
        | parallel(2),
    ),
    Recipe(
        "hybrid/hybrid_nemotron_v3_nano_a1b_tp1_ep8_QAD_dgx_h100_1N8G",
        NEMOTRON_1216 | {"moe_permute_fusion": True} | parallel(2, 1, 8, 1),
    ),
    Recipe(
        "hybrid/hybrid_nemotron_v3_pico_7b_a1b_tp1_ep8_QAD_dgx_h100_1N8G",
        NEMOTRON_1216 | {"moe_permute_fusion": False} | parallel(ep=4, etp=1, cp=2),
    ),
    Recipe(
        "nemotron/nemotron3_super_release_gb200",
        NEMOTRON_SUPER
        | HYBRIDEP
        | FP8
        | {
            "fp8": "e4m3",
            "fp8_recipe": "mxfp8",
            "moe_router_padding_for_quantization": True,
            "moe_hybridep_num_sms": 32,
            "calculate_per_token_loss": True,
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": ["attn", "mamba", "moe_router", "moe_preprocess"],
        }
        | parallel(2, 1, 64, 1),
    ),
    # Its layers have widths of 1280 to 2688 and 4 to 22 experts a token: the widest.
    Recipe(
        "nemotron/nemotron3_puzzle_75b_nightly_tp1_pp1_cp1_ep8_dgx_gb200",
        NEMOTRON_SUPER
        | HYBRIDEP
        | FULL
        | {"moe_router_num_groups": 1, "moe_router_group_topk": 1, "moe_flex_dispatcher_num_sms": 16}
        | parallel(ep=8, etp=1),
    ),
    Recipe(
        "nemotron/nemotron3_5_lightning_nightly_tp1_pp1_cp1_ep8_dgx_gb200",
        NEMOTRON
        | HYBRIDEP
        | {"moe_router_num_groups": 1, "moe_router_group_topk": 1, "moe_flex_dispatcher_num_sms": 16}
        | parallel(ep=8, etp=1),
    ),
    Recipe(
        "nemotron/nemotron3_5_lightning_no_load_optim_tp1_pp1_cp1_ep4_dgx_gb200_1N4G",
        NEMOTRON
        | {
            "hidden_size": 768,
            "ffn_hidden_size": 512,
            "num_moe_experts": 32,
            "moe_router_topk": 4,
            "moe_router_num_groups": 1,
            "moe_router_group_topk": 1,
            "moe_shared_expert_intermediate_size": 1024,
            "moe_token_dispatcher_type": "alltoall",
        }
        | parallel(ep=4, etp=1),
    ),
)

# Cases that differ in nothing that a MoE layer sees.
ALSO: dict[str, tuple[str, ...]] = {
    "mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release": (
        "mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_release_sm",
    ),
    "mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_gb_200_release": (
        "mixtral/deepseekv3_proxy_flex_tp1pp4emp16etp1cp1_gb_200_release_sm",
    ),
    "mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release": (
        "mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release_sm",
    ),
    "mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release": ("mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release_sm",),
    "hybrid/hybrid_dsa_moe_mamba_logitsmatch_tp2_pp1": (
        "hybrid/hybrid_dsa_moe_mamba_logitsmatch_tp1_pp1",
        "hybrid/hybrid_dsa_moe_mamba_logitsmatch_tp1_pp2",
    ),
    "nemotron/nemotron3_super_release_gb200": ("nemotron/nemotron3_super_release_gb200_sm",),
}

MODEL_TESTS = tuple(each._replace(also=ALSO.get(each.source, ())) for each in CASES)
