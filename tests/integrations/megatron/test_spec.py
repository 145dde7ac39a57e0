"""`use_sonic_ep` replaces MoE layers wherever a spec holds them, and touches nothing else."""

import dataclasses
import functools
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from sonic_ep import RoundingConfig
from sonic_ep.integrations.megatron import SonicEPMoELayer, SonicEPOptions, get_sonic_ep_moe_spec, use_sonic_ep

OPTIONS = SonicEPOptions(rounding=RoundingConfig())


def layer_spec(num_experts: int | None = None) -> Any:
    return get_gpt_layer_local_spec(num_experts=num_experts)


def parts(mlp: Any) -> tuple[Any, ...]:
    """What a builder calls, and with what, for comparison."""
    return (mlp.func, mlp.args, mlp.keywords) if isinstance(mlp, functools.partial) else (mlp,)


def test_a_layer_spec_keeps_all_but_its_moe() -> None:
    stock = layer_spec(8)
    ours = use_sonic_ep(stock, OPTIONS)
    mlp, stock_mlp = ours.submodules.mlp, stock.submodules.mlp
    assert parts(mlp) == (SonicEPMoELayer, (), {**stock_mlp.keywords, "options": OPTIONS})
    back = dataclasses.replace(ours.submodules, mlp=stock_mlp)
    assert dataclasses.replace(ours, submodules=back) == stock
    assert stock_mlp.func is MoELayer


def test_dense_layers_stay() -> None:
    dense, moe = layer_spec(), layer_spec(8)
    block: Any = use_sonic_ep(TransformerBlockSubmodules(layer_specs=[dense, moe, dense], layer_norm=MLP))
    first, second, third = (spec.submodules.mlp for spec in block.layer_specs)
    assert second.func is SonicEPMoELayer
    assert parts(first) == parts(third) == parts(dense.submodules.mlp)
    assert block.layer_norm is MLP


def test_multi_token_prediction_blocks_take_it() -> None:
    layer = get_mtp_layer_spec_for_backend(layer_spec(8), backend=LocalSpecProvider())
    block = MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    assert "SonicEPMoELayer" in repr(use_sonic_ep(block))
    assert "SonicEPMoELayer" not in repr(block)


def test_builders_inside_builders_are_found() -> None:
    submodules = MoESubmodules(experts=MLP)
    layer: Any = ModuleSpec(module=MLP, submodules=[functools.partial(MoELayer, submodules=submodules)])
    (partial,) = use_sonic_ep(layer, OPTIONS).submodules
    assert partial.func is SonicEPMoELayer
    assert partial.keywords == {"submodules": submodules, "options": OPTIONS}
    other = functools.partial(MLP, submodules=functools.partial(MoELayer))
    assert use_sonic_ep(other).keywords["submodules"].func is SonicEPMoELayer


def test_a_module_spec_of_a_moe_is_replaced_too() -> None:
    submodules = MoESubmodules(experts=MLP)
    spec = use_sonic_ep(ModuleSpec(module=MoELayer, submodules=submodules, params={"layer_number": 3}), OPTIONS)
    assert spec.module is SonicEPMoELayer
    assert spec.submodules is submodules
    assert spec.params == {"layer_number": 3, "options": OPTIONS}


def test_later_options_win() -> None:
    once = use_sonic_ep(layer_spec(8))
    assert once.submodules.mlp.keywords["options"] == SonicEPOptions()
    assert use_sonic_ep(once, OPTIONS).submodules.mlp.keywords["options"] == OPTIONS


def test_the_moe_spec_alone() -> None:
    alone = get_sonic_ep_moe_spec(8, options=OPTIONS)
    assert alone.func is SonicEPMoELayer
    assert alone.keywords["options"] == OPTIONS
