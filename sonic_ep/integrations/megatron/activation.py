"""Maps the activation of a TransformerConfig to ours.

Megatron has several functions with the same values, for example two `quick_gelu`, and a program may pass a function of
its own. So we call `activation_func` on a few numbers instead of asking which function it is. Clamp and offset are
numbers of the config, and are compared as such.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

# Between the probes lie all curves' bends; the far ones show a limit. The outermost are beyond any published limit.
_FAR = (-1000.0, -60.0, -20.0, 20.0, 60.0, 1000.0)
# A function may compute in fp32. The nearest two curves, GELU and its tanh approximation, differ by 5e-4.
_RTOL, _ATOL = 1e-5, 1e-6

_CURVES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "fast_gelu": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
}
# (curve, gated_linear_unit, activation_func_clamp_value, glu_linear_offset)
_NAMES: dict[tuple[str, bool, float | None, float], str] = {
    ("silu", True, None, 0.0): "swiglu",
    ("silu", True, 10.0, 0.0): "swiglu_clamped",
    ("silu", True, 7.0, 0.0): "swiglu_clamped_7",
    ("gelu", True, None, 0.0): "geglu_erf",
    ("fast_gelu", True, None, 0.0): "geglu",
    ("relu", True, None, 0.0): "reglu",
    ("quick_gelu", True, 7.0, 1.0): "swiglu_oai",
    ("silu", False, None, 0.0): "silu",
    ("gelu", False, None, 0.0): "gelu_erf",
    ("fast_gelu", False, None, 0.0): "gelu",
    ("relu", False, None, 0.0): "relu",
    ("squared_relu", False, None, 0.0): "relu2",
}


def activation_of(config: TransformerConfig) -> str:
    """Returns the name of the activation here. Raises ValueError if there is none.

    The clamp of a gated unit is honoured whatever `bias_activation_fusion` is. Megatron-Core 0.19.2 drops the clamp of
    SiLU if it fuses; its main branch does not.
    """
    clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
    if not config.gated_linear_unit:
        clamp, offset = None, 0.0  # Megatron reads them only for gated units
    curve = curve_of(config.activation_func)
    name = None if curve is None else _NAMES.get((curve, config.gated_linear_unit, clamp, offset))
    if name is not None:
        return name
    known = "; ".join(
        f"{curve}, {gated}" + ("" if clamp is None else f", clamp {clamp}, offset {offset}")
        for curve, gated, clamp, offset in _NAMES
    )
    function = getattr(config.activation_func, "__name__", config.activation_func)
    described = f"{function} (no curve of ours)" if curve is None else f"{function} (the curve {curve})"
    raise ValueError(
        f"activation_func={described} with gated_linear_unit={config.gated_linear_unit}, "
        f"activation_func_clamp_value={config.activation_func_clamp_value}, "
        f"glu_linear_offset={config.glu_linear_offset} has no kernel here; set one of (activation_func, "
        f"gated_linear_unit): {known}"
    )


def curve_of(function: Callable[[Tensor], Tensor]) -> str | None:
    """Returns which of our curves, for example "silu", has the values of `function`, or None. Calls a function once."""
    try:
        return _curve_of(function)
    except TypeError:  # not hashable
        return _curve_of.__wrapped__(function)


@functools.lru_cache(maxsize=64)
@torch.no_grad()
def _curve_of(function: Callable[[Tensor], Tensor]) -> str | None:
    fp64: Any = {"dtype": torch.float64, "device": "cpu"}
    x = torch.cat([torch.linspace(-12, 12, 193, **fp64), torch.tensor(_FAR, **fp64)])
    theirs = _without_compiling(function, x)
    if not isinstance(theirs, Tensor) or theirs.shape != x.shape:
        return None
    for name, curve in _CURVES.items():
        if torch.allclose(curve(x), theirs.to(x), _RTOL, _ATOL):
            return name
    return None


def _without_compiling(function: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """Returns function(x), or None if it fails. Megatron compiles small functions, which takes seconds."""
    plain = getattr(function, "_torchdynamo_orig_callable", function)
    try:
        return plain(x)
    except Exception:  # noqa: BLE001 - any function of the user's, which may not take these numbers
        return None
