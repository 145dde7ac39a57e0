"""How our layer treats every field of `expert_parallel`: honoured, without effect, or refused.

docs/deepspeed_autoep.md shows this table. A field that DeepSpeed adds must be added here.
"""

import dataclasses

from deepspeed.module_inject.auto_ep_config import AutoEPConfig, MoELayerSpec
from deepspeed.moe.ep_experts import apply_expert_activation
from torch import Tensor

from sonic_ep.config import MAX_E, MAX_K, MoEConfig, RoundingConfig, RouterConfig
from sonic_ep.integrations.activation import activation_like
from sonic_ep.integrations.fields import Field, check_field, honoured, markdown, warn_of, without_effect
from sonic_ep.integrations.options import SonicEPOptions

_DETECTION = "by AutoEP, which finds the blocks and copies their weights"
_GEMM = "which grouped GEMM AutoEP would run"
_DEEPEP = "of the DeepEP backend"
_ACTIVATIONS = "swiglu, geglu_tanh, swiglu_clamped (limit 10 or 7), swiglu_oai (alpha 1.702, limit 7)"


def _refused(name: str, only: object, why: str) -> Field:
    """Returns a field of which the layer accepts one value."""
    return Field(name, "refused", why, lambda value: value == only, f"{name}={only!r}")


FIELDS: tuple[Field, ...] = (
    *honoured("", "enabled"),
    *honoured("ep_size; a divisor of the number of experts", "autoep_size"),
    *honoured(
        _DETECTION,
        "preset_model",
        "moe_layer_pattern",
        "expert_pattern",
        "router_pattern",
        "expert_w1",
        "expert_w2",
        "expert_w3",
        "num_experts_attr",
        "has_shared_experts",
        "shared_experts_pattern",
        "shared_experts_gate_pattern",
    ),
    *honoured(f"1 to {MAX_K} of at most {MAX_E} experts", "top_k", "top_k_attr"),
    *honoured("softmax or sigmoid, in fp32", "score_func"),
    *honoured("the K scores divided by their sum", "route_norm"),
    *honoured("factor on every combine weight", "route_scale", "routed_scaling_factor"),
    *honoured("groups scored by their two best experts", "num_expert_groups", "num_limited_groups"),
    *honoured(_ACTIVATIONS, "expert_activation"),
    Field(
        "score_apply",
        "refused",
        "weights act on the experts' output",
        lambda value: value in ("auto", "post"),
        "score_apply='post'",
    ),
    _refused("comm_backend", "comm", "the layer brings its own transport"),
    _refused(
        "expert_tensor_parallel_size",
        1,
        "experts are dealt to ranks whole; nor is tensor_parallel.autotp_size > 1 taken",
    ),
    _refused("load_balance_coeff", None, "by DeepSpeed itself"),
    *without_effect(_GEMM, use_grouped_mm=True, disable_triton_grouped_mm=False, gate_up_impl="separate"),
    *without_effect("the combine is one fused sum in fp32", combine_impl="auto"),
    *without_effect("counts reach the host late as it is", async_split_plan=False),
    *without_effect(_DEEPEP, row_weighting_impl="auto", comm_num_sm=12, comm_qp_margin=4, comm_max_tokens_per_rank=0),
    *without_effect("of expert and tensor parallelism together", validate_folding_routing=False),
)


def table() -> list[str]:
    """Returns FIELDS as a Markdown table."""
    return markdown("field of `expert_parallel`", FIELDS)


def check(spec: MoELayerSpec, config: AutoEPConfig) -> None:
    """Raises ValueError, with field, value and fix, for what the layer cannot honour. Warns of what has no effect."""
    known, ignored = {field.name: field for field in FIELDS}, []
    for field in dataclasses.fields(config):
        value, ours = getattr(config, field.name), known.get(field.name)
        if ours is None and not field.name.startswith("_") and value != field.default:
            raise ValueError(f"expert_parallel.{field.name}={value!r} is not known to this version of sonic_ep")
        ignored.append(None if ours is None else check_field(ours, value, "expert_parallel."))
    warn_of(ignored, "AutoEP layer")
    if config.score_apply == "auto" and spec.score_apply != "post":
        raise ValueError(
            f"preset {spec.model_family!r} weighs the experts' input (score_apply='pre'), and weights act on the "
            "output here; if that is the same for the model, set expert_parallel.score_apply='post'"
        )
    if (spec.num_expert_groups or 1) > 1 and spec.group_score_func != "top2_sum":
        raise ValueError(
            f"preset {spec.model_family!r} scores groups of experts by {spec.group_score_func!r}, which is not "
            "supported; only the sum of a group's two best experts ('top2_sum', as in DeepSeek-V3) is"
        )
    activation_of(spec)


def activation_of(spec: MoELayerSpec) -> str:
    """Returns the name of the experts' activation here. Raises ValueError if there is none."""
    settings = spec.expert_activation, spec.expert_activation_alpha, spec.expert_activation_limit

    def theirs(h_PJ: Tensor) -> object:
        return apply_expert_activation(h_PJ[:, ::2], h_PJ[:, 1::2], *settings, fused=False)

    name = activation_like(theirs, gated=True)
    if name is None:
        activation, alpha, limit = settings
        raise ValueError(
            f"expert_activation={activation!r} with alpha {alpha}, limit {limit} has no kernel here; supported are "
            f"{_ACTIVATIONS}"
        )
    return name


def config_of(spec: MoELayerSpec, config: AutoEPConfig, options: SonicEPOptions) -> MoEConfig:
    """Returns the MoEConfig for our router's operations."""
    return MoEConfig(
        d=spec.hidden_size,
        n=spec.ffn_hidden_size,
        E=spec.num_experts,
        K=spec.top_k,
        router=RouterConfig(
            score=spec.score_func,
            renormalize=spec.route_norm if config.route_norm is None else config.route_norm,
            scale=spec.route_scale,
            num_groups=spec.num_expert_groups or 1,
            groups_per_token=(spec.num_limited_groups or 1) if spec.num_expert_groups else 1,
        ),
        rounding=options.rounding or RoundingConfig(mode="off"),
    )
