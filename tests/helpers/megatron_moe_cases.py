"""The folders moe and moe2.0 of Megatron-LM's tests/functional_tests/test_cases.

Those of moe2.0 are a model's config and a run's, which its test merges.
"""

from tests.helpers.megatron_recipe import (
    DEEPEP,
    DEEPSEEK,
    DEEPSEEK_V3,
    FP8,
    FSDP_PROXY,
    HYBRIDEP,
    OFFLOADED,
    OVERLAP,
    SELECTIVE,
    SIGMOID_BIAS,
    SINKHORN,
    STASHED,
    SWIGLU,
    TOP2,
    TOP2_1024,
    Recipe,
    parallel,
)

SCOPED_GRAPHS = (
    TOP2_1024
    | SIGMOID_BIAS
    | FP8
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
    }
)
E4M3 = FP8 | {"fp8": "e4m3"}
FSDP_SELECTIVE = {
    "recompute_granularity": "selective",
    "recompute_modules": ["layernorm", "mla_up_proj", "moe_act"],
}
FSDP_OFFLOADED = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "attn_proj"]}
CONVERGING = (
    FSDP_PROXY
    | FP8
    | FSDP_SELECTIVE
    | FSDP_OFFLOADED
    | {"moe_router_topk": 2, "moe_router_group_topk": 4, "moe_router_topk_scaling_factor": 2.5}
)
DEEPSEEK_2 = DEEPSEEK | {"mtp_num_layers": 1}
QWEN3_PROXY = SWIGLU | {
    "hidden_size": 1024,
    "ffn_hidden_size": 4096,
    "num_moe_experts": 32,
    "moe_ffn_hidden_size": 1024,
    "moe_shared_expert_intermediate_size": 1024,
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_router_topk": 4,
    "moe_aux_loss_coeff": 1e-4,
    "moe_router_score_function": "softmax",
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "deterministic_mode": True,
}

