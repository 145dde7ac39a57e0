"""Checkpoints ours <-> Megatron's experts: weights, optimizer state and what training makes of them afterwards.

SequentialMLP and GroupedMLP are the real ones (building and saving them needs no GPU, running GroupedMLP would);
TEGroupedMLP saves through a stand-in for Transformer Engine's linear, written after the source named there.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.launch import RankPool

pytest.importorskip("megatron.core")
pytest.importorskip("psutil")

EXPERTS = 8
EP_SIZES = (1, 2, 4)
VARIANTS: dict[str, dict[str, Any]] = {
    "gated": {},
    "biases": {"add_bias_linear": True},
    "not gated": {"gated_linear_unit": False},
}
Curve = list[tuple[float, float]]
Pools = Callable[[int], RankPool]


class Place(NamedTuple):
    """Whose experts, and over how many ranks."""

    kind: str  # ours, sequential, grouped
    ep: int


def metadata(singleton: bool) -> dict[str, Any]:
    return {
        "singleton_local_shards": singleton,
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }


def build(kind: str, *, seed: int | None = 0, distributed: bool = False, **config: Any) -> Any:
    """A Run with the experts of `kind`; inside parallel_state."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import grouped_gemm_util

    from sonic_ep.integrations.megatron import use_sonic_ep
    from tests.helpers.megatron_training import Run, gpt_config

    spec = get_gpt_layer_local_spec(num_experts=8, normalization="RMSNorm", moe_grouped_gemm=kind == "grouped")
    if kind == "ours":
        spec = use_sonic_ep(spec)
    with patch.object(grouped_gemm_util, "assert_grouped_gemm_is_available"):
        settings = gpt_config(**config)
        if kind == "grouped":
            settings.moe_grouped_gemm = True
        return Run(settings, spec, seed=seed, distributed_optimizer=distributed)


def module_of(run: Any) -> Any:
    return run.models[0].module


def save(run: Any, folder: Path, singleton: bool, *, optimizer: bool) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(sharded(run, singleton, optimizer=optimizer, is_loading=False), str(folder))


def load(run: Any, folder: Path, singleton: bool, *, optimizer: bool) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(sharded(run, singleton, optimizer=optimizer, is_loading=True), str(folder))
    module_of(run).load_state_dict(state["model"])
    if optimizer:
        run.optimizer.load_state_dict(state["optimizer"])


def sharded(run: Any, singleton: bool, *, optimizer: bool, is_loading: bool) -> dict[str, Any]:
    model = module_of(run).sharded_state_dict(metadata=metadata(singleton))
    state = {"model": model}
    if optimizer:
        state["optimizer"] = run.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=metadata(singleton)
        )
    return state


def differences(run: Any, other: Any) -> list[str]:
    """Names of tensors that are not equal bit by bit."""
    ours, theirs = module_of(run).state_dict(), module_of(other).state_dict()
    assert ours.keys() == theirs.keys()
    return [name for name, value in ours.items() if torch.is_tensor(value) and not torch.equal(value, theirs[name])]


# Weights: every pair of kinds and EP sizes, experts alone.


def bare_experts(kind: str, config: Any) -> Any:
    """Experts of `kind` on this rank, as built."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import grouped_gemm_util
    from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from sonic_ep.integrations.megatron import SonicEPOptions
    from sonic_ep.integrations.megatron.experts import SonicEPExperts

    groups, count = get_default_pg_collection(), EXPERTS // config.expert_model_parallel_size
    if kind == "ours":
        module = SonicEPExperts(count, config, groups, SonicEPOptions())
    elif kind == "sequential":
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        module = SequentialMLP(count, config, linears, groups)
    else:
        with patch.object(grouped_gemm_util, "assert_grouped_gemm_is_available"):
            module = GroupedMLP(count, config, groups)
    return module


def views(kind: str, module: Any) -> dict[str, Tensor]:
    """The module's memory as fc1 (e, J, H), gate rows first, fc2 (e, H, I), and biases: copies for SequentialMLP."""
    from sonic_ep.kernels.activations import concatenate

    gated = module.config.gated_linear_unit
    if kind == "sequential":
        experts = module.local_experts
        parts = {
            "fc1": [each.linear_fc1.weight for each in experts],
            "fc2": [each.linear_fc2.weight for each in experts],
        }
        if module.config.add_bias_linear:
            parts |= {
                "b1": [each.linear_fc1.bias for each in experts],
                "b2": [each.linear_fc2.bias for each in experts],
            }
        return {name: torch.stack(list(part)).detach() for name, part in parts.items()}
    if kind == "grouped":
        count, H = module.num_local_experts, module.config.hidden_size
        return {
            "fc1": module.weight1.detach().view(count, H, -1).transpose(1, 2),
            "fc2": module.weight2.detach().view(count, -1, H).transpose(1, 2),
        }
    names = {"fc1": "weight1", "fc2": "weight2", "b1": "bias1", "b2": "bias2"}
    found = {name: getattr(module, own) for name, own in names.items() if getattr(module, own) is not None}
    return {
        name: concatenate(value.detach()) if gated and name in ("fc1", "b1") else value.detach()
        for name, value in found.items()
    }


