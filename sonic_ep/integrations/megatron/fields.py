"""How our layer treats every MoE field of TransformerConfig: honoured, without effect, or refused.

docs/megatron.md shows this table. A field that Megatron adds must be added here, or to the list of unrelated fields in
tests/integrations/megatron/test_fields.py.
"""

import dataclasses
import functools
import logging
from typing import Any

import torch
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_config import TransformerConfig

from sonic_ep.config import MAX_E, MAX_K
from sonic_ep.integrations.fields import Field, check_field, honoured, markdown
from sonic_ep.integrations.megatron.activation import SUPPORTED, activation_of
from sonic_ep.integrations.options import SonicEPOptions

_LOG = logging.getLogger("sonic_ep.integrations.megatron")
_warn_once = functools.cache(_LOG.warning)

_OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}


def _without_effect(how: str, *names: str) -> tuple[Field, ...]:
    return tuple(Field(name, "no effect", how) for name in names)


def _refused(name: str, default: Any, why: str) -> Field:
    """Returns a field of which the layer accepts only `default`, and values that are false."""
    return Field(name, "refused", why, lambda value: value == default or not value, f"{name}={default}")


_ROUTER = "Megatron's router"
_SHARED = "Megatron's shared expert"
_GEMM = "which grouped GEMM Megatron would run"
_QUANTISED = "the rest of the model; the experts compute in params_dtype, with a warning, see SonicEPOptions"
_TRANSPORT = "the layer brings its own transport"
_FLEX = "read by the flex dispatcher, which this layer replaces"

