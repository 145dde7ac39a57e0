"""The two projections around experts of a latent size (`moe_latent_size`): Transformer Engine's, as in MoELayer."""

import functools
from typing import Any

from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.transformer_config import TransformerConfig


def latent_projections(config: TransformerConfig, name: str | None) -> tuple[Any, Any]:
    """Returns the projections from hidden to latent size and back, whole on every tensor-parallel rank.

    Raises ValueError without Transformer Engine, which Megatron's layer needs too.
    """
    linear: Any = moe_layer.TELinear
    if linear is None:
        raise ValueError(
            f"moe_latent_size={config.moe_latent_size} needs Transformer Engine for its projections, in Megatron's own "
            "layer too; install transformer-engine[pytorch] or set moe_latent_size=None"
        )
    H, latent, prefix = config.hidden_size, config.moe_latent_size, None if name is None else f"{name}."
    of_layer = functools.partial(
        linear,
        parallel_mode="duplicated",
        config=config,
        bias=config.add_bias_linear,
        skip_bias_add=False,
        skip_weight_param_allocation=False,
        is_expert=False,
    )
    to_latent = of_layer(H, latent, init_method=config.init_method, name=prefix and f"{prefix}fc1_latent_proj")
    back = of_layer(latent, H, init_method=config.output_layer_init_method, name=prefix and f"{prefix}fc2_latent_proj")
    return to_latent, back
