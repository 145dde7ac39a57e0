"""Distributed checkpoints of experts: ours <-> each of Megatron's, at all EP sizes, in both forms of the layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.launch import RankPool
from tests.helpers.megatron_experts import (
    EXPERTS,
    KINDS,
    VARIANTS,
    bare_experts,
    metadata,
    module_of,
    run_with,
    set_weights,
    weights,
)

pytest.importorskip("megatron.core")
pytest.importorskip("psutil")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")

EP_SIZES = (1, 2, 4)
FORMS = {"stacked": False, "singletons": True}  # by metadata["singleton_local_shards"]
Ranks = Callable[[int], RankPool]
Held = dict[tuple[str, str], Any]  # experts by (kind, form): each form has its own, that one load may fill them all


def exchange(rank: int, folder: Path, variant: str) -> list[str]:
    """Save each kind at each EP size (of the lesser variants, at one), load each into each; what came out different."""
    from megatron.core import dist_checkpointing

    from tests.helpers.megatron_training import gpt_config, parallel_state

    kinds = list(KINDS)
    H, I = 6, 4  # noqa: E741
    J = I if variant == "not-gated" else 2 * I
    shapes = {"fc1": (J, H), "fc2": (H, I)} | (
        {"b1": (J,), "b2": (H,)} if VARIANTS[variant].get("add_bias_linear") else {}
    )
    whole = {name: torch.randn(EXPERTS, *shape) for name, shape in shapes.items()}  # all ranks have one seed
    if rank == 0:
        for ep in EP_SIZES:
            (folder / str(ep)).mkdir()
    faults = []
    saved_at = EP_SIZES if variant == "gated" else (2,)
    for loading, sizes in ((False, saved_at), (True, EP_SIZES)):
        for ep in sizes:
            with parallel_state(expert=ep):
                config = gpt_config(hidden_size=H, num_attention_heads=2, moe_ffn_hidden_size=I, **VARIANTS[variant])
                held = {(kind, form): bare_experts(kind, config) for kind in kinds for form in FORMS}
                share = dist.get_rank() % ep
                values = {name: value.chunk(ep)[share] for name, value in whole.items()}
                if loading:
                    places = [(saved, turn) for saved in saved_at for turn in range(len(kinds))]
                    faults += [
                        f"EP {saved} -> EP {ep}: {fault}"
                        for saved, turn in places
                        for fault in load_all(held, str(folder / str(saved)), turn, values)
                    ]
                    continue
                for (kind, _), experts in held.items():
                    set_weights(kind, experts, values)
                state = {f"{kind}-{form}": shards(each, kind, form) for (kind, form), each in held.items()}
                dist_checkpointing.save(state, str(folder / str(ep)))
    return faults


def load_all(held: Held, folder: str, turn: int, values: dict[str, torch.Tensor]) -> list[str]:
    """Load each kind with what the one `turn` places on has saved; where that is not `values`."""
    from megatron.core import dist_checkpointing

    kinds = list(dict.fromkeys(kind for kind, _ in held))
    source = {kind: kinds[(number + turn) % len(kinds)] for number, kind in enumerate(kinds)}
    with torch.no_grad():
        for experts in held.values():
            for parameter in experts.parameters():
                parameter.fill_(float("nan"))
    state = {place: shards(experts, source[place[0]], place[1]) for place, experts in held.items()}
    loaded: Any = dist_checkpointing.load({"-".join(place): value for place, value in state.items()}, folder)
    faults = []
    for (kind, form), experts in held.items():
        entries = loaded[f"{kind}-{form}"]
        if kind == "te_grouped":  # Transformer Engine's own linear takes them
            entries = {key: value for key, value in entries.items() if "_extra_state" not in key}
        experts.load_state_dict({key.split(".", 1)[1]: value for key, value in entries.items()})
        found = weights(kind, experts)
        faults += [f"{source[kind]} -> {kind}, {form}: {n}" for n, v in values.items() if not torch.equal(found[n], v)]
    return faults


def shards(experts: Any, name: str, form: str) -> dict[str, Any]:
    """As a block of one layer asks for them, under `name` and form."""
    return experts.sharded_state_dict(f"{name}-{form}.", ((0, 0, 1),), metadata(FORMS[form]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_go_between_all_kinds_and_ep_sizes(ranks: Ranks, tmp_path: Path, variant: str) -> None:
    assert ranks(4).run(exchange, tmp_path, variant) == [[]] * 4


def layouts(rank: int, form: str, variant: str) -> dict[str, set[tuple[Any, ...]]]:
    """(key, shape in the file, and of an object its place) of all that a model with each kind saves on this rank."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, apply_factories

    from tests.helpers.megatron_training import parallel_state

    found = {}
    with parallel_state(expert=2):
        for kind in KINDS:
            if kind == "te_grouped":
                continue
            model = module_of(run_with(kind, seed=None, **VARIANTS[variant]))
            state = model.sharded_state_dict(metadata=metadata(FORMS[form]))
            apply_factories(state)
            values: list[Any] = [value for value in nested_values(state) if isinstance(value, ShardedBase)]
            found[kind] = {
                (value.key, value.global_shape, value.global_offset if isinstance(value, ShardedObject) else None)
                for value in values
            }
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("variant", ["gated", "biases"])
def test_a_models_keys_and_shapes_are_megatrons(ranks: Ranks, form: str, variant: str) -> None:
    for found in ranks(4).run(layouts, form, variant):
        assert any("linear_fc1.weight" in key for key, *_ in found["ours"])
        assert all(each == found["sequential"] for each in found.values())


def test_flat_pieces_of_optimizer_state_are_refused() -> None:
    from sonic_ep.integrations.megatron.checkpoint import HeldExperts, sharded_experts

    held = HeldExperts(ep_rank=0, ep_size=1, copy=0, gated=True)
    factory = sharded_experts({"weight1": torch.zeros(2, 4, 3), "weight2": torch.zeros(2, 3, 2)}, held)["weight1"]
    with pytest.raises(ValueError, match="fully_reshardable"):
        factory.build_fn(factory.key, factory.data, factory.replica_id, slice(0, 4))
