"""Ranks in different calls all raise the same error, at once, and the group works on: over gloo, and as over NCCL."""

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, Routing, TransportConfig, checkpoint
from sonic_ep.dispatch.symmetric_buffers import PeerBuffers
from sonic_ep.groups import LostRankError, frames
from sonic_ep.groups.frames import FRAME_BYTES, FRAME_INTS, IN_ANOTHER_CALL, Frame, problem_with_splits
from sonic_ep.groups.lost_ranks import Collective
from sonic_ep.kernels.route.status.reference import HEADER, STATUS
from tests.helpers.launch import RankPool
from tests.helpers.shared_files import shared_files

Ranks = Callable[[int], RankPool]
LONG = 600.0  # a limit that no test reaches
IN_TIME = 20.0  # seconds in which an error comes that needs no limit


def config_of(E: int = 8, *, timeout: float = LONG) -> MoEConfig:
    rounding, transport = RoundingConfig(mode="off"), TransportConfig(timeout=timeout)
    return MoEConfig(d=8, n=4, E=E, K=2, rounding=rounding, transport=transport)


def rows(rank: int) -> Tensor:
    return torch.randn(10 + rank, 8, generator=torch.Generator().manual_seed(rank))


def pairs(group: EPGroup) -> object:
    ids = torch.tensor([0])
    return Routing.from_pairs(ids, ids, torch.ones(1), num_tokens=1, E=8, group=group)


def step(layers: list[MoE], rank: int) -> list[Tensor]:
    grads = []
    for layer in layers:
        layer.zero_grad()
        y = layer(rows(rank)).y
        y.square().sum().backward()
        grads += [y.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]
    return grads


CALLS = {
    "counts of layer": lambda layers, folder: layers[0](rows(0)),
    "counts of layer, wide": lambda layers, folder: layers[1](rows(0)),
    "order of backwards of layer": lambda layers, folder: None,  # see `act`
    "construction of layer": lambda layers, folder: MoE(layers[0].config, layers[0].group, seed=0),
    "Routing.from_pairs": lambda layers, folder: pairs(layers[0].group),
    "checkpoint": lambda layers, folder: checkpoint.save(folder / "new", layers[0]),
    "checkpoint, load": lambda layers, folder: checkpoint.load(folder / "saved", layers[0]),
    "an all-reduce": lambda layers, folder: layers[0].group.all_reduce(torch.ones(8, dtype=torch.int64)),
}


def act(name: str, layers: list[MoE], folder: Path, y: Tensor) -> str:
    try:
        y.sum().backward() if name.startswith("order") else CALLS[name](layers, folder)
    except ValueError as error:
        return str(error)
    return "nothing"


def in_two_calls(rank: int, name: str, other: str, folder: Path) -> tuple[str, bool, float]:
    """What a rank raises where the last one makes the other call; whether a step then is as before; and seconds."""
    group = EPGroup()
    layers = [MoE(config_of(E), group, seed=0) for E in (8, 16)]
    checkpoint.save(folder / "saved", layers[0])
    before, y, begun = step(layers, rank), layers[0](rows(rank)).y, time.monotonic()
    message = act(other if rank == group.size - 1 else name, layers, folder, y)
    took, after = time.monotonic() - begun, step(layers, rank)
    return message, all(map(torch.equal, before, after)), took


@pytest.mark.parametrize(("name", "other"), [*itertools.combinations(CALLS, 2)])
def test_all_raise_the_same_error_at_once_and_work_on(ranks: Ranks, name: str, other: str, tmp_path: Path) -> None:
    results = ranks(2).run(in_two_calls, name, other, tmp_path)
    assert [restored for _, restored, _ in results] == [True, True]
    assert max(took for *_, took in results) < IN_TIME
    (message, *_), (second, *_) = results
    assert message == second
    assert "of the EP group" in message
    for rank, each in enumerate((name, other)):
        assert f"rank {rank}" in message
        assert each.partition(",")[0] in message


def test_four_ranks_are_named(ranks: Ranks, tmp_path: Path) -> None:
    for message, restored, _ in ranks(4).run(in_two_calls, "counts of layer", "checkpoint", tmp_path):
        assert restored
        assert message.startswith(
            "the ranks of the EP group are in different calls: ranks 0, 1 and 2 in counts of layer "
        )
        assert "; rank 3 in checkpoint; call layers, their backwards, constructions and checkpoints in the" in message


