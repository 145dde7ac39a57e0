"""Published recipes build our layer as they are, or are refused for a reason that docs/megatron.md gives.

Megatron's own argument parser makes the configs, with the functions that it uses.
"""

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import nn

from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")

from tests.helpers.megatron_arguments import config_of_fields
from tests.helpers.megatron_recipe import Recipe
from tests.helpers.megatron_recipes import RECIPES

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "megatron.md"
SMALL = {"hidden_size": 64, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 24}


class Group:
    """The size and rank of a process group that one process cannot make."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._size - 1


def config_of(recipe: Recipe) -> Any:
    """The config with small layers that Megatron's own parser makes of the recipe's arguments."""
    small = {name: value for name, value in SMALL.items() if recipe.fields.get(name)}
    config = config_of_fields({**recipe.fields, **small})
    config.use_cpu_initialization = not config.init_model_with_meta_device
    config.gradient_accumulation_fusion = False  # of the shared expert: a CUDA extension
    return config


def build(rank: int, names: list[str]) -> dict[str, str]:
    """How many experts, or what is said instead, by recipe."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from sonic_ep.groups import EPGroup
    from sonic_ep.integrations.megatron import experts, use_sonic_ep
    from sonic_ep.integrations.megatron import layer as layer_module
    from tests.helpers.megatron_training import parallel_state

    found = {}
    with ExitStack() as stack:
        stack.enter_context(parallel_state())
        stack.enter_context(patch.object(experts, "EPGroup", EPGroupOfOne(EPGroup)))
        # Projections to a latent size are Transformer Engine's.
        stack.enter_context(patch.object(layer_module, "latent_projections", lambda *_: (nn.Identity(), nn.Identity())))
        for recipe in (each for each in RECIPES if each.source in names):
            try:
                config = config_of(recipe)
            except (AssertionError, ValueError) as error:
                found[recipe.source] = f"Megatron: {error}"
                continue
            groups: Any = copy.copy(get_default_pg_collection())
            ep, width = config.expert_model_parallel_size, config.expert_tensor_parallel_size
            groups.ep, groups.expt_tp, groups.tp_ep = Group(ep), Group(width), Group(ep * width)
            spec: Any = use_sonic_ep(get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts))
            try:
                layer = spec(config=config, pg_collection=groups, is_mtp_layer=False, name="decoder.layers.0.mlp")
            except ValueError as error:
                found[recipe.source] = str(error)
                continue
            e, parts = layer.num_local_experts, layer.experts.parts
            I = config.moe_ffn_hidden_size // parts  # noqa: E741
            assert layer.experts.weight1.shape[:2] == (e, (1 + config.gated_linear_unit) * I)
            found[recipe.source] = f"{e * ep * width // parts} experts"
    return found


class EPGroupOfOne:
    """Stands for the class EPGroup, and makes a group of this process alone."""

    def __init__(self, real: Any) -> None:
        self.alone = real.alone

    def __call__(self, group: object) -> Any:
        return self.alone()


@pytest.fixture(scope="module")
def built(ranks: Callable[[int], RankPool]) -> dict[str, str]:
    return ranks(1).run(build, [each.source for each in RECIPES], timeout=300)[0]


@pytest.mark.parametrize("recipe", RECIPES, ids=[each.source for each in RECIPES])
def test_a_recipe_builds_or_says_which_field_it_does_not(built: dict[str, str], recipe: Recipe) -> None:
    said = built[recipe.source]
    if recipe.refused:
        assert recipe.refused in said
        assert "; set " in said or recipe.by_stock
    else:
        assert said == f"{recipe.fields['num_moe_experts']} experts"


def test_few_are_refused() -> None:
    sources = [source for each in RECIPES for source in each.sources]
    assert len(set(sources)) == len(sources)
    assert f"writes down {len(sources)} published recipes" in GUIDE.read_text(encoding="utf-8")
    assert len([each for each in RECIPES if each.refused and not each.by_stock]) <= 3
