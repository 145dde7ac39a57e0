"""Finds the activation of an experts module of transformers among ours, by comparing values.

A class of experts may override `_apply_gate`, and every config has its own alpha and limit. Names do not tell them
apart, so we call the module's own function on a few numbers.

Legend: P rows of the pair buffer, J pre-activation columns (2I if gated else I).
"""

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing all of Dynamo

from sonic_ep.kernels.experts.activations import ACTIVATIONS

_ATTRIBUTE = "_sonic_ep_activation"
# Small values tell the curves apart, large ones a limit. The largest is far above any published limit.
_VALUES = (-1000.0, -60.0, -15.0, -9.0, -7.5, -3.0, -1.0, -0.3, 0.0, 0.1, 0.8, 2.0, 5.0, 7.5, 9.0, 15.0, 60.0, 1000.0)


def activation_of(experts: Any) -> str:
    """Returns the name of the activation (ACTIVATIONS) that equals the module's. Found once per module.

    Raises ValueError if no activation of ours has the same values.
    """
    name = getattr(experts, _ATTRIBUTE, None)
    return _find_activation(experts) if name is None else name


@_disable_dynamo
@torch.no_grad()
def _find_activation(experts: Any) -> str:
    interleaved_PJ = _probe(gated=experts.has_gate)
    theirs = _their_activation(experts, interleaved_PJ)
    for name, ours in ACTIVATIONS.items():
        if ours.gated == experts.has_gate and torch.allclose(ours.forward(interleaved_PJ), theirs, 1e-5, 1e-6):
            setattr(experts, _ATTRIBUTE, name)
            return name
    gated = "gated" if experts.has_gate else "not gated"
    raise ValueError(
        f"{type(experts).__name__} computes an activation ({_described(experts)}) that sonic_ep does not have; {gated} "
        f"ones are {', '.join(name for name, ours in ACTIVATIONS.items() if ours.gated == experts.has_gate)} "
        "(swiglu_clamped: limit 10, with _7 limit 7; swiglu_oai: alpha 1.702, limit 7; geglu and gelu: GELU's tanh "
        "approximation, with _erf exact). Build the model with experts_implementation='grouped_mm'"
    )


def _probe(*, gated: bool) -> Tensor:
    values = torch.tensor(_VALUES, dtype=torch.float64, device="cpu")
    return torch.cartesian_prod(values, values) if gated else values[:, None]


def _their_activation(experts: Any, interleaved_PJ: Tensor) -> Tensor:
    if not experts.has_gate:
        return experts.act_fn(interleaved_PJ)
    # One gate and one up column: both layouts of J = 2 columns are the same.
    return experts._apply_gate(interleaved_PJ)


def _described(experts: Any) -> str:
    """Returns what the module says about its activation."""
    act = getattr(experts, "act_fn", None)
    found = [] if act is None else [f"act_fn={getattr(act, '__name__', type(act).__name__)}"]
    for name in ("alpha", "swiglu_alpha", "limit", "swiglu_limit"):
        if (value := getattr(experts, name, None)) is not None:
            found.append(f"{name}={value}")
    return ", ".join(found) or "an _apply_gate of its own"
