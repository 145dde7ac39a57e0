"""All recipes of NVIDIA-NeMo/Megatron-Bridge for H100 with MoE layers: what a MoE layer sees of them.

Read in August 2026, commit 067f987 (src/megatron/bridge/recipes/*/h100 and perf_recipes/*/h100), which wants a newer
Megatron-Core than 0.19.2: what that does not know of recomputation (mhc, gdn_norm_out) and routing (DeepSeek-V4's
hashed layers) is left out. The models' values are those of src/megatron/bridge/models and of Hugging Face's configs.
Vision towers and dense layers are not of concern.
"""

from typing import Any

from megatron.core.activations import fast_gelu
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from tests.helpers.megatron_recipe import (
    DEEPEP,
    DEEPSEEK_V3,
    FULL,
    HYBRIDEP,
    NEMOTRON,
    NEMOTRON_SUPER,
    OVERLAP,
    QWEN3_30B,
    QWEN3_235B,
    SIGMOID_BIAS,
    SWIGLU,
    Fields,
    Recipe,
    parallel,
)


def _moe(
    experts: int, topk: int, width: int, hidden: int, ffn: int = 8192, shared: int | None = None, **more: Any
) -> Fields:
    return {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "moe_shared_expert_intermediate_size": shared,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_token_dispatcher_type": "alltoall",
        **more,
    }


_SOFTMAX_SEQ = SWIGLU | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_router_pre_softmax": True}
_SIGMOID = SWIGLU | SIGMOID_BIAS | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_router_dtype": "fp32"}
_GLOBAL = SWIGLU | {"moe_router_load_balancing_type": "global_aux_loss", "moe_shared_expert_gate": True}
_OAI = {
    "activation_func": quick_gelu,
    "gated_linear_unit": True,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
}
_GPT_OSS = _OAI | {"add_bias_linear": True, "moe_router_load_balancing_type": "none"}
_DEEPSEEK_V4 = (
    SWIGLU
    | HYBRIDEP
    | {
        "activation_func_clamp_value": 10.0,
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": 1.5,
    }
)
# A layer at the end of the model, where SwiGLU is clamped (swiglu_limits in models/stepfun, models/exaone).
_CLAMPED_7 = {"activation_func_clamp_value": 7.0}

