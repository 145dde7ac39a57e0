"""Replaces the MoE in a layer or block spec by ours. The rest of the spec stays as it is."""

import dataclasses
import functools
from typing import Any, TypeVar

from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, get_module

from sonic_ep.integrations.megatron.layer import SonicEPMoELayer
from sonic_ep.integrations.options import SonicEPOptions

Spec = TypeVar("Spec")


def use_sonic_ep(spec: Spec, options: SonicEPOptions | None = None) -> Spec:
    """Returns a copy of `spec` in which every MoELayer is a SonicEPMoELayer. Dense layers and all else stay.

    spec: a layer spec, a decoder block spec, a multi-token-prediction block spec or a MoE spec, with or without
    Transformer Engine. The MoE may be functools.partial(MoELayer, ...) or a ModuleSpec.
    Example: GPTModel(config, use_sonic_ep(get_gpt_layer_local_spec(num_experts=8)), ...)
    """
    return _replaced(spec, options or SonicEPOptions())


def get_sonic_ep_moe_spec(num_experts: int, *, use_te: bool = False, options: SonicEPOptions | None = None) -> Any:
    """Returns the `mlp` of a MoE layer's spec. use_te: use Transformer Engine's linear layers in the shared experts."""
    return use_sonic_ep(get_moe_module_spec(use_te=use_te, num_experts=num_experts), options)


def _replaced(spec: Any, options: SonicEPOptions) -> Any:
    if isinstance(spec, ModuleSpec) and _is_moe(get_module(spec)):
        return dataclasses.replace(spec, module=SonicEPMoELayer, params={**spec.params, "options": options})
    if isinstance(spec, functools.partial):
        if _is_moe(spec.func):
            return functools.partial(SonicEPMoELayer, *spec.args, **{**spec.keywords, "options": options})
        keywords = {name: _replaced(value, options) for name, value in spec.keywords.items()}
        return functools.partial(spec.func, *spec.args, **keywords)
    if isinstance(spec, list):
        return [_replaced(item, options) for item in spec]
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.init}
        return dataclasses.replace(spec, **{name: _replaced(part, options) for name, part in parts.items()})
    return spec


def _is_moe(module: object) -> bool:
    return isinstance(module, type) and issubclass(module, MoELayer)
