"""Maps the activation of a TransformerConfig to ours: `activation_func`, gated or not, with its clamp and offset."""

import functools
from collections.abc import Callable

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from sonic_ep.integrations.activation import activation_like

SUPPORTED = (
    "silu, gelu, fast_gelu and relu, gated or not, squared_relu; silu with clamp 10 (DeepSeek-V4) or 7 (Step-3.5), and "
    "quick_gelu with clamp 7 and offset 1 (gpt-oss, MiniMax-M3)"
)


def activation_of(config: TransformerConfig) -> str:
    """Returns the name of the activation here. Raises ValueError if there is none. Calls a function once.

    The clamp of a gated unit is honoured whatever `bias_activation_fusion` is. Megatron-Core 0.19.2 drops the clamp of
    SiLU if it fuses; its main branch does not.
    """
    function, gated = config.activation_func, config.gated_linear_unit
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
    # Megatron reads clamp and offset only for gated units.
    key = (function, True, clamp, offset) if gated else (function, False, None, 0.0)
    try:
        name = _found(*key)
    except TypeError:  # not hashable
        name = _found.__wrapped__(*key)
    if name is None:
        raise ValueError(
            f"activation_func={getattr(function, '__name__', function)} with gated_linear_unit={gated}, "
            f"activation_func_clamp_value={clamp}, glu_linear_offset={offset} has no kernel here; set one of these, by "
            f"its values: {SUPPORTED}"
        )
    return name


@functools.lru_cache(maxsize=64)
def _found(function: Callable[[Tensor], Tensor], gated: bool, clamp: float | None, offset: float) -> str | None:
    # Megatron compiles small functions, which takes seconds.
    plain = getattr(function, "_torchdynamo_orig_callable", function)

    def theirs(h_PJ: Tensor) -> object:
        if not gated:
            return plain(h_PJ)
        gate, up = h_PJ[:, ::2], h_PJ[:, 1::2]
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
        return plain(gate) * (up + offset)

    try:
        return activation_like(theirs, gated=gated)
    except Exception:  # noqa: BLE001 - any function of the user's, which may not take these numbers
        return None
