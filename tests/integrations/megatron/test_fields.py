"""Every field of TransformerConfig is in the table or has nothing to do with a MoE layer; what is refused says so."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.fusions import fused_bias_geglu
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.transformer_config import TransformerConfig

from sonic_ep import RoundingConfig
from sonic_ep.integrations.megatron.activation import activation_of
from sonic_ep.integrations.megatron.fields import FIELDS, check
from sonic_ep.integrations.options import SonicEPOptions

# Fields of 0.19.2 that a MoE layer never meets: attention, embedding, norms, pipeline schedule, Mamba, dense layers.
OTHERS = """
pipeline_model_parallel_comm_backend virtual_pipeline_model_parallel_size hierarchical_context_parallel_sizes
max_seqlen_per_dp_cp_rank hybrid_context_parallel timers finalize_model_grads_func grad_scale_func no_sync_func
grad_sync_func param_sync_func autocast_dtype num_microbatches_with_partial_activation_checkpoints
use_te_rng_tracker tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad
tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs
tp_comm_atomic_rs cross_entropy_loss_fusion cross_entropy_fusion_impl tp_comm_overlap_disable_qkv
tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend pipeline_dtype variable_seq_lengths overlap_p2p_comm
batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs defer_embedding_wgrad_compute
wgrad_deferral_limit overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage mtp_standalone
cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations cpu_offloading_weights
cpu_offloading_double_buffering barrier_with_L1_time
num_layers mtp_loss_scaling_factor num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
pipeline_model_parallel_layout account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
num_attention_heads attention_backend softmax_scale softmax_type num_query_groups ffn_hidden_size kv_channels
hidden_dropout attention_dropout fp32_residual_connection apply_residual_connection_post_layernorm layernorm_epsilon
layernorm_zero_centered_gamma add_qkv_bias rotary_interleaved window_size window_attn_skip_freq normalization
qk_layernorm qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit attention_output_gate test_mode
multi_latent_attention no_rope_freq experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim
dsa_indexer_topk dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim
linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads embedding_init_method
embedding_init_method_std apply_query_key_layer_scaling attention_softmax_in_fp32
disable_bf16_reduced_precision_matmul masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm
bias_dropout_fusion apply_rope_fusion fused_single_qkv_rope distribute_saved_activations
fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad
fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16
num_layers_at_end_in_bf16 fp4_recipe fp4_param fp4_quantizer_factory use_kitchen_attention kitchen_attention_backend
cp_comm_type cuda_graph_use_single_mempool cuda_graph_retain_backward_graph cuda_graph_warmup_steps
clone_scatter_output_in_embedding disable_parameter_transpose_cache config_logger_dir flash_decode
inference_rng_tracker inference_sampling_seed symmetric_ar_type mrope_section is_hybrid_model mamba_state_dim
mamba_head_dim mamba_num_groups mamba_num_heads use_mamba_mem_eff_path heterogeneous_block_specs
hetereogenous_dist_checkpoint min_offloaded_tensor_size
tensor_parallel_num_weight_shards gtp_weight_remat_size mtp_grad_scale_func cpu_offloading_retain_pinned_cpu_buffers
mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern flash_attention_version
experimental_attention_variant_loss_scale_func dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_kernel_backend
dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon
dsa_indexer_k_norm_fp32 use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult
mup_base_head_dim mup_attn_scale_power fused_residual_rmsnorm fp8_output_proj use_grouped_gemm_for_dense_mlp
nccl_all_reduce_for_prefill inference_disable_triton_nvls_kernels mamba_training_ssm_states_dtype
delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks activation_offload_fraction
fine_grained_offloading_max_inflight_offloads
""".split()

# A value that the layer refuses, for every field that has one.
REFUSED: dict[str, Any] = {
    "num_moe_experts": 4097,
    "expert_gtp_weight_remat_size": 2,
    "moe_token_dropping": True,
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_paged_stash": True,
    "params_dtype": torch.float64,
    "enable_autocast": True,
    "cpu_offloading": True,
    "transformer_impl": "inference_optimized",
    "use_inference_optimized_layers": True,
    "inference_fuse_tp_communication": True,
}


@pytest.fixture
def config() -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_ffn_hidden_size=16,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        expert_tensor_parallel_size=1,
    )


def with_values(config: TransformerConfig, **values: Any) -> TransformerConfig:
    """A copy that Megatron's own checks have not seen."""
    config = copy.copy(config)
    for name, value in values.items():
        setattr(config, name, value)
    return config


