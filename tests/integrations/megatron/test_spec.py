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


def test_a_layer_spec_keeps_all_but_its_moe() -> None:
    stock = layer_spec(8)
    ours = use_sonic_ep(stock, OPTIONS)
    assert ours.submodules.mlp.module is SonicEPMoELayer
    assert ours.submodules.mlp.params == {"options": OPTIONS}
    assert ours.submodules.mlp.submodules == stock.submodules.mlp.submodules
    back = dataclasses.replace(ours.submodules.mlp, module=MoELayer, params={})
    assert dataclasses.replace(ours, submodules=dataclasses.replace(ours.submodules, mlp=back)) == stock
    assert stock.submodules.mlp.module is MoELayer


def test_dense_layers_stay() -> None:
    dense, moe = layer_spec(), layer_spec(8)
    block: Any = use_sonic_ep(TransformerBlockSubmodules(layer_specs=[dense, moe, dense], layer_norm=MLP))
    assert [spec.submodules.mlp.module for spec in block.layer_specs] == [MLP, SonicEPMoELayer, MLP]
    assert (block.layer_specs[0], block.layer_norm) == (dense, MLP)
    assert use_sonic_ep(dense) == dense


def test_multi_token_prediction_blocks_take_it() -> None:
    layer = get_mtp_layer_spec_for_backend(layer_spec(8), backend=LocalSpecProvider())
    block = MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    assert "SonicEPMoELayer" in repr(use_sonic_ep(block))
    assert "SonicEPMoELayer" not in repr(block)


def test_the_partial_form_of_newer_versions() -> None:
    submodules = MoESubmodules(experts=MLP)
    layer: Any = ModuleSpec(module=MLP, submodules=[functools.partial(MoELayer, submodules=submodules)])
    (partial,) = use_sonic_ep(layer, OPTIONS).submodules
    assert partial.func is SonicEPMoELayer
    assert partial.keywords == {"submodules": submodules, "options": OPTIONS}
    other = functools.partial(MLP, submodules=functools.partial(MoELayer))
    assert use_sonic_ep(other).keywords["submodules"].func is SonicEPMoELayer


def test_process_groups_and_later_options_reach_the_layer() -> None:
    groups: Any = object()
    once = use_sonic_ep(layer_spec(8), pg_collection=groups)
    assert once.submodules.mlp.params == {"options": SonicEPOptions(), "pg_collection": groups}
    assert use_sonic_ep(once, OPTIONS).submodules.mlp.params == {"options": OPTIONS, "pg_collection": groups}


def test_the_moe_spec_alone() -> None:
    assert get_sonic_ep_moe_spec(8, options=OPTIONS) == use_sonic_ep(layer_spec(8), OPTIONS).submodules.mlp
