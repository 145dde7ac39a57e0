"""Where Transformer Engine is installed: our layer among its norms and linears, and beside its grouped experts."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.launch import run_ranks

pytest.importorskip("megatron.core")
pytest.importorskip("transformer_engine.pytorch")
pytestmark = pytest.mark.gpu

STEPS = 4
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SHARED = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}


def te_spec(grouped: bool) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    return get_gpt_layer_with_transformer_engine_spec(num_experts=8, moe_grouped_gemm=grouped)


def curves(rank: int, config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of SequentialMLP and ours."""
    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import Run, gpt_config, parallel_state

    losses = []
    for change in (lambda spec: spec, use_sonic_ep):
        with parallel_state():
            run = Run(gpt_config(**config), change(te_spec(grouped=False)), distributed_optimizer=True)
            losses.append([step.loss for step in run.train(STEPS)])
    return losses[0], losses[1]


@pytest.mark.parametrize("config", [SHARED, FULL], ids=["shared", "recompute"])
def test_it_trains_as_megatrons(config: dict[str, Any]) -> None:
    stock, ours = run_ranks(curves, 1, config, backend="cpu:gloo,cuda:nccl", timeout=600)[0]
    assert stock[-1] < stock[0]
    assert ours == pytest.approx(stock, abs=1e-2)  # Transformer Engine multiplies fp32 in TF32


def layouts(rank: int, singleton: bool) -> list[set[tuple[Any, ...]]]:
    """(key, shape in the file) of what TEGroupedMLP's model and ours save."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, apply_factories

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_experts import metadata, module_of
    from tests.helpers.megatron_training import Run, gpt_config, parallel_state

    specs: list[Callable[[], Any]] = [lambda: te_spec(grouped=True), lambda: use_sonic_ep(te_spec(grouped=False))]
    found = []
    with parallel_state():
        for spec in specs:
            run = Run(gpt_config(moe_grouped_gemm=True), spec(), seed=None)
            state = module_of(run).sharded_state_dict(metadata=metadata(singleton))
            apply_factories(state)
            values: list[Any] = [value for value in nested_values(state) if isinstance(value, ShardedBase)]
            found.append({(value.key, value.global_shape) for value in values})
    return found


@pytest.mark.parametrize("singleton", [False, True], ids=["stacked", "singletons"])
def test_keys_and_shapes_are_those_of_its_grouped_experts(singleton: bool) -> None:
    grouped, ours = run_ranks(layouts, 1, singleton, backend="cpu:gloo,cuda:nccl", timeout=600)[0]
    assert ours == grouped