CASES = (
    Recipe(
        "moe/gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic",
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
        "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer",
        TOP2_1024 | {"moe_shared_expert_intermediate_size": 512} | parallel(4, 2, 2, 2),
    ),
    Recipe(
        "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph",
        SCOPED_GRAPHS | {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|(tt|)*6mL"} | parallel(4, 2, 2, 2),
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
        FSDP_PROXY | STASHED | HYBRIDEP | {"moe_expert_rank_capacity_factor": 1.5},
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
        "moe/gpt3_345m_nightly_dgx_a100_1N8G_tp2_pp2_resume_torch_4experts",
        SINKHORN | {"num_moe_experts": 4} | parallel(2, 2),
    ),
    Recipe(
        "moe/gpt3_mcore_te_tp2_zp_z3_resume_torch_dist_te_8experts2parallel_top2router",
        TOP2 | {"moe_aux_loss_coeff": 1e-2, "calculate_per_token_loss": True} | parallel(2, 1, 2),
    ),
    Recipe(
        "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer_1node",
        TOP2_1024 | {"moe_shared_expert_intermediate_size": 512} | parallel(4, 1, 2, 2),
    ),
    Recipe(
        "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph_1node",
        SCOPED_GRAPHS | {"mtp_num_layers": 1} | parallel(4, 1, 2, 2),
    ),
    Recipe(
        "moe/gpt_grpo_tp8tp4_pp1_ep8ep2_dp8_throughputtest",
        SWIGLU
        | {
            "hidden_size": 2048,
            "ffn_hidden_size": 10944,
            "num_moe_experts": 64,
            "moe_ffn_hidden_size": 1408,
            "moe_shared_expert_intermediate_size": 2816,
            "moe_router_topk": 6,
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_router_score_function": "sigmoid",
            "moe_aux_loss_coeff": 1e-3,
            "moe_z_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": True,
            "moe_pad_experts_for_cuda_graph_inference": True,
            "calculate_per_token_loss": True,
            "cuda_graph_impl": "local",
        }
        | parallel(8, 1, 8, 1),
    ),
    Recipe("moe/deepseek_proxy_unsharded_1node", FSDP_PROXY | E4M3 | parallel()),
    Recipe("moe/deepseek_proxy_fsdp_ep4", FSDP_PROXY | parallel(ep=4)),
    Recipe("moe/deepseek_proxy_fsdp_ep2_fsdp2", FSDP_PROXY | E4M3),
    Recipe("moe/deepseek_proxy_fsdp_ep2_fsdp2_1node", FSDP_PROXY | E4M3 | FSDP_SELECTIVE | FSDP_OFFLOADED),
    Recipe(
        "moe/deepseek_proxy_fsdp_ep2_fsdp2_hsdp2",
        FSDP_PROXY
        | E4M3
        | FSDP_SELECTIVE
        | {"init_model_with_meta_device": True, "calculate_per_token_loss": True, "moe_router_fusion": True},
    ),
    Recipe("moe/deepseek_proxy_fsdpv2_ep2_fsdp4_1node", FSDP_PROXY | FP8 | {"fp8_recipe": "mxfp8"}),
    Recipe("moe/deepseek_proxy_mfsdp_v2_ep2_mb2_per_token_loss", FSDP_PROXY | {"calculate_per_token_loss": True}),
    Recipe("moe/deepseek_proxy_ep2_fsdp2_1node_conv", CONVERGING),
    Recipe("moe/deepseek_proxy_ep2_pp2_1node_conv", CONVERGING | parallel(1, 2, 2)),
    Recipe("moe2.0/dsv3_tp1pp1ep8", DEEPSEEK_2 | parallel(ep=8)),
    Recipe("moe2.0/dsv3_tp2pp2ep4", DEEPSEEK_2 | DEEPEP | {"moe_router_fusion": True} | parallel(2, 2, 4, 1)),
    Recipe(
        "moe2.0/dsv3_tp2pp2ep4_fp8",
        DEEPSEEK_2 | FP8 | {"fp8": "e4m3", "fp8_recipe": "blockwise"} | parallel(2, 2, 4, 1),
    ),
    Recipe(
        "moe2.0/dsv3_tp2pp2ep4_cudagraph",
        DEEPSEEK_2
        | FP8
        | {
            "num_layers": 2,
            "moe_layer_freq": [0, 1],
            "fp8_recipe": "blockwise",
            "moe_router_fusion": True,
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": ["attn", "mlp", "moe_router", "moe_preprocess"],
            "recompute_granularity": "selective",
            "recompute_modules": ["moe_act"],
        }
        | parallel(2, 2, 4, 1),
    ),
    Recipe(
        "moe2.0/dsv3_tp2pp2ep4_offloading",
        DEEPSEEK_2 | SELECTIVE | OFFLOADED | {"moe_router_fusion": True} | parallel(2, 2, 4, 1),
    ),
    Recipe(
        "moe2.0/dsv3_tp2pp2ep4_a2aOverlap",
        DEEPSEEK_2 | OVERLAP | {"delay_wgrad_compute": True, "moe_router_fusion": True} | parallel(2, 2, 4, 1),
    ),
    Recipe("moe2.0/dsv3_tp2pp2ep4_cp2", DEEPSEEK_2 | parallel(2, 2, 4, 1, cp=2)),
    Recipe("moe2.0/qwen3_tp1pp1ep8", QWEN3_PROXY | parallel(ep=8)),
    Recipe("moe2.0/qwen3_tp2pp2ep4", QWEN3_PROXY | DEEPEP | {"moe_router_fusion": True} | parallel(2, 2, 4, 1)),
    Recipe(
        "moe2.0/qwen3_tp2pp1ep8_muon", QWEN3_PROXY | {"moe_token_dispatcher_type": "allgather"} | parallel(2, 1, 8, 1)
    ),
    Recipe("moe2.0/qwen3_tp2pp2ep4_cp2", QWEN3_PROXY | parallel(2, 2, 4, 1, cp=2)),
)

# Cases that differ in nothing that a MoE layer sees.
ALSO: dict[str, tuple[str, ...]] = {
    "moe/gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic": (
        "moe/gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic_dp_last",
    ),
    "moe/gpt3_mcore_tp2_cp2_pp2_ep2_te_4experts2parallel": (
        "moe/gpt3_mcore_tp2_cp2_pp2_ep2_te_4experts2parallel_dp_last",
    ),
    "moe/gpt3_mcore_tp2_pp2_ep2_etp2_te_4experts2parallel": (
        "moe/gpt3_mcore_tp2_pp2_ep2_etp2_te_4experts2parallel_dp_last",
    ),
    "moe/gpt3_mcore_tp2_pp2_ep2_te_4experts2parallel": (
        "moe/gpt3_mcore_tp2_pp2_ep2_resume_torch_dist_te_4experts2parallel",
    ),
    "moe/gpt3_mcore_te_tp1_pp2_resume_torch_dist_reshard_2x1x4_te_8experts2parallel_dist_optimizer": (
        "moe/gpt3_mcore_te_tp1_pp2_resume_torch_dist_reshard_2x1x4_te_8experts2parallel_dist_optimizer_1node",
    ),
    "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_overlap_grad_reduce_param_gather_groupedGEMM": (
        "moe/gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_te_8experts2parallel_dist_optimizer",
        "moe/gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_te_8experts2parallel_groupedGEMM",
        "moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer",
        "moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer_1node",
        "moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_groupedGEMM",
        "moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances",
        "moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances_1node",
        "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_ddp_average_in_collective",
        "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_ddp_average_in_collective_1node",
        "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_dist_optimizer",
    ),
    "moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_top2router": (
        "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_top2router",
    ),
    "moe/gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4": (
        "moe/gpt3_mcore_te_tp2_pp1_te_a2a_ovlp_8experts_etp1_ep4_1node",
    ),
    "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_optimizer": (
        "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_optimizer_1node",
        "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon",
        "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon_1node",
        "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon_param_layout",
        "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon_param_layout_1node",
        "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_muon",
        "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_muon_1node",
        "moe/gpt3_moe_mr_mcore_te_ep8_resume_torch_dist_dist_optimizer",
    ),
    "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer": (
        "moe/gpt3_moe_mr_mcore_te_tp4_ep2_etp2_pp2_resume_torch_dist_dist_optimizer",
    ),
    "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph": (
        "moe/gpt3_moe_mr_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph",
    ),
    "moe/deepseek_proxy_mfsdp_v2_ep2": tuple(
        f"moe/deepseek_proxy_mfsdp_v2_ep2_{each}"
        for each in ("accum", "fsdp2", "fsdp2_1node", "hfsdp", "hfsdp_mb2", "hsdp", "hsdp_mb2", "mb2")
    ),
    "moe/deepseek_proxy_fsdp_ep2_fsdp2": (
        "moe/deepseek_proxy_mfsdp_v1_ep2",
        "moe/deepseek_proxy_mfsdp_v1_ep2_1node",
    ),
    "moe2.0/qwen3_tp2pp2ep4": ("moe2.0/qwen3next_tp2pp2ep4",),
}

MOE_TESTS = tuple(each._replace(also=ALSO.get(each.source, ())) for each in CASES)