def in_two_threads(rank: int, same_layer: bool) -> tuple[list[str], float, str]:
    """What two threads of a rank raise, that each run steps of a layer, or of the same with other numbers of tokens."""
    group = EPGroup()
    layers = [MoE(config_of(E, timeout=30.0), group, seed=0) for E in (8, 16)]
    step(layers, rank)
    raised, begun = [], time.monotonic()

    def steps(number: int) -> None:
        try:
            for again in range(30):
                time.sleep(0.001 * ((rank + number + again) % 3))
                layers[0 if same_layer else number](torch.randn(10 + 20 * number, 8)).y.sum().backward()
        except (ValueError, RuntimeError) as error:
            raised.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=steps, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - begun
    try:
        step(layers, rank)
    except (ValueError, RuntimeError) as error:
        return raised, took, f"{type(error).__name__}: {error}"
    return raised, took, "a step"


@pytest.mark.parametrize("same_layer", [False, True])
def test_two_threads_on_one_group_end_no_process(same_layer: bool) -> None:
    """Which of the three errors comes, and in how many threads, is a matter of luck: different calls, backwards in
    different orders, or a LostRankError, after which the group is of no more use."""
    with RankPool(2) as pool:
        for raised, took, after in pool.run(in_two_threads, same_layer):
            assert took < 60
            assert 1 <= len(raised) <= 2
            assert all("the ranks of the EP group " in text and "different" in text for text in raised), raised
            assert after == "a step" or any(text.startswith("LostRankError") for text in raised)


def long_values(rank: int) -> None:
    """More than fits into a frame."""
    group = EPGroup()
    values = torch.arange(2 * FRAME_INTS) + rank
    assert torch.equal(group.all_gather(values), torch.stack([torch.arange(2 * FRAME_INTS) + r for r in range(2)]))
    texts = ["x" * size for size in (3 * FRAME_BYTES, 5)]
    assert group.all_gather_object(texts[rank]) == texts
    assert group.all_gather(torch.tensor(rank == 1)).tolist() == [False, True]
    assert group.all_gather(torch.empty(0, 3)).shape == (2, 0, 3)
    assert group.all_gather(values, used=3).tolist() == [[0, 1, 2], [1, 2, 3]]
    assert group.all_reduce(torch.tensor([rank, 0.5])).tolist() == [1, 1]


def test_values_that_are_longer_than_a_frame(ranks: Ranks) -> None:
    ranks(2).run(long_values)


def test_a_frame_is_known_from_counts_by_the_status_word() -> None:
    collective = Collective(7, "a stage", 3, True)
    frame = Frame(collective, 24, 24, 5, True)
    packed = frame.packed(torch.arange(24, dtype=torch.uint8))
    assert packed.shape == (FRAME_BYTES,)
    assert packed.view(torch.int64)[STATUS] == IN_ANOTHER_CALL
    assert Frame.unpacked(packed) == frame
    assert FRAME_INTS == HEADER + 1024
    assert Frame.unpacked(torch.ones(FRAME_INTS, dtype=torch.int64).view(torch.uint8)) is None
    (found,) = frames.inline_parts(packed[None], frame).parts or []
    assert found.tolist() == [*range(24)]


def test_all_to_alls_that_do_not_fit_together() -> None:
    fits = [[1, 2, 1, 3, 8], [3, 4, 2, 4, 8]]
    assert problem_with_splits(fits, "lists") is None
    problem = problem_with_splits([fits[0], [3, 4, 1, 4, 8]], "lists of layer 1")
    assert problem is not None
    assert "calls of lists of layer 1: rank 0 sends 2 rows to rank 1, which expects 1; call layers" in problem
    problem = problem_with_splits([fits[0], [*fits[1][:-1], 4]], "lists")
    assert problem is not None
    assert "rows of different sizes in lists: [8, 4] bytes by rank" in problem


def as_over_nccl() -> ExitStack:
    """A context in which collectives go to torch.distributed as those over NCCL do, by the sizes that those have."""
    stack = ExitStack()
    stack.enter_context(patch.object(EPGroup, "_is_over_gloo", lambda *_: False))
    return stack


def in_two_calls_as_over_nccl(rank: int, name: str, other: str, folder: Path) -> tuple[str, bool, float]:
    with as_over_nccl():
        return in_two_calls(rank, name, other, folder)


@pytest.mark.parametrize(
    ("name", "other", "wanted"),
    [
        ("counts of layer", "counts of layer, wide", ("different MoE layers, counted as they were built (rank 0: ",)),
        ("counts of layer", "checkpoint", ("rank 0 in the counts of a layer; rank 1 in ",)),
        ("construction of layer", "counts of layer, wide", ("; rank 1 in the counts of a layer; call", "rank 0 in ")),
        ("construction of layer", "checkpoint", ("rank 0 in construction of layer ", "; rank 1 in checkpoint; call")),
    ],
)
def test_as_over_nccl(ranks: Ranks, name: str, other: str, wanted: tuple[str, ...], tmp_path: Path) -> None:
    for message, restored, took in ranks(2).run(in_two_calls_as_over_nccl, name, other, tmp_path):
        assert restored
        assert took < IN_TIME
        assert all(part in message for part in wanted) or (
            "rank 1 in the counts of a layer; rank 0 in none, but in a construction" in message
        ), message