MODELS: dict[str, Fields] = {
    "DSV2": _SOFTMAX_SEQ | _moe(160, 6, 1536, 5120, shared=3072, moe_router_topk_scaling_factor=16.0),
    "DSV2L": _SOFTMAX_SEQ | _moe(64, 6, 1408, 2048, shared=2816),
    "DSV3": DEEPSEEK_V3 | {"mtp_num_layers": 1},
    "DSV4": _DEEPSEEK_V4 | _moe(256, 6, 2048, 4096, shared=2048),
    "EXAONE_236B": _SIGMOID | _moe(128, 8, 2048, 6144, shared=2048, moe_router_topk_scaling_factor=2.5),
    "EXAONE_750B": _SIGMOID | _CLAMPED_7 | _moe(128, 8, 2048, 6144, shared=2048, moe_router_topk_scaling_factor=2.5),
    "GEMMA_4": {"activation_func": fast_gelu, "gated_linear_unit": True, "moe_router_pre_softmax": True}
    | _moe(128, 8, 704, 2816, shared=2112),
    "GLM_45": _SIGMOID | _moe(160, 8, 1536, 5120, shared=1536, moe_router_topk_scaling_factor=2.5),
    "GLM_45_AIR": _SIGMOID | _moe(128, 8, 1408, 4096, shared=1408),
    "GLM_5": _SIGMOID | _moe(256, 8, 2048, 6144, shared=2048, moe_router_topk_scaling_factor=2.5),
    "GPT_OSS_20B": _GPT_OSS | _moe(32, 4, 2880, 2880),
    "GPT_OSS_120B": _GPT_OSS | _moe(128, 4, 2880, 2880),
    "KIMI_K2": _SIGMOID | _moe(384, 8, 2048, 7168, shared=2048, moe_router_topk_scaling_factor=2.827),
    "MINIMAX_M3": _OAI | SIGMOID_BIAS | _moe(128, 4, 3072, 6144, shared=3072, moe_router_topk_scaling_factor=2.0),
    "MOONLIGHT": _SIGMOID | _moe(64, 6, 1408, 2048, shared=2816, moe_router_topk_scaling_factor=2.446),
    "NEMOTRON_NANO": NEMOTRON | {"moe_token_dispatcher_type": "alltoall"},
    "NEMOTRON_SUPER": NEMOTRON_SUPER | {"moe_token_dispatcher_type": "alltoall"},
    "NEMOTRON_ULTRA": NEMOTRON_SUPER | {"moe_token_dispatcher_type": "alltoall", "moe_latent_size": 2048},
    "OLMOE": _SOFTMAX_SEQ | _moe(64, 8, 1024, 2048),
    "QWEN3_30B": QWEN3_30B,
    "QWEN3_235B": QWEN3_235B,
    "QWEN3_NEXT": _GLOBAL | _moe(512, 10, 512, 2048, shared=512),
    "QWEN35_35B": _GLOBAL | _moe(256, 8, 512, 2048, shared=512),
    "QWEN35_122B": _GLOBAL | _moe(256, 8, 1024, 3072, shared=1024),
    "QWEN35_397B": _GLOBAL | _moe(512, 10, 1024, 4096, shared=1024),
    "STEP_35": SWIGLU | SIGMOID_BIAS | _CLAMPED_7 | _moe(288, 8, 1280, 4096, shared=1280),
    "STEP_37": SWIGLU | SIGMOID_BIAS | _CLAMPED_7 | _moe(288, 8, 1280, 4096, shared=1280),
}
WORDS: dict[str, Fields] = {
    "deepep": DEEPEP,
    "hybridep": HYBRIDEP,
    "full": FULL,
    "overlap": OVERLAP,
    "delay": {"delay_wgrad_compute": True},
    "forced": {"moe_router_force_load_balancing": True},
    "shared_overlap": {"moe_shared_expert_overlap": True},
    "drop": {"moe_expert_capacity_factor": 1.1, "moe_pad_expert_input_to_capacity": True},
    "fp8cs": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8ds": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "fp8sc": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
    "fp8mx": {"fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
# model, TP, PP, EP, expert TP, CP, words | functions (without _config; perf/ of perf_recipes)
TABLE = """
DSV2 1 4 32 - 1 full shared_overlap | deepseek_v2_pretrain_128gpu_h100_bf16
DSV2L 1 1 8 - 1 full shared_overlap | deepseek_v2_lite_pretrain_8gpu_h100_bf16
DSV3 2 16 64 1 1 hybridep shared_overlap | deepseek_v3_pretrain_1024gpu_h100_bf16
DSV3 2 8 32 1 1 hybridep full shared_overlap | deepseek_v3_pretrain_256gpu_h100_bf16_32nodes
DSV3 2 8 64 1 1 hybridep recompute:mla_up_proj+mlp forced shared_overlap | perf/deepseek_v3_pretrain_1024gpu_h100_bf16
    perf/deepseek_v3_pretrain_64gpu_h100_bf16
DSV3 2 8 64 1 1 hybridep recompute:mla_up_proj+mlp forced shared_overlap fp8cs |
    perf/deepseek_v3_pretrain_1024gpu_h100_fp8cs
    perf/deepseek_v3_pretrain_64gpu_h100_fp8cs
DSV3 2 8 64 1 1 hybridep recompute:mla_up_proj+mlp forced shared_overlap fp8sc |
    perf/deepseek_v3_pretrain_1024gpu_h100_fp8sc
    perf/deepseek_v3_pretrain_1024gpu_h100_fp8sc_large_scale
DSV4 1 4 8 1 1 recompute:moe_act | deepseek_v4_flash_no_mtp_sft_32gpu_h100_bf16
    deepseek_v4_flash_pretrain_32gpu_h100_bf16
    deepseek_v4_flash_pretrain_32gpu_h100_bf16_muon
    deepseek_v4_flash_sft_32gpu_h100_bf16
DSV4 1 4 8 1 1 recompute:moe_act fp8mx | deepseek_v4_flash_pretrain_32gpu_h100_fp8mx
EXAONE_236B 4 4 4 1 1 deepep | exaone_moe_236b_a23b_peft_16gpu_h100_bf16
EXAONE_236B 4 8 8 1 1 deepep full | exaone_moe_236b_a23b_pretrain_64gpu_h100_bf16
EXAONE_236B 4 8 8 1 1 deepep | exaone_moe_236b_a23b_sft_64gpu_h100_bf16
EXAONE_750B 4 8 16 1 1 deepep recompute:core_attn+moe+shared_experts | exaone_moe_2_0_750b_a37_peft_128gpu_h100_bf16
EXAONE_750B 4 16 32 1 1 deepep full | exaone_moe_2_0_750b_a37_pretrain_512gpu_h100_bf16
    exaone_moe_2_0_750b_a37_sft_512gpu_h100_bf16
GEMMA_4 2 1 4 1 1 | gemma4_vl_26b_peft_4gpu_h100_bf16
GEMMA_4 4 1 8 1 1 full | gemma4_vl_26b_sft_8gpu_h100_bf16
GLM_45 2 4 4 - 1 shared_overlap | glm45_355b_peft_16gpu_h100_bf16
GLM_45 2 8 16 1 1 shared_overlap | glm45_355b_pretrain_128gpu_h100_bf16
GLM_45 2 8 16 - 1 shared_overlap | glm45_355b_sft_128gpu_h100_bf16
GLM_45_AIR 1 2 4 - 1 shared_overlap | glm45_air_106b_peft_8gpu_h100_bf16
GLM_45_AIR 1 4 8 1 1 shared_overlap | glm45_air_106b_pretrain_32gpu_h100_bf16
GLM_45_AIR 1 4 8 - 1 shared_overlap | glm45_air_106b_sft_32gpu_h100_bf16
GLM_45_AIR 1 8 4 - 1 shared_overlap | glm_45v_peft_32gpu_h100_bf16
GLM_45_AIR 1 8 16 - 1 shared_overlap | glm_45v_sft_128gpu_h100_bf16
GLM_5 1 13 16 1 1 deepep full | glm52_peft_208gpu_h100_bf16
GLM_5 1 13 32 1 1 deepep full | glm52_pretrain_416gpu_h100_bf16
GLM_5 1 13 32 1 16 deepep full | glm52_sft_416gpu_h100_bf16
GLM_5 1 19 32 1 32 deepep full | glm52_sft_608gpu_h100_bf16_200k
GLM_5 1 13 32 1 32 deepep full | perf/glm51_sft_416gpu_h100_bf16
    perf/glm52_sft_416gpu_h100_bf16
GPT_OSS_120B 1 1 8 - 1 | gpt_oss_120b_peft_8gpu_h100_bf16
GPT_OSS_120B 2 4 16 1 1 | gpt_oss_120b_pretrain_64gpu_h100_bf16
GPT_OSS_120B 1 4 8 - 1 | gpt_oss_120b_sft_32gpu_h100_bf16
GPT_OSS_120B 2 6 4 - 4 recompute:moe_act | gpt_oss_120b_sft_48gpu_h100_bf16_32k
GPT_OSS_120B 1 4 8 1 1 recompute:layernorm+moe_act forced | perf/gpt_oss_120b_pretrain_64gpu_h100_bf16
GPT_OSS_120B 1 4 8 1 1 recompute:layernorm+moe_act forced fp8cs | perf/gpt_oss_120b_pretrain_64gpu_h100_fp8cs
GPT_OSS_20B 1 1 1 - 1 | gpt_oss_20b_peft_1gpu_h100_bf16
GPT_OSS_20B 1 1 1 - 1 fp8cs | gpt_oss_20b_peft_1gpu_h100_fp8cs
GPT_OSS_20B 1 1 1 - 1 fp8mx | gpt_oss_20b_peft_1gpu_h100_fp8mx
GPT_OSS_20B 2 4 4 1 1 | gpt_oss_20b_pretrain_16gpu_h100_bf16
GPT_OSS_20B 2 4 4 1 1 fp8cs | gpt_oss_20b_pretrain_16gpu_h100_fp8cs
GPT_OSS_20B 2 4 4 1 1 fp8mx | gpt_oss_20b_pretrain_16gpu_h100_fp8mx
GPT_OSS_20B 1 1 8 - 1 | gpt_oss_20b_sft_8gpu_h100_bf16_32k
    gpt_oss_20b_sft_8gpu_h100_bf16
    gpt_oss_20b_sft_8gpu_h100_bf16_openmathinstruct2_thinking_packed
GPT_OSS_20B 1 1 8 - 1 fp8cs | gpt_oss_20b_sft_8gpu_h100_fp8cs
GPT_OSS_20B 1 1 8 - 1 fp8mx | gpt_oss_20b_sft_8gpu_h100_fp8mx
KIMI_K2 2 16 32 1 1 hybridep full shared_overlap | kimi_k25_vl_sft_512gpu_h100_bf16
KIMI_K2 2 16 32 1 1 shared_overlap | kimi_k2_pretrain_512gpu_h100_bf16
KIMI_K2 8 16 64 1 1 recompute:mla_up_proj+mlp forced | perf/kimi_k2_pretrain_1024gpu_h100_bf16
KIMI_K2 8 16 64 1 1 recompute:mla_up_proj+mlp forced fp8cs | perf/kimi_k2_pretrain_1024gpu_h100_fp8cs
KIMI_K2 8 16 64 1 1 recompute:mla_up_proj+mlp forced fp8sc | perf/kimi_k2_pretrain_1024gpu_h100_fp8sc
MINIMAX_M3 2 4 32 1 1 hybridep recompute:moe_act | minimax_m3_pretrain_256gpu_h100_bf16
    minimax_m3_sft_128gpu_h100_bf16
MOONLIGHT 1 1 2 1 1 shared_overlap | moonlight_16b_peft_2gpu_h100_bf16
MOONLIGHT 1 1 4 1 1 shared_overlap | moonlight_16b_peft_4gpu_h100_bf16
MOONLIGHT 1 1 8 1 1 hybridep overlap delay | moonlight_16b_pretrain_16gpu_h100_bf16
    moonlight_16b_sft_8gpu_h100_bf16_tp1
MOONLIGHT 2 1 8 1 1 shared_overlap | moonlight_16b_pretrain_8gpu_h100_bf16
MOONLIGHT 2 1 8 1 2 shared_overlap | moonlight_16b_sft_8gpu_h100_bf16_8k
MOONLIGHT 4 2 4 1 1 shared_overlap | moonlight_16b_sft_8gpu_h100_bf16
NEMOTRON_NANO 1 1 8 1 1 deepep | nemotron_3_nano_peft_8gpu_h100_bf16
    nemotron_3_nano_sft_8gpu_h100_bf16
NEMOTRON_NANO 1 1 8 1 1 hybridep graph:attn+mamba recompute:moe+layernorm | nemotron_3_nano_pretrain_8gpu_h100_bf16
NEMOTRON_NANO 4 1 1 - 2 | nemotron_omni_cord_v2_long_context_sft_8gpu_h100_bf16
NEMOTRON_NANO 4 1 1 - 1 | nemotron_omni_cord_v2_peft_4gpu_h100_bf16
    nemotron_omni_cord_v2_sft_4gpu_h100_bf16
    nemotron_omni_valor32k_peft_4gpu_h100_bf16
    nemotron_omni_valor32k_sft_4gpu_h100_bf16
NEMOTRON_NANO 1 1 8 1 1 hybridep graph:attn+mamba recompute:moe_act+layernorm forced offload:expert_fc1 |
    perf/nemotron_3_5_lightning_pretrain_16gpu_h100_bf16
NEMOTRON_NANO 1 1 8 1 1 hybridep graph:attn+mamba recompute:layernorm forced fp8cs |
    perf/nemotron_3_5_lightning_pretrain_16gpu_h100_fp8cs
NEMOTRON_NANO 1 1 8 1 1 hybridep graph:attn+mamba recompute:moe+layernorm forced |
    perf/nemotron_3_nano_pretrain_16gpu_h100_bf16
NEMOTRON_NANO 1 1 16 1 1 hybridep graph:attn+mamba recompute:layernorm forced fp8cs |
    perf/nemotron_3_nano_pretrain_16gpu_h100_fp8cs
NEMOTRON_SUPER 8 1 16 1 1 | nemotron_3_super_peft_16gpu_h100_bf16
    nemotron_3_super_sft_16gpu_h100_bf16
NEMOTRON_SUPER 1 1 1 1 1 | nemotron_3_super_peft_1gpu_h100_bf16
NEMOTRON_SUPER 8 1 16 1 1 graph:attn+mamba+moe_router+moe_preprocess | nemotron_3_super_pretrain_16gpu_h100_bf16
NEMOTRON_SUPER 1 8 2 1 2 | nemotron_3_super_sft_16gpu_h100_bf16_32k
NEMOTRON_SUPER 1 2 32 1 1 hybridep recompute:layernorm+moe_act+moe+core_attn forced drop |
    perf/nemotron_3_super_pretrain_64gpu_h100_bf16
NEMOTRON_ULTRA 2 4 8 1 1 hybridep recompute:moe+layernorm+core_attn+moe_act+mlp+shared_experts |
    nemotron_3_ultra_peft_32gpu_h100_bf16_openmathinstruct2_packed
NEMOTRON_ULTRA 1 3 8 1 1 hybridep | nemotron_3_ultra_pretrain_24gpu_h100_bf16
NEMOTRON_ULTRA 2 6 32 1 1 hybridep recompute:moe+layernorm+core_attn+moe_act |
    nemotron_3_ultra_sft_192gpu_h100_bf16_openmathinstruct2_packed
OLMOE 1 1 1 - 1 | olmoe_7b_peft_1gpu_h100_bf16
OLMOE 1 1 8 - 1 | olmoe_7b_pretrain_8gpu_h100_bf16
    olmoe_7b_sft_8gpu_h100_bf16
QWEN35_122B 2 8 16 1 1 overlap delay forced | perf/qwen35_vl_122b_a10b_pretrain_128gpu_h100_bf16
QWEN35_122B 2 8 16 1 1 overlap delay forced fp8cs | perf/qwen35_vl_122b_a10b_pretrain_128gpu_h100_fp8cs
QWEN35_122B 2 1 8 1 1 | qwen35_vl_122b_a10b_peft_8gpu_h100_bf16
QWEN35_122B 4 8 8 - 2 | qwen35_vl_122b_a10b_pretrain_128gpu_h100_bf16_mock
QWEN35_122B 2 6 8 1 1 full | qwen35_vl_122b_a10b_sft_48gpu_h100_bf16
QWEN35_35B 1 2 8 1 1 hybridep graph:attn+moe_router+moe_preprocess forced |
    perf/qwen35_vl_35b_a3b_pretrain_16gpu_h100_bf16
QWEN35_35B 1 2 8 1 1 overlap delay forced fp8cs | perf/qwen35_vl_35b_a3b_pretrain_16gpu_h100_fp8cs
QWEN35_35B 1 2 8 1 1 hybridep graph:attn+moe_router+moe_preprocess | qwen35_vl_35b_a3b_peft_16gpu_h100_bf16
QWEN35_35B 2 1 4 1 1 full | qwen35_vl_35b_a3b_peft_4gpu_h100_bf16
QWEN35_35B 1 2 8 1 1 hybridep graph:attn+moe_router+moe_preprocess recompute:core_attn+moe_act |
    qwen35_vl_35b_a3b_pretrain_16gpu_h100_bf16_functional
QWEN35_35B 4 2 4 - 1 | qwen35_vl_35b_a3b_pretrain_8gpu_h100_bf16_mock
QWEN35_35B 1 2 8 1 1 hybridep full | qwen35_vl_35b_a3b_sft_16gpu_h100_bf16
QWEN35_35B 1 1 2 1 1 full | qwen35_vl_35b_a3b_sft_2gpu_h100_bf16_fsdp
QWEN35_35B 1 4 8 1 2 full | qwen35_vl_35b_a3b_sft_long_context_32gpu_h100_bf16
QWEN35_397B 2 8 32 1 1 overlap delay forced | perf/qwen35_vl_397b_a17b_pretrain_256gpu_h100_bf16
QWEN35_397B 2 8 32 1 1 overlap delay forced fp8cs | perf/qwen35_vl_397b_a17b_pretrain_256gpu_h100_fp8cs
QWEN35_397B 2 1 32 1 1 | qwen35_vl_397b_a17b_peft_32gpu_h100_bf16
QWEN35_397B 4 16 16 - 2 | qwen35_vl_397b_a17b_pretrain_512gpu_h100_bf16_mock
QWEN35_397B 2 4 32 1 1 full | qwen35_vl_397b_a17b_sft_128gpu_h100_bf16
QWEN3_235B 2 8 32 1 1 overlap delay forced | perf/qwen3_235b_a22b_pretrain_256gpu_h100_bf16
QWEN3_235B 2 8 32 1 1 hybridep graph:moe_router+moe_preprocess recompute:moe_act+layernorm overlap delay forced |
    perf/qwen3_235b_a22b_pretrain_256gpu_h100_bf16_hybridep_dev
QWEN3_235B 2 8 32 1 1 overlap delay forced fp8cs | perf/qwen3_235b_a22b_pretrain_256gpu_h100_fp8cs
    perf/qwen3_235b_a22b_pretrain_256gpu_h100_fp8cs_large_scale
QWEN3_235B 2 8 32 1 1 graph:moe_router+moe_preprocess overlap delay forced |
    perf/qwen3_vl_235b_a22b_pretrain_256gpu_h100_bf16
QWEN3_235B 2 8 32 1 1 graph:moe_router+moe_preprocess overlap delay forced fp8cs |
    perf/qwen3_vl_235b_a22b_pretrain_256gpu_h100_fp8cs
QWEN3_235B 4 4 4 1 1 deepep | qwen3_235b_a22b_peft_16gpu_h100_bf16
QWEN3_235B 4 16 8 1 2 deepep | qwen3_235b_a22b_pretrain_256gpu_h100_bf16
QWEN3_235B 4 16 4 1 1 deepep | qwen3_235b_a22b_sft_64gpu_h100_bf16
QWEN3_235B 1 1 16 - 1 deepep | qwen3_vl_235b_a22b_peft_16gpu_h100_bf16
QWEN3_235B 4 16 8 - 2 | qwen3_vl_235b_a22b_pretrain_256gpu_h100_bf16_mock
QWEN3_235B 4 1 32 - 1 deepep | qwen3_vl_235b_a22b_sft_32gpu_h100_bf16
QWEN3_30B 1 1 16 1 1 hybridep graph:moe_router+moe_preprocess overlap forced |
    perf/qwen3_30b_a3b_pretrain_16gpu_h100_bf16
    perf/qwen3_30b_a3b_pretrain_64gpu_h100_bf16
QWEN3_30B 1 1 16 1 1 hybridep graph:attn+moe_router+moe_preprocess forced fp8cs |
    perf/qwen3_30b_a3b_pretrain_16gpu_h100_fp8cs
    perf/qwen3_30b_a3b_pretrain_64gpu_h100_fp8cs
QWEN3_30B 1 1 16 1 1 hybridep graph:attn+moe_router+moe_preprocess forced fp8ds |
    perf/qwen3_30b_a3b_pretrain_16gpu_h100_fp8ds
QWEN3_30B 1 1 8 1 1 hybridep forced | perf/qwen3_30b_a3b_pretrain_32gpu_h100_bf16_dev
QWEN3_30B 1 1 8 1 1 hybridep graph:attn+moe_router+moe_preprocess forced fp8sc |
    perf/qwen3_30b_a3b_pretrain_32gpu_h100_fp8sc_dev
QWEN3_30B 1 2 8 1 1 graph:moe_router+moe_preprocess overlap delay forced |
    perf/qwen3_vl_30b_a3b_pretrain_16gpu_h100_bf16
QWEN3_30B 1 2 8 1 1 graph:moe_router+moe_preprocess overlap delay forced fp8cs |
    perf/qwen3_vl_30b_a3b_pretrain_16gpu_h100_fp8cs
QWEN3_30B 4 1 4 1 1 deepep | qwen3_30b_a3b_peft_4gpu_h100_bf16
QWEN3_30B 1 1 16 1 1 hybridep graph:moe_router+moe_preprocess | qwen3_30b_a3b_pretrain_16gpu_h100_bf16
QWEN3_30B 4 2 4 1 1 deepep full | qwen3_30b_a3b_pretrain_8gpu_h100_bf16
QWEN3_30B 1 1 16 1 1 | qwen3_30b_a3b_sft_16gpu_h100_bf16
QWEN3_30B 4 2 4 1 1 deepep | qwen3_30b_a3b_sft_8gpu_h100_bf16
QWEN3_30B 1 1 8 1 1 | qwen3_omni_30b_a3b_sft_8gpu_h100_bf16
    qwen3_omni_30b_a3b_sft_8gpu_h100_bf16_hf_json
QWEN3_30B 1 1 4 - 1 deepep | qwen3_vl_30b_a3b_peft_4gpu_h100_bf16
QWEN3_30B 4 2 4 - 1 | qwen3_vl_30b_a3b_pretrain_8gpu_h100_bf16_mock
QWEN3_30B 1 1 8 - 1 deepep | qwen3_vl_30b_a3b_sft_8gpu_h100_bf16
QWEN3_NEXT 1 1 128 1 1 forced | perf/qwen3_next_80b_a3b_pretrain_128gpu_h100_bf16
QWEN3_NEXT 1 1 128 1 1 forced fp8cs | perf/qwen3_next_80b_a3b_pretrain_128gpu_h100_fp8cs
QWEN3_NEXT 1 4 8 1 1 deepep recompute:layernorm+moe+moe_act | qwen3_next_80b_a3b_pretrain_32gpu_h100_bf16
QWEN3_NEXT 1 2 8 1 1 deepep recompute:layernorm+moe+moe_act | qwen3_next_80b_a3b_sft_16gpu_h100_bf16
STEP_35 1 8 8 1 8 deepep full | step35_196b_a11b_pretrain_512gpu_h100_bf16
STEP_37 1 4 1 1 1 full | step37_sft_4gpu_h100_bf16_flickr8k_smoke
STEP_37 1 8 8 - 1 deepep | step37_sft_64gpu_h100_bf16_flickr8k
"""


def _fields_of(word: str) -> Fields:
    name, _, parts = word.partition(":")
    if name == "graph":
        return {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": parts.split("+")}
    if name == "recompute":
        return {"recompute_granularity": "selective", "recompute_modules": parts.split("+")}
    if name == "offload":
        return {"fine_grained_activation_offloading": True, "offload_modules": parts.split("+")}
    return WORDS[name]


def _recipes() -> tuple[Recipe, ...]:
    joined, recipes = TABLE.strip().replace("\n    ", " "), []
    for line in joined.splitlines():
        facts, _, names = line.partition("|")
        model, tp, pp, ep, etp, cp, *words = facts.split()
        # Bridge's own default: models/transformer_config.py.
        default = "1" if int(ep) > 1 else tp
        fields = MODELS[model] | parallel(*map(int, (tp, pp, ep, default if etp == "-" else etp, cp)))
        for word in words:
            fields |= _fields_of(word)
        source, *also = (f"{name}_config" for name in names.split())
        recipes.append(Recipe(source, fields, also=tuple(also)))
    return tuple(recipes)


BRIDGE = _recipes()