# Fields that make the rest of a model compute in fp8 or fp4.
QUANTISED = ("fp8", "fp4", "quant_recipe", "use_kitchen", "activation_func_fp8_input_store")

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
    *honoured("its ranks fold into the EP group: they hold whole experts, not parts", "expert_tensor_parallel_size"),
    _refused("expert_gtp_weight_remat_size", 1, "experts are dealt to ranks whole"),
    *honoured("see expert_gtp_weight_remat_size", "expert_tensor_parallel_num_weight_shards"),
    *honoured("in training with sequence_parallel, as Megatron wants it", "tensor_model_parallel_size"),
    *honoured("every TP rank routes its slice of the sequence", "sequence_parallel"),
    *honoured("the layer keeps nothing between calls", "pipeline_model_parallel_size", "context_parallel_size"),
    *honoured("the layer enters the schedule whole, as its expert step", "overlap_moe_expert_parallel_comm"),
    *honoured("by the schedule", "ep_overlap_early_attn_memory_release", "high_priority_a2a_comm_stream"),
    *honoured("of the rest of the model; the experts' come with their backward", "delay_wgrad_compute"),
    *_without_effect(
        "weight gradients come with the experts' backward", "overlap_dispatch_backward_with_experts_wgrad"
    ),
    *honoured(
        _SHARED,
        "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate",
        "use_te_activation_func",
        "use_grouped_gemm_for_shared_expert",
        "moe_shared_expert_glu_interleave_size",
    ),
    *honoured("on its own stream, at the same time as dispatch and experts", "moe_shared_expert_overlap"),
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
        "moe_router_quantile_balancing_ema",
        "moe_router_force_load_balancing",
        "moe_router_force_biased",
        "moe_router_fusion",
        "moe_enable_routing_replay",
        "moe_per_layer_logging",
        "calculate_per_token_loss",
        "moe_grad_scale_func",
    ),
    *honoured(f"K, at most {MAX_K} with token rounding", "moe_router_topk"),
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
    *_without_effect(_TRANSPORT, "moe_token_dispatcher_type", "moe_enable_deepep"),
    *_without_effect(
        _FLEX,
        "moe_flex_dispatcher_backend",
        "moe_flex_dispatcher_num_sms",
        "moe_deepep_num_sms",
        "moe_hybridep_num_sms",
        "moe_permute_fusion_into_hybridep",
        "moe_hybridep_pad_uneven_dispatch_inputs",
        "moe_hybridep_num_blocks_permute",
        "moe_hybridep_num_blocks_unpermute",
        "moe_hybridep_num_sms_preprocessing",
        "moe_ncclep_static_shape",
        "moe_ncclep_zero_copy",
    ),
    _refused(
        "moe_expert_rank_capacity_factor",
        None,
        "drops pairs by order of arrival; RoundingConfig.capacity_factor bounds a rank's load and drops the least",
    ),
    _refused("moe_paged_stash", False, "part of moe_expert_rank_capacity_factor"),
    *_without_effect(
        "read with moe_paged_stash",
        "moe_paged_stash_page_size",
        "moe_paged_stash_buffer_size_factor_cuda",
        "moe_paged_stash_buffer_size_factor_cpu",
    ),
    *_without_effect(
        _GEMM,
        "moe_grouped_gemm",
        "moe_single_grouped_weight",
        "moe_single_grouped_bias",
        "use_transformer_engine_op_fuser",
    ),
    *honoured(
        "order of gate and up rows in what Megatron draws and saves; divides moe_ffn_hidden_size, without expert TP",
        "moe_mlp_glu_interleave_size",
    ),
    *_without_effect("the layer permutes no rows", "moe_permute_fusion"),
    *honoured("with K = 1, and not together with token rounding", "moe_apply_probs_on_input"),
    *honoured("Megatron's projections around dispatch and experts; need Transformer Engine", "moe_latent_size"),
    *honoured(
        f"by its values: {SUPPORTED}",
        "activation_func",
        "gated_linear_unit",
        "activation_func_clamp_value",
        "glu_linear_offset",
    ),
    *honoured("b1 and b2 of every expert", "add_bias_linear"),
    *_without_effect("always fused", "bias_activation_fusion", "use_fused_weighted_squared_relu"),
    *honoured(_QUANTISED, *QUANTISED),
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
    *honoured("the experts have a reset_parameters", "init_model_with_meta_device"),
    *honoured("weight gradients accumulate in main_grad inside the GEMM", "gradient_accumulation_fusion"),
    *honoured("the layer is deterministic", "deterministic_mode"),
    *honoured("the experts' and the combine's; not together with rounding", "batch_invariant_mode"),
    *honoured("by the transformer block", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *honoured("moe, shared_experts; moe_act for nothing: activations are never kept", "recompute_modules"),
    *honoured("the same as recompute_modules=['moe']", "moe_layer_recompute"),
    *honoured(
        "of moe_router and moe_preprocess; of moe or whole layers in generation alone, see cuda_graph_modules",
        "cuda_graph_impl",
    ),
    *honoured(
        "all but moe and whole layers, in which row counts are read on the host; with rounding, not moe_router either. "
        "Whole layers in generation, with cuda_graph_impl='local' and moe_pad_experts_for_cuda_graph_inference",
        "cuda_graph_modules",
    ),
    *honoured("Megatron converts it to cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
    *honoured("Megatron converts it to cuda_graph_modules", "cuda_graph_scope"),
    *honoured("in generation every expert computes all tokens", "moe_pad_experts_for_cuda_graph_inference"),
    *honoured("expert_fc1's input and moe_act's stay on the GPU; what they name elsewhere moves", "offload_modules"),
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
    *_without_effect(
        "read with transformer_impl='inference_optimized'",
        "inference_moe_disable_fused_quant_kernels",
        "inference_moe_token_dispatcher_type",
        "inference_grouped_gemm_backend",
    ),
    *_without_effect("read by Megatron's inference engine", "inference_cuda_graph_scope"),
    *honoured("the layer is called for each chunk", "mlp_chunks_for_prefill", "mlp_chunks_for_training"),
)


def table() -> list[str]:
    """Returns FIELDS as a Markdown table."""
    return markdown("field", FIELDS)


def check(config: TransformerConfig, options: SonicEPOptions) -> None:
    """Raises ValueError for a config that the layer cannot honour. The message names field, value and what to set."""
    for field in FIELDS:
        if hasattr(config, field.name):
            check_field(field, getattr(config, field.name))
    activation_of(config)
    if options.batch_invariant:
        _check_invariance(config)
    _check_row_order(config)
    _check_graphs(config, options)
    _check_topk(config, options)
    quantised = {name: getattr(config, name) for name in QUANTISED if getattr(config, name)}
    if quantised and options.quantised == "refuse":
        name, value = next(iter(quantised.items()))
        raise ValueError(
            f"{name}={value!r} is not of the experts, which compute in {config.params_dtype}, and "
            f"options.quantised='refuse'; set {name} to None or options.quantised to 'warn'"
        )
    if config.moe_expert_capacity_factor is not None and options.rounding is not None:
        raise ValueError(
            f"moe_expert_capacity_factor={config.moe_expert_capacity_factor} drops tokens that rounding counts on; set "
            "it to None and RoundingConfig.capacity_factor, or options.rounding to None"
        )
    if config.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing") and options.rounding is not None:
        raise ValueError(
            f"moe_router_load_balancing_type={config.moe_router_load_balancing_type!r} chooses by no score that "
            "rounding could go on with; set 'aux_loss' or options.rounding to None"
        )
    if config.moe_router_score_function == "sqrtsoftplus" and options.rounding is not None:
        raise ValueError(
            "moe_router_score_function='sqrtsoftplus' is no score of rounding's added pairs; set 'softmax' or "
            "'sigmoid' or options.rounding to None"
        )
    known = {field.name for field in FIELDS}
    for new in dataclasses.fields(config):
        value = getattr(config, new.name)
        if new.name.startswith("moe_") and new.name not in known and value != new.default:
            raise ValueError(f"{new.name}={value!r} is not known to this version of sonic_ep; set {new.default!r}")


def _check_invariance(config: TransformerConfig) -> None:
    known: dict[str, Any] = {
        "moe_expert_capacity_factor": None,
        "moe_input_jitter_eps": None,
        "moe_router_force_load_balancing": False,
        "moe_router_force_biased": None,
        "moe_pad_experts_for_cuda_graph_inference": False,
    }
    if config.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"):
        known["moe_router_load_balancing_type"] = "none"
    for name, value in known.items():
        if (found := getattr(config, name)) != value:
            raise ValueError(
                f"{name}={found!r} with batch invariance: a token's result would depend on the batch or on its place; "
                f"set {name}={value!r}, or batch_invariant_mode=False"
            )


def _check_row_order(config: TransformerConfig) -> None:
    block, n = config.moe_mlp_glu_interleave_size, config.moe_ffn_hidden_size
    if block is None or not config.gated_linear_unit:
        return
    assert n is not None
    name = f"moe_mlp_glu_interleave_size={block}"
    if block < 1 or n % block:
        raise ValueError(f"{name} does not divide moe_ffn_hidden_size={n} into blocks; set a divisor or None")
    if (width := config.expert_tensor_parallel_size or 1) > 1:
        raise ValueError(
            f"{name} with expert_tensor_parallel_size={width}: Megatron's checkpoints then have another order of rows "
            "for every such size; set expert_tensor_parallel_size=1 or moe_mlp_glu_interleave_size=None"
        )


def _check_topk(config: TransformerConfig, options: SonicEPOptions) -> None:
    K, rounds = config.moe_router_topk, options.rounding is not None
    if K > MAX_K and rounds:
        raise ValueError(f"moe_router_topk={K} with token rounding; set 1 to {MAX_K}, or options.rounding to None")
    if config.moe_apply_probs_on_input and (K > 1 or rounds):
        raise ValueError(
            f"moe_apply_probs_on_input=True with moe_router_topk={K} is of one expert a token, without token "
            "rounding; set False, or moe_router_topk=1 and options.rounding to None"
        )


def _check_graphs(config: TransformerConfig, options: SonicEPOptions) -> None:
    if config.cuda_graph_impl == "none":
        return
    modules: Any = config.cuda_graph_modules or ()  # TransformerConfig converts it to a list
    names = sorted(each.name for each in modules)
    shown = f"cuda_graph_modules={names} with cuda_graph_impl={config.cuda_graph_impl!r}"
    generates = config.cuda_graph_impl == "local" and config.moe_pad_experts_for_cuda_graph_inference
    if not modules and generates and options.rounding is None:
        return
    if not modules or CudaGraphModule.moe in modules:
        raise ValueError(
            f"{shown} would capture the whole MoE layer, which reads row counts on the host; set "
            "cuda_graph_modules=['attn', 'moe_router', 'moe_preprocess'] or cuda_graph_impl='none'"
        )
    if options.rounding is not None and CudaGraphModule.moe_router in modules:
        raise ValueError(
            f"{shown} would capture the router, of which rounding reads the logits; set cuda_graph_modules=['attn'] "
            "or options.rounding to None"
        )


def log_replaced(config: TransformerConfig, options: SonicEPOptions, experts: Any) -> None:
    """Says once in a process what runs in place of what the config names: transport, precision, offloading."""
    used = f"{type(experts.transport).__name__} over {experts.group.size} ranks"
    if config.moe_token_dispatcher_type == "flex":
        _warn_once(
            f"moe_token_dispatcher_type='flex' ({config.moe_flex_dispatcher_backend}) has no effect; used: {used}"
        )
    quantised = [name for name in QUANTISED if getattr(config, name)]
    if quantised:
        _warn_once(
            f"{', '.join(quantised)}: the experts compute in {config.params_dtype}; "
            "SonicEPOptions(quantised='refuse') refuses such a config"
        )
    left = sorted(_OFFLOADED & set(config.offload_modules or ())) if config.fine_grained_activation_offloading else []
    if left:
        _warn_once(f"offload_modules={left} of the experts stay on the GPU; expert activations are computed again")
