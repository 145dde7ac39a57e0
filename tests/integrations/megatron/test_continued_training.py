"""Checkpoints of model and optimizer: after a journey through other experts and EP sizes training goes on bitwise.

One run trains, saves and goes on. Each stop loads what it saved into a model of another kind or EP size and saves that
in turn; the first kind at the first EP size loads what the stop saved and makes the same steps again.

EP 1 is a world of its own for the optimizer's state: there Megatron has one optimizer for all weights, elsewhere one of
its own for the experts. (Weights go between all sizes: test_checkpoint.py.)
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.helpers.launch import RankPool
from tests.helpers.megatron_experts import metadata, module_of, run_with

pytest.importorskip("megatron.core")
pytest.importorskip("psutil")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")

Ranks = Callable[[int], RankPool]
Curve = list[tuple[float, float]]
BEFORE, AFTER = 2, 3  # steps


class RankLocation(NamedTuple):
    """Whose experts, and over how many ranks: EP and expert-TP size."""

    kind: str
    ep: int
    etp: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        return {"expert": self.ep, "expert_tensor": self.etp}


class Journey(NamedTuple):
    """Where it starts, through what it goes, and how: with the distributed optimizer, a tensor for each expert, other
    fields of TransformerConfig."""

    start: RankLocation
    stops: list[RankLocation]
    distributed: bool = False
    singleton: bool = False
    sharding: str = "fully_reshardable"
    config: Mapping[str, Any] = {}


OURS = {ep: RankLocation("ours", ep) for ep in (1, 2, 4)}
SEQUENTIAL = {ep: RankLocation("sequential", ep) for ep in (1, 2, 4)}
# Two experts over four ranks: the width of each is cut in two.
CUT = {kind: RankLocation(kind, 2, 2) for kind in ("ours", "sequential")}
TWO_EXPERTS = {"num_moe_experts": 2}
JOURNEYS = {
    "EP1": Journey(OURS[1], [SEQUENTIAL[1]], singleton=True),
    "EP2-distributed": Journey(OURS[2], [SEQUENTIAL[2], SEQUENTIAL[4], OURS[4]], distributed=True, singleton=True),
    "biases": Journey(OURS[2], [SEQUENTIAL[2], OURS[4]], config={"add_bias_linear": True}),
    "biases-distributed": Journey(SEQUENTIAL[2], [OURS[2]], distributed=True, config={"add_bias_linear": True}),
    "EP4": Journey(OURS[4], [SEQUENTIAL[2], SEQUENTIAL[4]]),
    "SequentialMLP-EP1-distributed": Journey(SEQUENTIAL[1], [OURS[1], SEQUENTIAL[1]], distributed=True),
    "SequentialMLP-EP2": Journey(SEQUENTIAL[2], [OURS[2], OURS[4]], singleton=True),
    "SequentialMLP-EP4-distributed": Journey(SEQUENTIAL[4], [OURS[2], OURS[4]], distributed=True),
    "cut-distributed": Journey(
        CUT["ours"], [CUT["sequential"], OURS[2], SEQUENTIAL[2]], distributed=True, config=TWO_EXPERTS
    ),
    "cut": Journey(CUT["sequential"], [CUT["ours"], OURS[2]], singleton=True, config=TWO_EXPERTS),
    # Each rank's buffer as it is: for the same experts on the same ranks, of other data-parallel ones.
    "dp-reshardable": Journey(OURS[2], [OURS[2]], distributed=True, sharding="dp_reshardable"),
}


SLOW = ("cut-distributed",)


def travel(rank: int, folder: Path, journey: Journey) -> tuple[Curve, dict[RankLocation, Curve]]:
    """(the curve of going on at the start, the same after each stop)."""
    from tests.helpers.megatron_training import parallel_state

    with parallel_state(**journey.start.sizes):
        run = run_with(journey.start.kind, distributed=journey.distributed, **journey.config)
        train(run, BEFORE)
        save(run, folder / "start", journey)
        stayed = train(run, AFTER)
    for place in journey.stops:
        with parallel_state(**place.sizes):
            run = run_with(place.kind, seed=1, distributed=journey.distributed, **journey.config)
            load(run, folder / "start", journey)
            save(run, folder_of(folder, place), journey)
    with parallel_state(**journey.start.sizes):
        return stayed, {place: resume(journey, journey.start, folder_of(folder, place)) for place in journey.stops}


def resume(journey: Journey, place: RankLocation, folder: Path) -> Curve:
    """What a run at `place` does with a checkpoint, from other weights; inside parallel_state."""
    run = run_with(place.kind, seed=1, distributed=journey.distributed, **journey.config)
    load(run, folder, journey)
    run.seed, run.steps_done = 0, BEFORE  # the same data as the first run had
    return train(run, AFTER)


def train(run: Any, steps: int) -> Curve:
    return [(step.loss, step.grad_norm) for step in run.train(steps)]


def folder_of(folder: Path, place: RankLocation) -> Path:
    return folder / f"{place.kind}-{place.ep}-{place.etp}"


def save(run: Any, folder: Path, journey: Journey) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(sharded(run, journey, is_loading=False), str(folder))


def load(run: Any, folder: Path, journey: Journey) -> None:
    from megatron.core import dist_checkpointing

    state: Any = dist_checkpointing.load(sharded(run, journey, is_loading=True), str(folder))
    module_of(run).load_state_dict(state["model"])
    with torch.no_grad():  # Megatron forgets it for dp_reshardable, where it is the fp32 weights that are written
        run.optimizer.load_state_dict(state["optimizer"])


def sharded(run: Any, journey: Journey, *, is_loading: bool) -> dict[str, Any]:
    options = metadata(journey.singleton, journey.sharding)
    model = module_of(run).sharded_state_dict(metadata=options)
    optimizer = run.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=options)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    "journey",
    [pytest.param(each, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, each in JOURNEYS.items()],
)
def test_training_goes_on_bitwise(ranks: Ranks, tmp_path: Path, journey: Journey) -> None:
    for stayed, resumed in ranks(4).run(travel, tmp_path, journey):
        assert resumed == dict.fromkeys(journey.stops, stayed)


def change_over(rank: int, folder: Path, journey: Journey) -> tuple[Curve, dict[RankLocation, Curve]]:
    """(the curve of going on at the start, what each stop makes of the same checkpoint)."""
    from tests.helpers.megatron_training import parallel_state

    with parallel_state(**journey.start.sizes):
        run = run_with(journey.start.kind, distributed=journey.distributed, **journey.config)
        train(run, BEFORE)
        save(run, folder / "start", journey)
        stayed = train(run, AFTER)
    resumed = {}
    for place in journey.stops:
        with parallel_state(**place.sizes):
            resumed[place] = resume(journey, place, folder / "start")
    return stayed, resumed


@pytest.mark.parametrize(
    "journey",
    [
        Journey(SEQUENTIAL[2], [OURS[4]], distributed=True),
        Journey(OURS[4], [SEQUENTIAL[2]]),
        pytest.param(
            Journey(CUT["ours"], [CUT["sequential"]], distributed=True, config=TWO_EXPERTS), marks=pytest.mark.slow
        ),
    ],
    ids=["to ours", "from ours", "from ours, cut"],
)
def test_training_goes_on_in_the_other_implementation(ranks: Ranks, tmp_path: Path, journey: Journey) -> None:
    for stayed, resumed in ranks(4).run(change_over, tmp_path, journey):
        for curve in resumed.values():
            for step, wanted in zip(curve, stayed, strict=True):
                assert step == pytest.approx(wanted, abs=1e-5)


def leave_ep1(rank: int, folder: Path, kind: str) -> None:
    from tests.helpers.megatron_training import parallel_state

    journey = Journey(RankLocation(kind, 1), [])
    with parallel_state(expert=1):
        run = run_with(kind)
        train(run, 1)
        save(run, folder / "start", journey)
    with parallel_state(expert=2), pytest.raises(RuntimeError, match="Expected 2 entries"):
        load(run_with(kind), folder / "start", journey)


@pytest.mark.parametrize("kind", ["ours", "sequential"])
def test_optimizer_state_of_ep1_is_not_loaded_elsewhere(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    ranks(2).run(leave_ep1, tmp_path, kind)