def test_every_field_of_the_config_is_accounted_for() -> None:
    names = [each.name for each in FIELDS]
    fields = {each.name for each in dataclasses.fields(TransformerConfig)}
    assert len(set(names) | set(OTHERS)) == len(names) + len(OTHERS)
    assert fields == set(names) | set(OTHERS)
    assert not [name for name in OTHERS if "moe" in name or "expert" in name or "router" in name]


def test_a_plain_config_passes(config: TransformerConfig) -> None:
    check(config, SonicEPOptions())


def test_every_limit_has_a_value_beyond_it() -> None:
    assert {each.name for each in FIELDS if each.accepts is not None} == set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_field_value_and_fix(config: TransformerConfig, name: str) -> None:
    value = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^{name}=") as caught:
        check(with_values(config, **{name: value}), SonicEPOptions())
    assert repr(value) in str(caught.value)
    assert "; set " in str(caught.value)


ROUTER = [CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess]


@pytest.mark.parametrize(
    ("impl", "modules", "passes", "passes_rounded"),
    [
        ("none", [], True, True),
        ("local", [CudaGraphModule.attn], True, True),
        ("transformer_engine", [CudaGraphModule.attn, CudaGraphModule.mlp], True, True),
        ("transformer_engine", [CudaGraphModule.attn, *ROUTER], True, False),
        ("transformer_engine", ROUTER[:1], True, False),
        ("local", ROUTER, True, False),
        ("local", [], False, False),
        ("full_iteration", [], False, False),
        ("transformer_engine", [CudaGraphModule.moe], False, False),
    ],
)
def test_graphs_may_capture_the_router_and_not_the_layer(
    config: TransformerConfig, impl: str, modules: list[CudaGraphModule], passes: bool, passes_rounded: bool
) -> None:
    changed = with_values(config, cuda_graph_impl=impl, cuda_graph_modules=modules)
    for options, is_fine in ((SonicEPOptions(), passes), (SonicEPOptions(rounding=RoundingConfig()), passes_rounded)):
        if is_fine:
            check(changed, options)
        else:
            with pytest.raises(ValueError, match=r"^cuda_graph_modules=\[.*; set cuda_graph_modules=\['attn'"):
                check(changed, options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("fp8", "hybrid"), ("fp4", "e2m1"), ("quant_recipe", SimpleNamespace()), ("use_kitchen", True)],
)
def test_quantised_models_keep_their_experts_in_bf16_or_are_refused(
    config: TransformerConfig, name: str, value: Any
) -> None:
    changed = with_values(config, **{name: value})
    check(changed, SonicEPOptions())
    with pytest.raises(ValueError, match=rf"^{name}=.*; set {name} to None or options.quantised to 'warn'"):
        check(changed, SonicEPOptions(quantised="refuse"))


@pytest.mark.parametrize(
    "values",
    [
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_router_load_balancing_type": "quantile_balancing"},
        {"moe_router_score_function": "sqrtsoftplus"},
    ],
    ids=str,
)
def test_routers_that_rounding_does_not_know(config: TransformerConfig, values: dict[str, str]) -> None:
    changed = with_values(config, **values)
    check(changed, SonicEPOptions())
    with pytest.raises(ValueError, match=rf"^{next(iter(values))}=.*; set .* options.rounding to None"):
        check(changed, SonicEPOptions(rounding=RoundingConfig()))


@pytest.mark.parametrize(
    "values", [{"moe_router_topk": 17}, {"moe_apply_probs_on_input": True, "moe_router_topk": 1}], ids=str
)
def test_what_rounding_cannot_weigh(config: TransformerConfig, values: dict[str, Any]) -> None:
    changed = with_values(config, **values)
    check(changed, SonicEPOptions())
    with pytest.raises(ValueError, match=rf"^{next(iter(values))}=.*; set .* options.rounding to None"):
        check(changed, SonicEPOptions(rounding=RoundingConfig()))


def test_probs_act_on_the_input_of_one_expert(config: TransformerConfig) -> None:
    changed = with_values(config, moe_apply_probs_on_input=True, moe_router_topk=2)
    with pytest.raises(ValueError, match=r"^moe_apply_probs_on_input=True with moe_router_topk=2 .*; set False"):
        check(changed, SonicEPOptions())


def test_rounding_and_dropping_exclude_each_other(config: TransformerConfig) -> None:
    changed = with_values(config, moe_expert_capacity_factor=1.5)
    check(changed, SonicEPOptions())
    with pytest.raises(ValueError, match=r"^moe_expert_capacity_factor=1.5 .*; set "):
        check(changed, SonicEPOptions(rounding=RoundingConfig()))


