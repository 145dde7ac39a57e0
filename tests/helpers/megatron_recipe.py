"""`Recipe`: a published config for Megatron-Core, and the values that several recipes have in common."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from megatron.core.activations import squared_relu

Fields = dict[str, Any]


class Recipe(NamedTuple):
    """source: a folder of test cases, a script or a function, see megatron_recipes.py. fields: of TransformerConfig, as
    far as a MoE layer sees them. refused: the field that refuses our layer. also: sources that differ in nothing that
    a MoE layer sees: one node or several, optimizer, order of ranks, resumption, batch. by_stock: whether Megatron
    refuses the recipe as well.
    """

    source: str
    fields: Fields
    refused: str = ""
    also: tuple[str, ...] = ()
    by_stock: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source, *self.also)


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
NEMOTRON_SUPER = NEMOTRON | {
    "hidden_size": 4096,
    "ffn_hidden_size": 2688,
    "num_moe_experts": 512,
    "moe_router_topk": 22,
    "moe_router_topk_scaling_factor": 5.0,
    "moe_shared_expert_intermediate_size": 5376,
    "moe_latent_size": 1024,
}
DEEPEP = FLEX | {"moe_flex_dispatcher_backend": "deepep"}
