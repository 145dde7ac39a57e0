"""Maps the activation of a TransformerConfig to ours."""

import torch.nn.functional as F
from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.transformer.transformer_config import TransformerConfig

# (activation_func, gated_linear_unit, activation_func_clamp_value, glu_linear_offset)
_NAMES = {
    (F.silu, True, None, 0.0): "swiglu",
    (F.gelu, True, None, 0.0): "geglu_erf",
    (fast_gelu, True, None, 0.0): "geglu",
    (F.relu, True, None, 0.0): "reglu",
    (quick_gelu, True, 7.0, 1.0): "swiglu_oai",
    (F.silu, False, None, 0.0): "silu",
    (F.gelu, False, None, 0.0): "gelu_erf",
    (fast_gelu, False, None, 0.0): "gelu",
    (F.relu, False, None, 0.0): "relu",
    (squared_relu, False, None, 0.0): "relu2",
}


def activation_of(config: TransformerConfig) -> str:
    """Returns the name of the activation here. Raises ValueError if there is none."""
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if not config.gated_linear_unit:
        clamp, offset = None, 0.0  # Megatron reads them only for gated units
    name = _NAMES.get((config.activation_func, config.gated_linear_unit, clamp, offset))
    if name is not None:
        return name
    known = "; ".join(
        f"{function.__name__}, {gated}" + ("" if clamp is None else f", clamp {clamp}, offset {offset}")
        for function, gated, clamp, offset in _NAMES
    )
    function = getattr(config.activation_func, "__name__", config.activation_func)
    raise ValueError(
        f"activation_func={function} with gated_linear_unit={config.gated_linear_unit}, "
        f"activation_func_clamp_value={config.activation_func_clamp_value}, "
        f"glu_linear_offset={config.glu_linear_offset} has no kernel here; set one of (activation_func, "
        f"gated_linear_unit): {known}"
    )