@torch.no_grad()
def set_experts(kind: str, module: Any, values: dict[str, Tensor]) -> None:
    from sonic_ep.kernels.activations import interleave

    if kind == "sequential":
        for local, expert in enumerate(module.local_experts):
            expert.linear_fc1.weight.copy_(values["fc1"][local])
            expert.linear_fc2.weight.copy_(values["fc2"][local])
            if "b1" in values:
                expert.linear_fc1.bias.copy_(values["b1"][local])
                expert.linear_fc2.bias.copy_(values["b2"][local])
    elif kind == "grouped":
        for name, view in views(kind, module).items():
            view.copy_(values[name])
    else:
        for name, own in {"fc1": "weight1", "fc2": "weight2", "b1": "bias1", "b2": "bias2"}.items():
            if name in values:
                pairs = module.config.gated_linear_unit and name in ("fc1", "b1")
                getattr(module, own).copy_(interleave(values[name]) if pairs else values[name])


def exchange_experts(rank: int, folder: Path, singleton: bool, changes: dict[str, Any]) -> list[str]:
    """Save each kind at each EP size, load each into each; what came out different from what went in."""
    from megatron.core import dist_checkpointing, parallel_state

    from tests.helpers.megatron_training import gpt_config
    from tests.helpers.megatron_training import parallel_state as groups

    kinds = ["ours", "sequential"] + ([] if changes.get("add_bias_linear") else ["grouped"])
    H, I = 6, 4  # noqa: E741
    J = 2 * I if changes.get("gated_linear_unit", True) else I
    shapes = {"fc1": (J, H), "fc2": (H, I)} | ({"b1": (J,), "b2": (H,)} if "add_bias_linear" in changes else {})
    whole = {name: torch.randn(EXPERTS, *shape) for name, shape in shapes.items()}  # all ranks have one seed
    config = {"hidden_size": H, "num_attention_heads": 2, "moe_ffn_hidden_size": I, **changes}
    if rank == 0:
        for ep in EP_SIZES:
            (folder / str(ep)).mkdir()
    dist.barrier()
    faults = []
    for loading in (False, True):
        for ep in EP_SIZES:
            with groups(expert=ep):
                modules = {kind: bare_experts(kind, gpt_config(**config)) for kind in kinds}
                share = parallel_state.get_expert_model_parallel_rank()
                values = {name: value.chunk(ep)[share] for name, value in whole.items()}
                if not loading:
                    for kind, module in modules.items():
                        set_experts(kind, module, values)
                    state = {kind: shards(module, kind, singleton) for kind, module in modules.items()}
                    dist_checkpointing.save(state, str(folder / str(ep)))
                    continue
                for saved in EP_SIZES:
                    faults += [
                        f"{source}{saved} -> {kind}{ep}: {name}"
                        for source, (kind, module) in itertools.product(kinds, modules.items())
                        for name, value in load_experts(
                            kind, module, str(folder / str(saved)), singleton, source
                        ).items()
                        if not torch.equal(values[name], value)
                    ]
    return faults


def load_experts(kind: str, module: Any, folder: str, singleton: bool, source: str) -> dict[str, Tensor]:
    """What `module` holds after it has loaded what `source` saved."""
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))
    state = dist_checkpointing.load(shards(module, source, singleton), folder)
    module.load_state_dict({key.removeprefix(f"{source}."): value for key, value in state.items()})
    return views(kind, module)


def shards(module: Any, name: str, singleton: bool) -> dict[str, Any]:
    """As a block of one layer asks it for them, under `name`."""
    return module.sharded_state_dict(f"{name}.", ((0, 0, 1),), metadata(singleton))


