"""How our layer treats every MoE field of TransformerConfig: honoured, without effect, or refused.

docs/megatron.md shows this table. A field that Megatron adds must be added here, or to the list of unrelated fields in
tests/integrations/megatron/test_fields.py.
"""

import dataclasses
import itertools
from typing import Any

import torch
from megatron.core.transformer.enums import CudaGraphScope
from megatron.core.transformer.transformer_config import TransformerConfig

from sonic_ep.config import MAX_E, MAX_K
from sonic_ep.integrations.fields import Field, honoured
from sonic_ep.integrations.megatron.activation import activation_of
from sonic_ep.integrations.options import SonicEPOptions

_GRAPHED = {CudaGraphScope.moe, CudaGraphScope.moe_router, CudaGraphScope.moe_preprocess, CudaGraphScope.full_iteration}
_OFFLOADED = {"expert_fc1", "moe_act"}


def _without_effect(how: str, *names: str) -> tuple[Field, ...]:
    return tuple(Field(name, "no effect", how) for name in names)


def _refused(name: str, default: Any, why: str) -> Field:
    """Returns a field of which the layer accepts only `default`, and values that are false."""
    return Field(name, "refused", why, lambda value: value == default or not value, f"{name}={default}")


_ROUTER = "Megatron's router"
_SHARED = "Megatron's shared expert"
_GEMM = "which grouped GEMM Megatron would run"
_ACTIVATION = "swiglu, geglu and gelu (fast_gelu), reglu, silu, relu2 (squared_relu), gpt-oss's (quick_gelu, 7, 1)"
_QUANTISED = "the experts compute in params_dtype"

