"""Where Transformer Engine is installed: our layer among its norms and linears, and beside its grouped experts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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


def exchanged(rank: int, folder: Path) -> list[str]:
    """What differs after a checkpoint of its grouped experts was loaded by ours, and one of ours by them."""
    from multiprocessing import dummy
    from unittest.mock import patch

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from sonic_ep.integrations.megatron import use_sonic_ep
    from sonic_ep.integrations.megatron.checkpoint import to_layout
    from tests.helpers.megatron_experts import metadata, module_of, weights
    from tests.helpers.megatron_training import Run, gpt_config, parallel_state

    faults: list[str] = []
    specs = {"te_grouped": te_spec(grouped=True), "ours": use_sonic_ep(te_spec(grouped=False))}
    # The writer's processes become threads: a rank of the tests may start no process.
    with parallel_state(), patch.object(filesystem_async.mp, "get_context", lambda _: dummy):
        models = {
            kind: module_of(Run(gpt_config(moe_grouped_gemm=True), spec, seed=None)) for kind, spec in specs.items()
        }
        layers = {kind: model.decoder.layers[1].mlp.experts for kind, model in models.items()}

        def forget(kind: str) -> None:
            with torch.no_grad():
                for parameter in models[kind].parameters():
                    parameter.fill_(float("nan"))

        def compare(source: str, kind: str, how: str) -> None:
            found = weights(kind, layers[kind])
            faults.extend(
                f"{source} -> {kind}, {how}: {name}"
                for name, value in weights(source, layers[source]).items()
                if not torch.equal(found[name], value)
            )

        for source, kind in (("te_grouped", "ours"), ("ours", "te_grouped")):
            for singleton in (False, True):
                path = folder / f"{source}-{singleton}"
                path.mkdir()
                dist_checkpointing.save(models[source].sharded_state_dict(metadata=metadata(singleton)), str(path))
                forget(kind)
                wanted = models[kind].sharded_state_dict(metadata=metadata(singleton))
                models[kind].load_state_dict(dist_checkpointing.load(wanted, str(path)))
                compare(source, kind, f"distributed, {singleton}")
            plain = models[source].state_dict()
            forget(kind)
            models[kind].load_state_dict(to_layout(plain, "te_grouped") if source == "ours" else plain)
            compare(source, kind, "plain")
    return faults


def test_checkpoints_go_both_ways_between_its_grouped_experts_and_ours(tmp_path: Path) -> None:
    assert run_ranks(exchanged, 1, tmp_path, backend="cpu:gloo,cuda:nccl", timeout=600) == [[]]
