"""`check` tells before the first step whether a model's experts are computed here."""

from typing import Any

from torch import nn

from sonic_ep.integrations.transformers.experts import NAME, checked_activation, hold_key, registered_experts


def check(model: nn.Module) -> list[str]:
    """Returns the names of the modules of experts that sonic_ep computes.

    Raises ValueError, with value, limit and fix, if there is none, or if any experts cannot be computed. Without this
    call the second case raises in the first forward, while transformers accepts the first case silently.
    """
    registered: dict[str, Any] = {**registered_experts(model, f"experts_implementation={NAME!r} has no effect")}
    for name, experts in registered.items():
        if not computed_here(experts):
            implementation = getattr(experts.config, "_experts_implementation", None)
            raise ValueError(
                f"{name} has experts_implementation={implementation!r}; give experts_implementation={NAME!r} to "
                f"from_pretrained or from_config, or call model.set_experts_implementation({NAME!r})"
            )
        hold_key(experts)
        try:
            checked_activation(experts)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return list(registered)


def computed_here(experts: Any) -> bool:
    """Returns True if a module that asks transformers' registries gets sonic_ep from one of them."""
    if getattr(experts.config, "_experts_implementation", None) == NAME:
        return True
    config = getattr(experts.config, "distributed_config", None)
    return getattr(config, "ep_implementation", None) == NAME and getattr(config, "ep_size", 1) > 1