def counts_on_gpus(rank: int, name: str, other: str, folder: Path, kind: str) -> tuple[str, bool]:
    """As `in_two_calls`, on GPUs."""
    group, dtype = EPGroup(), torch.bfloat16
    transport = TransportConfig(kind=kind, timeout=20.0)  # type: ignore[arg-type]
    configs = [MoEConfig(d=64, n=32, E=E, K=2, transport=transport) for E in (8, 16)]
    layers = [MoE(config, group, seed=0, device="cuda", dtype=dtype) for config in configs]
    x = torch.randn(20, 64, device="cuda", dtype=dtype)

    def steps() -> Tensor:
        ys = [layer(x).y for layer in layers]
        torch.stack(ys).float().sum().backward()
        return torch.stack(ys).detach()

    calls = {
        "a layer": lambda: layers[0](x),
        "another": lambda: layers[1](x),
        "save": lambda: checkpoint.save(folder, layers[0]),
    }
    before, message = steps(), ""
    try:
        calls[other if rank == 1 else name]()
    except ValueError as error:
        message = str(error)
    return message, torch.equal(before, steps())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["all_to_all", "symmetric"])
def test_layers_of_other_sizes_on_gpus(gpus: Ranks, kind: str, tmp_path: Path) -> None:
    for message, restored in gpus(2).run(counts_on_gpus, "a layer", "another", tmp_path, kind):
        assert "different MoE layers, counted as they were built (rank 0: number " in message
        assert restored


@pytest.mark.gpu
def test_a_save_and_a_forward_over_nccl_alone(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 CUDA devices, there are {torch.cuda.device_count()}")
    with RankPool(2, "nccl") as pool:
        for message, restored in pool.run(counts_on_gpus, "a layer", "save", tmp_path, "all_to_all"):
            assert "the ranks of the EP group are in different calls: " in message
            assert restored


def sizes_of_counts(rank: int, folder: str) -> list[int]:
    buffers = PeerBuffers(EPGroup(), shared_files(EPGroup(), folder))
    return [buffers.counts(needed)[0] for needed in (12, 20, FRAME_INTS, FRAME_INTS + 1)]


def test_memory_of_counts_is_of_one_size_for_most_layers(ranks: Ranks, tmp_path: Path) -> None:
    """To make it larger is a collective, which one rank would enter alone where layers are crossed."""
    assert ranks(2).run(sizes_of_counts, str(tmp_path)) == [[FRAME_INTS] * 3 + [FRAME_INTS + 1]] * 2


def goes_on_elsewhere(rank: int) -> tuple[str, float]:
    """Rank 1 fails in the middle of a step and goes on with the next one."""
    layer = MoE(config_of(), EPGroup(), seed=0)
    step([layer], rank)
    begun = time.monotonic()
    try:
        if rank == 1:
            with patch.object(EPGroup, "all_to_all", side_effect=MemoryError), pytest.raises(MemoryError):
                layer(rows(rank))
        layer(rows(rank))
    except LostRankError as error:
        return str(error), time.monotonic() - begun
    return "nothing", 0.0


def test_a_rank_that_left_a_step_in_its_middle_is_found_before_the_timeout() -> None:
    with RankPool(2) as pool:
        for message, took in pool.run(goes_on_elsewhere):
            assert message.startswith("the ranks of the EP group were in different collectives: ")
            assert "rank 0 waited in lists of layer 1 (collective " in message
            assert "rank 1 waited in counts of layer 1 (collective " in message
            assert took < IN_TIME


def in_two_groups(rank: int) -> str:
    """Two groups of the same ranks. Rank 1 runs the backwards of their layers in another order."""
    groups = [EPGroup(), EPGroup(dist.new_group([0, 1]))]
    sums = [MoE(config_of(timeout=3.0), group, seed=0)(rows(rank)).y.sum() for group in groups]
    try:
        for each in reversed(sums) if rank == 1 else sums:
            each.backward()
    except LostRankError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_waits_in_another_group_is_not_called_dead() -> None:
    with RankPool(2) as pool:
        for rank, message in enumerate(pool.run(in_two_groups)):
            assert message.startswith(
                f"rank {1 - rank} of the EP group did not come to order of backwards of layer 1 in backward: "
                f"rank {1 - rank} waited in order of backwards of layer 1 in backward of process group "
            )
            assert "died" not in message
            assert "in the same order on every rank" in message