@pytest.mark.parametrize("singleton", [False, True], ids=["one-tensor", "singletons"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_go_between_all_kinds_and_ep_sizes(ranks: Pools, tmp_path: Path, variant: str, singleton: bool) -> None:
    faults = ranks(4).run(exchange_experts, tmp_path, singleton, VARIANTS[variant])
    assert faults == [[]] * 4


# Training: through another's checkpoint and back, as if nothing had happened.


def travel(rank: int, folder: Path, route: list[Place], distributed: bool, singleton: bool) -> tuple[Curve, Curve]:
    """Train at the first place, save, and go on: (the curve of going on there, the same after the journey)."""
    from tests.helpers.megatron_training import parallel_state

    def train(run: Any, steps: int) -> Curve:
        return [(step.loss, step.grad_norm) for step in run.train(steps)]

    stops = [folder / str(number) for number in range(len(route))]
    with parallel_state(expert=route[0].ep):
        run = build(route[0].kind, distributed=distributed)
        train(run, 2)
        save(run, stops[0], singleton, optimizer=True)
        stayed = train(run, 3)
    for place, before, after in zip(route[1:], stops, stops[1:], strict=False):
        with parallel_state(expert=place.ep):
            run = build(place.kind, seed=1, distributed=distributed)
            load(run, before, singleton, optimizer=True)
            save(run, after, singleton, optimizer=True)
            run.seed, run.steps_done = 0, 2  # the same data
            travelled = train(run, 3) if place is route[-1] else []
    return stayed, travelled


ROUTES: dict[str, tuple[list[Place], bool, bool]] = {
    "EP2 by SequentialMLP at EP4": ([Place("ours", 2), Place("sequential", 4), Place("ours", 2)], False, False),
    "EP1 by SequentialMLP at EP1": ([Place("ours", 1), Place("sequential", 1), Place("ours", 1)], True, False),
    "SequentialMLP at EP2 by ours at EP4": (
        [Place("sequential", 2), Place("ours", 4), Place("sequential", 2)],
        True,
        False,
    ),
    "SequentialMLP at EP4 by ours at EP2": (
        [Place("sequential", 4), Place("ours", 2), Place("sequential", 4)],
        False,
        True,
    ),
    "EP2 by GroupedMLP at EP4": ([Place("ours", 2), Place("grouped", 4), Place("ours", 2)], True, False),
}


@pytest.mark.parametrize("route", ROUTES)
def test_training_goes_on_bitwise_after_a_journey(ranks: Pools, tmp_path: Path, route: str) -> None:
    for stayed, travelled in ranks(4).run(travel, tmp_path, *ROUTES[route]):
        assert travelled == stayed


def test_training_goes_on_in_the_other_implementation(ranks: Pools, tmp_path: Path) -> None:
    route = [Place("sequential", 2), Place("ours", 4)]
    for stayed, travelled in ranks(4).run(travel, tmp_path, route, True, False):
        for step, wanted in zip(travelled, stayed, strict=True):
            assert step == pytest.approx(wanted, abs=1e-5)


# The layout itself.


def layouts(rank: int, singleton: bool, config: dict[str, Any]) -> dict[str, set[tuple[Any, ...]]]:
    """(key, shape in the file) of all that each kind saves on this rank, at EP 2 of 4 ranks."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, apply_factories

    from tests.helpers.megatron_training import parallel_state

    found = {}
    with parallel_state(expert=2):
        for kind in ("ours", "sequential", "grouped"):
            if kind == "grouped" and config.get("add_bias_linear"):
                continue  # it has none
            state = module_of(build(kind, seed=None, **config)).sharded_state_dict(metadata=metadata(singleton))
            apply_factories(state)
            values = [value for value in nested_values(state) if isinstance(value, ShardedBase)]
            found[kind] = {
                (value.key, value.global_shape, value.global_offset if isinstance(value, ShardedObject) else None)
                for value in values
            }
    return found


@pytest.mark.parametrize("singleton", [False, True], ids=["one-tensor", "singletons"])
def test_keys_and_shapes_are_those_of_megatron(ranks: Pools, singleton: bool) -> None:
    for found in ranks(4).run(layouts, singleton, {}):
        assert found["ours"] == found["sequential"] == found["grouped"]
    for found in ranks(4).run(layouts, singleton, {"add_bias_linear": True}):
        assert found["ours"] == found["sequential"]


def test_flat_pieces_of_optimizer_state_are_refused() -> None:
    from sonic_ep.integrations.megatron.checkpoint import HeldExperts, sharded_experts

    held = HeldExperts(ep_rank=0, ep_size=1, copy=0, gated=True)
    factory = sharded_experts({"weight1": torch.zeros(2, 4, 3), "weight2": torch.zeros(2, 3, 2)}, held)["weight1"]
    with pytest.raises(ValueError, match="fully_reshardable"):
        factory.build_fn(factory.key, factory.data, factory.replica_id, slice(0, 4))


# TEGroupedMLP.


class TEGroupedLinear(nn.Module):
    """Weights and checkpoints of Transformer Engine's grouped linear, as TEGroupedLinear in
    megatron/core/extensions/transformer_engine.py of 0.16.1 has them (_sharded_state_dict_grouped)."""

    def __init__(self, weights_eJH: Tensor, pg_collection: Any, tp_axis: int) -> None:
        super().__init__()
        for local, weight in enumerate(weights_eJH):
            self.register_parameter(f"weight{local}", nn.Parameter(weight.clone()))
        self.groups, self.tp_axis = pg_collection, tp_axis

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        result: dict[str, Any] = {}
        count = len(list(self.parameters()))
        for local in range(count):
            expert = self.groups.ep.rank() * count + local
            singleton = metadata.get("singleton_local_shards", False)
            axis = () if singleton else ((len(sharded_offsets), expert, count * self.groups.ep.size()),)
            part = make_sharded_tensors_for_checkpoint(
                {f"{local}.weight": getattr(self, f"weight{local}"), f"{local}._extra_state": None},
                "",
                {f"{local}.weight": self.tp_axis},
                (*sharded_offsets, *axis),
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(part, f"{local}.", f"{expert}.{prefix}" if singleton else prefix)
            result[f"{prefix}weight{local}"] = part[f"{local}.weight"]
            result[f"{prefix}_extra_state{local or ''}"] = part[f"{local}._extra_state"]
        for value in result.values():
            value.replica_id = (*value.replica_id[:2], self.groups.expt_dp.rank())
        return result


def te_grouped_mlp(experts: Any, pg_collection: Any) -> Any:
    """Megatron's TEGroupedMLP with the weights of our `experts`, whole."""
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    from sonic_ep.integrations.megatron.checkpoint import to_layout

    stacked = {name: value.detach() for name, value in experts.named_parameters()}
    parts = to_layout(stacked, "te_grouped")
    module = TEGroupedMLP.__new__(TEGroupedMLP)
    MegatronModule.__init__(module, config=experts.config)
    module.num_local_experts = experts.num_local_experts
    module.ep_group, module.tp_group = pg_collection.ep, pg_collection.expt_tp
    for name, tp_axis in (("linear_fc1", 0), ("linear_fc2", 1)):
        weights = [parts[f"{name}.weight{local}"] for local in range(experts.num_local_experts)]
        setattr(module, name, TEGroupedLinear(torch.stack(weights), pg_collection, tp_axis))
    return module


def exchange_with_te(rank: int, folder: Path, singleton: bool) -> dict[str, bool]:
    """Each saves at EP 2 and the other loads at EP 4; whether values are equal, and the keys."""
    from megatron.core import dist_checkpointing
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from tests.helpers.megatron_training import parallel_state

    def experts_of(seed: int) -> Any:
        return module_of(build("ours", seed=seed)).decoder.layers[0].mlp.experts

    def state_of(module: Any) -> dict[str, Any]:
        return module.sharded_state_dict("mlp.experts.", ((0, 0, 1),), metadata(singleton))

    if rank == 0:
        (folder / "te").mkdir()
        (folder / "ours").mkdir()
    dist.barrier()
    with parallel_state(expert=2):
        ours = experts_of(0)
        dist_checkpointing.save(state_of(ours), str(folder / "ours"))
        dist_checkpointing.save(state_of(te_grouped_mlp(ours, get_default_pg_collection())), str(folder / "te"))
    equal = {}
    with parallel_state(expert=4):
        wanted, found = experts_of(0), experts_of(1)
        loaded = dist_checkpointing.load(state_of(found), str(folder / "te"))
        found.load_state_dict({key.removeprefix("mlp.experts."): value for key, value in loaded.items()})
        equal["te -> ours"] = all(
            torch.equal(found.state_dict()[name], value) for name, value in wanted.named_parameters()
        )

        groups = get_default_pg_collection()
        te_wanted, te_found = te_grouped_mlp(wanted, groups), te_grouped_mlp(experts_of(1), groups)
        loaded = dist_checkpointing.load(state_of(te_found), str(folder / "ours"))
        equal["ours -> te"] = all(
            torch.equal(loaded[f"mlp.experts.{name}"], value) for name, value in te_wanted.named_parameters()
        )
    return equal


@pytest.mark.parametrize("singleton", [False, True], ids=["one-tensor", "singletons"])
def test_te_grouped_mlp_both_ways(ranks: Pools, tmp_path: Path, singleton: bool) -> None:
    for equal in ranks(4).run(exchange_with_te, tmp_path, singleton):
        assert equal == {"te -> ours": True, "ours -> te": True}


# Plain state dicts.


def exchange_plain(rank: int, config: dict[str, Any]) -> list[str]:
    """Through load_state_dict and to_layout, strictly, at EP 2; what came out different."""
    from sonic_ep.integrations.megatron.checkpoint import to_layout
    from tests.helpers.megatron_training import parallel_state

    gated = config.get("gated_linear_unit", True)
    faults = []
    with parallel_state(expert=2):
        ours, sequential = build("ours", **config), build("sequential", **config)
        others = {"sequential": build("sequential", seed=1, **config)}
        if not config.get("add_bias_linear"):
            others["grouped"] = build("grouped", seed=1, **config)
        for layout, run in others.items():
            module_of(run).load_state_dict(to_layout(module_of(ours).state_dict(), layout, gated=gated))  # type: ignore[arg-type]
            back = build("ours", seed=1, **config)
            module_of(back).load_state_dict(module_of(run).state_dict())
            faults += [f"by {layout}: {name}" for name in differences(back, ours)]
        faults += [f"to sequential: {name}" for name in differences(others["sequential"], sequential)]
        back = build("ours", seed=1, **config)
        module_of(back).load_state_dict(to_layout(module_of(ours).state_dict(), "te_grouped", gated=gated))
        faults += [f"by te_grouped: {name}" for name in differences(back, ours)]
    return faults


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_state_dicts_of_every_layout(ranks: Pools, variant: str) -> None:
    assert ranks(4).run(exchange_plain, VARIANTS[variant]) == [[]] * 4


@pytest.fixture
def stacked() -> dict[str, Tensor]:
    """Two experts, H = 3, I = 2: gate rows are 10e, 10e + 1, up rows 10e + 5, 10e + 6."""
    rows = torch.tensor([[0.0, 5, 1, 6], [10, 15, 11, 16]])
    return {"experts.weight1": rows[..., None].expand(2, 4, 3), "experts.weight2": torch.arange(12.0).view(2, 3, 2)}


def test_to_layout_by_hand(stacked: dict[str, Tensor]) -> None:
    from sonic_ep.integrations.megatron.checkpoint import to_layout

    sequential = to_layout(stacked, "sequential")
    assert sequential["experts.local_experts.1.linear_fc1.weight"][:, 0].tolist() == [10, 11, 15, 16]
    assert sequential["experts.local_experts.1.linear_fc2.weight"].tolist() == [[6, 7], [8, 9], [10, 11]]
    te_grouped = to_layout(stacked, "te_grouped")
    assert te_grouped["experts.linear_fc1.weight1"][:, 0].tolist() == [10, 11, 15, 16]
    assert te_grouped["experts.linear_fc2.weight0"].tolist() == [[0, 1], [2, 3], [4, 5]]
    # GroupedMLP multiplies by weight1.view(e, H, J) and weight2.view(e, I, H).
    grouped = to_layout(stacked, "grouped")
    assert grouped["experts.weight1"].shape == (3, 8)
    assert grouped["experts.weight1"].view(2, 3, 4)[1, 0].tolist() == [10, 11, 15, 16]
    assert grouped["experts.weight2"].shape == (4, 3)
    assert grouped["experts.weight2"].view(2, 2, 3)[1].tolist() == [[6, 8, 10], [7, 9, 11]]


def test_to_layout_says_what_it_cannot(stacked: dict[str, Tensor]) -> None:
    from sonic_ep.integrations.megatron.checkpoint import to_layout

    with pytest.raises(ValueError, match="layout='megablocks' is none of"):
        to_layout(stacked, "megablocks")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="GroupedMLP has none"):
        to_layout({**stacked, "experts.bias1": torch.zeros(2, 4)}, "grouped")