FIELDS: tuple[Field, ...] = (
    Field(
        "num_moe_experts",
        "honoured",
        "E, a multiple of the EP size",
        lambda value: value is not None and 1 <= value <= MAX_E,
        f"1 to {MAX_E} experts",
    ),
    *honoured("width n of an expert", "moe_ffn_hidden_size"),
    *honoured("d", "hidden_size"),
    *honoured("by the block spec: use_sonic_ep leaves dense layers alone", "moe_layer_freq"),
    *honoured("a multi-token-prediction block takes the layer spec", "mtp_num_layers"),
    *honoured("the EP group of pg_collection; TP ranks fold into it", "expert_model_parallel_size"),
    Field(
        "expert_tensor_parallel_size",
        "honoured",
        "1: experts are dealt to ranks whole",
        lambda value: value == 1,
        "expert_tensor_parallel_size=1 and expert_model_parallel_size to spread experts",
    ),
    *honoured("in training with sequence_parallel, as Megatron wants it", "tensor_model_parallel_size"),
    *honoured("every TP rank routes its slice of the sequence", "sequence_parallel"),
    *honoured("the layer keeps nothing between calls", "pipeline_model_parallel_size", "context_parallel_size"),
    _refused("moe_extended_tp", False, "expert tensor parallelism"),
    _refused("overlap_moe_expert_parallel_comm", False, "wants a layer in seven steps of Megatron's dispatcher"),
    _refused("ep_overlap_early_attn_memory_release", False, "part of overlap_moe_expert_parallel_comm"),
    _refused("delay_wgrad_compute", False, "part of overlap_moe_expert_parallel_comm"),
    *honoured(_SHARED, "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "use_te_activation_func"),
    *honoured("on its stream beside routing, dispatch and experts", "moe_shared_expert_overlap"),
    *honoured(
        _ROUTER,
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_input_jitter_eps",
        "moe_router_pre_softmax",
        "moe_router_topk_scaling_factor",
        "moe_router_score_function",
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_limited_devices",
        "moe_router_enable_expert_bias",
        "moe_router_bias_update_rate",
        "moe_router_force_load_balancing",
        "moe_router_fusion",
        "moe_enable_routing_replay",
        "moe_per_layer_logging",
        "calculate_per_token_loss",
    ),
    Field("moe_router_topk", "honoured", "K", lambda value: 1 <= value <= MAX_K, f"1 to {MAX_K}"),
    *honoured(f"{_ROUTER}; weights of pairs are fp32 at least", "moe_router_dtype"),
    *honoured(
        f"{_ROUTER} drops, the experts see what is left; not together with token rounding",
        "moe_expert_capacity_factor",
        "moe_token_drop_policy",
        "moe_pad_expert_input_to_capacity",
    ),
    _refused("moe_token_dropping", False, "Megatron does not implement it"),
    *_without_effect(
        "pads for quantised GEMMs with pairs of weight zero",
        "moe_router_padding_for_quantization",
        "moe_router_padding_for_fp8",
    ),
    Field(
        "moe_token_dispatcher_type",
        "no effect",
        "the layer brings its own transport",
        lambda value: value in ("alltoall", "allgather"),
        "moe_token_dispatcher_type='alltoall'",
    ),
    _refused("moe_enable_deepep", False, "the layer brings its own transport"),
    *_without_effect(
        "read by the flex dispatcher alone", "moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms"
    ),
    *_without_effect(_GEMM, "moe_grouped_gemm", "moe_use_legacy_grouped_gemm"),
    *_without_effect("the layer permutes no rows", "moe_permute_fusion"),
    _refused("moe_apply_probs_on_input", False, "weights act on the experts' output"),
    _refused("moe_latent_size", None, "experts work at the hidden size"),
    *honoured(_ACTIVATION, "activation_func", "gated_linear_unit", "activation_func_clamp_value", "glu_linear_offset"),
    *honoured("b1 and b2 of every expert", "add_bias_linear"),
    *_without_effect("always fused", "bias_activation_fusion", "use_fused_weighted_squared_relu"),
    _refused("activation_func_fp8_input_store", False, _QUANTISED),
    _refused("fp8", None, _QUANTISED),
    _refused("fp4", None, _QUANTISED),
    _refused("quant_recipe", None, _QUANTISED),
    _refused("use_kitchen", False, _QUANTISED),
    Field(
        "params_dtype",
        "honoured",
        "bf16 and fp16 on GPU kernels, fp32 on the slow reference",
        lambda value: value in (torch.float32, torch.bfloat16, torch.float16),
        "params_dtype=torch.bfloat16",
    ),
    *honoured("see params_dtype", "bf16", "fp16"),
    _refused("enable_autocast", False, "hidden states come in params_dtype"),
    *honoured(
        "as SequentialMLP draws",
        "init_method",
        "output_layer_init_method",
        "init_method_std",
        "perform_initialization",
        "use_cpu_initialization",
    ),
    _refused("init_model_with_meta_device", False, "weights are made where they stay"),
    *honoured("weight gradients accumulate in main_grad inside the GEMM", "gradient_accumulation_fusion"),
    *honoured("the layer is deterministic", "deterministic_mode"),
    _refused("batch_invariant_mode", False, "a token's bits may depend on the batch"),
    *honoured("by the transformer block", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *honoured("moe, shared_experts; moe_act for nothing: activations are never kept", "recompute_modules"),
    *honoured("the same as recompute_modules=['moe']", "moe_layer_recompute"),
    Field("cuda_graph_impl", "honoured", "for graphs that leave the MoE out; see cuda_graph_scope"),
    Field(
        "cuda_graph_scope",
        "refused",
        "row counts are read on the host: no graph of moe, moe_router, moe_preprocess, whole layers or iterations",
    ),
    _refused("enable_cuda_graph", False, "a graph of whole layers"),
    _refused("external_cuda_graph", False, "a graph of whole layers"),
    Field(
        "offload_modules",
        "honoured",
        "all but expert_fc1 and moe_act, which the layer does not keep",
        lambda value: not _OFFLOADED & set(value or ()),
        "offload_modules without expert_fc1 and moe_act",
    ),
    *honoured("see offload_modules", "fine_grained_activation_offloading"),
    _refused("cpu_offloading", False, "its hooks would part the weights from their main_grad"),
    Field(
        "transformer_impl",
        "honoured",
        "local and transformer_engine",
        lambda value: value != "inference_optimized",
        "transformer_impl='local' or 'transformer_engine'",
    ),
    _refused("use_inference_optimized_layers", False, "for training"),
    _refused("inference_fuse_tp_communication", False, "for training"),
    *honoured("the layer is called for each chunk", "mlp_chunks_for_prefill"),
)


def table() -> list[str]:
    """Returns FIELDS as a Markdown table. Adjacent fields that differ only in name share a row."""
    lines = ["| field | here | how, or why not | instead of other values |", "|---|---|---|---|"]
    rows = itertools.groupby(FIELDS, lambda each: (each.effect, each.how, "" if each.effect == "refused" else each.set))
    for (effect, how, instead), fields in rows:
        names = ", ".join(f"`{each.name}`" for each in fields)
        lines.append(f"| {names} | {effect} | {how} | {instead} |")
    return lines


def check(config: TransformerConfig, options: SonicEPOptions) -> None:
    """Raises ValueError for a config that the layer cannot honour. The message names field, value and what to set."""
    for field in FIELDS:
        value = getattr(config, field.name, None)
        if field.accepts is not None and hasattr(config, field.name) and not field.accepts(value):
            raise ValueError(f"{field.name}={value!r} is not supported ({field.how}); set {field.set}")
    activation_of(config)
    _check_graphs(config)
    if config.moe_expert_capacity_factor is not None and options.rounding is not None:
        raise ValueError(
            f"moe_expert_capacity_factor={config.moe_expert_capacity_factor} drops tokens that rounding counts on; set "
            "it to None and RoundingConfig.capacity_factor, or options.rounding to None"
        )
    if config.moe_router_load_balancing_type == "sinkhorn" and options.rounding is not None:
        raise ValueError(
            "moe_router_load_balancing_type='sinkhorn' chooses by no score that rounding could go on with; set "
            "'aux_loss' or options.rounding to None"
        )
    known = {field.name for field in FIELDS}
    for new in dataclasses.fields(config):
        value = getattr(config, new.name)
        if new.name.startswith("moe_") and new.name not in known and value != new.default:
            raise ValueError(f"{new.name}={value!r} is not known to this version of sonic_ep; set {new.default!r}")


def _check_graphs(config: TransformerConfig) -> None:
    if config.cuda_graph_impl == "none":
        return
    scopes: Any = config.cuda_graph_scope or ()  # TransformerConfig converts it to a list
    scope = set(scopes)
    if not scope or scope & _GRAPHED:
        raise ValueError(
            f"cuda_graph_scope={sorted(each.name for each in scope)} with cuda_graph_impl={config.cuda_graph_impl!r} "
            "would capture the MoE layer, which reads row counts on the host; set cuda_graph_scope=['attn'] or "
            "cuda_graph_impl='none'"
        )
