"""LoRA on experts through PEFT (`target_parameters`), computed by `moe(lora=...)` instead of making W + B A.

PEFT wraps the module of experts in one ParamWrapper for each adapted weight, one in the other. In each forward a
wrapper parametrizes its weight, which makes W + B A twice, and backward makes a gradient as large. `fuse_lora` gives
the outermost wrapper object a forward of its own, as transformers gives one to modules of a parallel plan. Parameters
and their names stay PEFT's, and so do checkpoints, merging and switching of adapters.

Source: huggingface/peft, src/peft/tuners/lora/layer.py, `ParamWrapper`.

Legend: E experts, e local experts, H hidden size, I expert width, J pre-activation columns (2I if gated else I), r rank
of a low-rank update.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable, without importing all of Dynamo

from sonic_ep.groups import EPGroup
from sonic_ep.integrations.transformers.check import computed_here
from sonic_ep.integrations.transformers.experts import LORA, uses_registry
from sonic_ep.kernels.lora.low_rank import ExpertsLoRA

_warn_once = functools.cache(logging.getLogger("sonic_ep.integrations.transformers").warning)
_UP, _DOWN = ("gate_up_proj", "up_proj"), "down_proj"


def fuse_lora(model: nn.Module) -> list[str]:
    """Adds LoRA of experts to their products, instead of to their weights. Returns the names of PEFT's wrappers.

    Call it once adapters are there: after get_peft_model or PeftModel.from_pretrained, or on `trainer.model`. Adapters
    may be added, switched, disabled, merged and saved as before. Where something else than products of experts that
    sonic_ep computes is adapted, PEFT adds to the weights as before, which is logged once.

    Example: model = get_peft_model(model, LoraConfig(target_parameters=["mlp.experts.gate_up_proj"]))
             fuse_lora(model)

    Raises:  ValueError if no adapter of the model is on experts that transformers' registry computes.
    """
    from peft.tuners.lora.layer import ParamWrapper  # pyright: ignore[reportMissingImports]  # not among our extras

    wrappers: dict[str, Any] = {name: each for name, each in model.named_modules() if isinstance(each, ParamWrapper)}
    inner = {id(each.base_layer) for each in wrappers.values()}
    found = {
        name: each for name, each in wrappers.items() if id(each) not in inner and uses_registry(each.get_base_layer())
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no LoRA on experts that transformers' registry computes; name them in PEFT's "
            "LoraConfig, as in target_parameters=['mlp.experts.gate_up_proj', 'mlp.experts.down_proj']"
        )
    for wrapper in found.values():
        wrapper.forward = functools.partial(_forward, wrapper)
    return list(found)


@_disable_dynamo
def _forward(wrapper: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of an outermost wrapper. torch.compile breaks its graph here, as it does in PEFT's own forward."""
    experts, wrappers = wrapper.get_base_layer(), _chain(wrapper)
    plain = wrapper.disable_adapters or any(each.merged for each in wrappers) or "adapter_names" in kwargs
    if plain:
        return type(wrapper).forward(wrapper, *args, **kwargs)
    if (problem := _problem(experts, wrappers)) is not None:
        _warn_once(f"{type(experts).__name__}: PEFT makes W + B A in each forward: {problem}")
        return type(wrapper).forward(wrapper, *args, **kwargs)
    setattr(experts, LORA, Adapters(*(_factors(wrappers, names) for names in (_UP, (_DOWN,)))))
    try:
        return experts(*args, **kwargs)
    finally:
        setattr(experts, LORA, None)


def _chain(wrapper: Any) -> list[Any]:
    """Returns the wrapper and those in it."""
    found, experts = [wrapper], wrapper.get_base_layer()
    while found[-1].base_layer is not experts:
        found.append(found[-1].base_layer)
    return found


def _problem(experts: Any, wrappers: list[Any]) -> str | None:
    """Returns why PEFT must make W + B A, or None."""
    if not computed_here(experts):
        return "they are not computed by sonic_ep"
    for wrapper in wrappers:
        name = wrapper.parameter_name
        if name not in (*_UP, _DOWN):
            return f"{name} is adapted, and only products with {_UP[0]} (or {_UP[1]}) and {_DOWN} are added to"
        if getattr(wrapper, "_did_swap_in_out_features", None) is experts.is_transposed:
            return f"this version of PEFT has the factors of {name} in another order than 0.21"
    return None


@dataclass(frozen=True, slots=True)
class Adapters:
    """A (E, r, in) and B (E, out, r) of all active adapters, for w1 and for w2. None: no update."""

    up: tuple[Tensor, Tensor] | None
    down: tuple[Tensor, Tensor] | None

    def of_rank(self, group: EPGroup, num_local: int, dtype: torch.dtype) -> ExpertsLoRA:
        """Returns the updates of this rank's e experts in `dtype`. Differentiable.

        Raises ValueError if there are factors for another number of experts than all ranks have.
        """
        factors: list[Tensor | None] = []
        for pair in (self.up, self.down):
            for values in pair or (None, None):
                if values is not None and values.shape[0] != num_local * group.size:
                    raise ValueError(
                        f"LoRA has factors for {values.shape[0]} experts, and the {group.size} ranks that divide them "
                        f"have {num_local} each; with several ranks build the model with "
                        "DistributedConfig(ep_implementation='sonic_ep')"
                    )
                own = slice(group.rank * num_local, (group.rank + 1) * num_local)
                factors.append(None if values is None else values[own].to(dtype))
        return ExpertsLoRA(*factors)


def _factors(wrappers: list[Any], names: tuple[str, ...]) -> tuple[Tensor, Tensor] | None:
    """Returns A (E, r, in) and B (E, out, r) of the active adapters of a weight, or None if there are none.

    B is scaled. Several adapters are concatenated along r.
    """
    factors: list[tuple[Tensor, Tensor]] = []
    for wrapper in wrappers:
        if wrapper.parameter_name not in names:
            continue
        for adapter in wrapper.active_adapters:
            if adapter in wrapper.lora_A:
                a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
                a_Ero = a.reshape(wrapper.num_experts, -1, a.shape[1])
                b_Eor = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
                factors.append((a_Ero, b_Eor * wrapper.scaling[adapter]))
    if not factors:
        return None
    if len(factors) == 1:
        return factors[0]
    return torch.cat([a for a, _ in factors], 1), torch.cat([b for _, b in factors], 2)