def test_a_new_moe_field_is_refused_unless_it_has_its_default(config: TransformerConfig) -> None:
    newer = dataclasses.make_dataclass("Newer", [("moe_new_idea", int, 3)], bases=(TransformerConfig,))
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config) if each.init}
    check(newer(**values), SonicEPOptions())
    with pytest.raises(ValueError, match="^moe_new_idea=4 is not known .*; set 3"):
        check(newer(**values, moe_new_idea=4), SonicEPOptions())


@pytest.mark.parametrize(
    ("function", "gated", "clamp", "offset", "name"),
    [
        (F.silu, True, None, 0.0, "swiglu"),
        (fast_gelu, True, None, 0.0, "geglu"),
        (F.relu, True, None, 0.0, "reglu"),
        (quick_gelu, True, 7.0, 1.0, "swiglu_oai"),
        (fused_bias_geglu.quick_gelu, True, 7.0, 1.0, "swiglu_oai"),  # what Megatron's parser and experts use
        (F.silu, True, 10.0, 0.0, "swiglu_clamped"),
        (torch.nn.SiLU(), True, 10, 0, "swiglu_clamped"),
        (F.silu, True, 7.0, 0.0, "swiglu_clamped_7"),
        (torch.nn.GELU(approximate="tanh"), True, None, 0.0, "geglu"),
        (lambda x: x.float() * torch.sigmoid(x.float()), True, None, 0.0, "swiglu"),
        (F.silu, False, None, 0.0, "silu"),
        (fast_gelu, False, 3.0, 0.0, "gelu"),
        (squared_relu, False, None, 0.0, "relu2"),
        (F.gelu, True, None, 0.0, "geglu_erf"),
        (F.gelu, False, None, 0.0, "gelu_erf"),
        (F.relu, False, None, 0.0, "relu"),
        (lambda x: F.gelu(x.float(), approximate="tanh"), True, None, 0.0, "geglu"),
        (F.silu, True, 10.5, 0.0, None),
        (F.silu, True, 10.0, 1.0, None),
        (quick_gelu, True, 7.0, 0.0, None),
        (quick_gelu, False, None, 0.0, None),
        (torch.tanh, True, None, 0.0, None),
        (lambda x: F.silu(x).clamp(max=30.0), True, None, 0.0, None),
        (lambda x: x * torch.sigmoid(1.7 * x), True, 7.0, 1.0, None),
        (lambda x, y: x * y, True, None, 0.0, None),
    ],
)
def test_activations_are_known_or_refused(
    config: TransformerConfig, function: Any, gated: bool, clamp: float | None, offset: float, name: str | None
) -> None:
    changed = with_values(
        config,
        activation_func=function,
        gated_linear_unit=gated,
        activation_func_clamp_value=clamp,
        glu_linear_offset=offset,
    )
    if name is None:
        with pytest.raises(ValueError, match=r"^activation_func=.*; set one of"):
            check(changed, SonicEPOptions())
    else:
        assert activation_of(changed) == name


def test_a_function_is_called_once(config: TransformerConfig) -> None:
    calls: list[int] = []

    def silu(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return F.silu(x)

    changed = with_values(config, activation_func=silu, gated_linear_unit=False)
    assert [activation_of(changed) for _ in range(3)] == ["silu"] * 3
    assert len(calls) == 1


def test_blocks_of_gate_and_up_rows(config: TransformerConfig) -> None:
    check(with_values(config, moe_mlp_glu_interleave_size=8), SonicEPOptions())
    with pytest.raises(ValueError, match=r"^moe_mlp_glu_interleave_size=32 .*moe_ffn_hidden_size=16 .*; set a divisor"):
        check(with_values(config, moe_mlp_glu_interleave_size=32), SonicEPOptions())
    cut = with_values(config, moe_mlp_glu_interleave_size=8, expert_tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"^moe_mlp_glu_interleave_size=8 with expert_tensor_parallel_size=2.*; set "):
        check(cut, SonicEPOptions())
    check(with_values(config, moe_mlp_glu_interleave_size=32, gated_linear_unit=False), SonicEPOptions())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_expert_capacity_factor", 1.0),
        ("moe_input_jitter_eps", 0.1),
        ("moe_router_force_load_balancing", True),
        ("moe_router_force_biased", 1.0),
        ("moe_pad_experts_for_cuda_graph_inference", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
    ],
)
def test_what_batch_invariance_excludes(config: TransformerConfig, name: str, value: Any) -> None:
    check(config, SonicEPOptions(batch_invariant=True))
    changed = with_values(config, **{name: value})
    check(changed, SonicEPOptions())
    with pytest.raises(ValueError, match=rf"^{name}={value!r} with batch invariance: .*; set {name}="):
        check(changed, SonicEPOptions(batch_invariant=True))
