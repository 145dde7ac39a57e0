"""The activation of an experts module of transformers, whose class may override `_apply_gate`."""

from typing import Any

from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing all of Dynamo

from sonic_ep.integrations.activation import activation_like
from sonic_ep.kernels.experts.activations import ACTIVATIONS

_ATTRIBUTE = "_sonic_ep_activation"


def activation_of(experts: Any) -> str:
    """Returns the name of the activation (ACTIVATIONS) that equals the module's. Found once per module.

    Raises ValueError if no activation of ours has the same values.
    """
    name = getattr(experts, _ATTRIBUTE, None)
    return _find_activation(experts) if name is None else name


@_disable_dynamo
def _find_activation(experts: Any) -> str:
    # With one gate and one up column, both layouts of J = 2 columns are the same.
    theirs = experts._apply_gate if experts.has_gate else experts.act_fn
    name = activation_like(theirs, gated=experts.has_gate)
    if name is not None:
        setattr(experts, _ATTRIBUTE, name)
        return name
    gated = "gated" if experts.has_gate else "not gated"
    raise ValueError(
        f"{type(experts).__name__} computes an activation ({_described(experts)}) that sonic_ep does not have; {gated} "
        f"ones are {', '.join(name for name, ours in ACTIVATIONS.items() if ours.gated == experts.has_gate)} "
        "(swiglu_clamped: limit 10, with _7 limit 7; swiglu_oai: alpha 1.702, limit 7; geglu and gelu: GELU's tanh "
        "approximation, with _erf exact). Build the model with experts_implementation='grouped_mm'"
    )


def _described(experts: Any) -> str:
    """Returns what the module says about its activation."""
    act = getattr(experts, "act_fn", None)
    found = [] if act is None else [f"act_fn={getattr(act, '__name__', type(act).__name__)}"]
    for name in ("alpha", "swiglu_alpha", "limit", "swiglu_limit"):
        if (value := getattr(experts, name, None)) is not None:
            found.append(f"{name}={value}")
    return ", ".join(found) or "an _apply_gate of its own"
