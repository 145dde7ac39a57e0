"""DeepSpeed's checkpoints: ours resume bitwise, DeepSpeed's load into ours and the reverse, and optimizer states of
another ep_size are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.launch import RankPool

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
WEIGHTS_ALONE = {"load_optimizer_states": False, "load_lr_scheduler_states": False}


def started(
    rank: int, ours: bool, zero: int, ep_size: int, dtype: torch.dtype = torch.float32, **arguments: Any
) -> Any:
    """A fresh engine, with weights unlike those of another seed."""
    from tests.helpers.deepspeed_cpu import engine
    from tests.helpers.deepspeed_moe import Model, scatter_experts

    model = Model(ours, ep_size=ep_size, k=2, **arguments)
    scatter_experts(model, rank % ep_size)
    return engine(model, zero=zero, dtype=dtype)


def steps(run: Any, rank: int, first: int, count: int) -> list[tuple[float, ...]]:
    from tests.helpers.deepspeed_cpu import train
    from tests.helpers.deepspeed_moe import batches, loss_of

    dtype = next(run.module.parameters()).dtype
    return [tuple(step) for step in train(run, [x.to(dtype) for x in batches(rank, count, start=first)], loss_of)]


def resume(rank: int, folder: str, zero: int, ep_size: int, dtype: torch.dtype) -> tuple[Any, Any, bool]:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        run = started(rank, True, zero, ep_size, dtype, use_residual=True)
        steps(run, rank, 0, 3)
        run.save_checkpoint(folder)
        wanted, weights = steps(run, rank, 3, 3), run.module.state_dict()
    with deepspeed_world():
        again = started(rank, True, zero, ep_size, dtype, use_residual=True, seed=5)
        again.load_checkpoint(folder)
        got = steps(again, rank, 3, 3)
        state = again.module.state_dict()
        return wanted, got, all(torch.equal(state[key], value) for key, value in weights.items())


@pytest.mark.parametrize(
    ("size", "zero", "ep_size", "dtype"),
    [
        (2, 0, 2, torch.float32),
        (2, 1, 1, torch.float32),
        (2, 2, 2, torch.bfloat16),
        (4, 1, 2, torch.bfloat16),
        (4, 2, 2, torch.float32),
    ],
)
def test_resumed_training_goes_on_bitwise(
    ranks: Ranks, tmp_path: Path, size: int, zero: int, ep_size: int, dtype: torch.dtype
) -> None:
    for wanted, got, same in ranks(size).run(resume, str(tmp_path), zero, ep_size, dtype, timeout=300):
        assert got == wanted
        assert same


def move(rank: int, folder: str, zero: int, from_ours: bool, to_ours: bool, from_ep: int, to_ep: int) -> Any:
    """Losses of the saved model and of what loaded its weights, and the keys of all files, by rank 0."""
    from tests.helpers.deepspeed_cpu import deepspeed_world
    from tests.helpers.deepspeed_moe import batches, loss_of

    batch, losses = batches(rank, 1, start=50)[0], []
    with deepspeed_world():
        run = started(rank, from_ours, zero, from_ep, use_residual=True)
        steps(run, rank, 0, 2)
        run.save_checkpoint(folder)
        losses.append(float(loss_of(run, batch)))
    with deepspeed_world():
        run = started(rank, to_ours, zero, to_ep, use_residual=True, seed=5)
        run.load_checkpoint(folder, **WEIGHTS_ALONE)
        losses.append(float(loss_of(run, batch)))
        steps(run, rank, 2, 1)
    return losses


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(("from_ours", "to_ours"), [(False, True), (True, False), (True, True)])
def test_weights_move_between_deepspeeds_layer_and_ours(
    ranks: Ranks, tmp_path: Path, zero: int, from_ours: bool, to_ours: bool
) -> None:
    for sizes in ((2, 2), (2, 1)) if zero == 1 else ((2, 2),):
        folder = str(tmp_path / f"{sizes[0]}-{sizes[1]}")
        for saved, loaded in ranks(2).run(move, folder, zero, from_ours, to_ours, *sizes, timeout=300):
            assert loaded == pytest.approx(saved, abs=1e-6)


def files(rank: int, folder: str, ours: bool) -> Any:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        run = started(rank, ours, 1, 2, use_residual=True)
        run.save_checkpoint(folder, tag="t")
    described = {}
    for path in sorted(Path(folder, "t").glob("*model_states.pt")):
        loaded = torch.load(path, weights_only=False)
        state = loaded.get("module", loaded)
        described[path.name] = {key: (value.shape, value.stride()) for key, value in state.items()}
    return described


def test_the_files_are_deepspeeds_own(ranks: Ranks, tmp_path: Path) -> None:
    own, stock = (ranks(2).run(files, str(tmp_path / str(ours)), ours)[0] for ours in (True, False))
    assert len(own) == 1 + 2 * 8  # two layers of eight experts
    assert own == stock


def other_ep_size(rank: int, folder: str, zero: int, dtype: torch.dtype, sizes: tuple[int, int]) -> str:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        run = started(rank, True, zero, sizes[0], dtype)
        steps(run, rank, 0, 2)
        run.save_checkpoint(folder)
    with deepspeed_world():
        run = started(rank, True, zero, sizes[1], dtype)
        try:
            run.load_checkpoint(folder)
        except ValueError as error:
            return str(error)
        return "loaded"


@pytest.mark.parametrize(
    ("size", "zero", "dtype", "sizes"),
    [
        (2, 0, torch.float32, (2, 1)),
        (2, 0, torch.bfloat16, (2, 1)),
        (2, 1, torch.float32, (2, 1)),
        (2, 2, torch.bfloat16, (1, 2)),
        (4, 1, torch.bfloat16, (2, 4)),
    ],
)
def test_optimizer_states_of_another_ep_size_are_refused(
    ranks: Ranks, tmp_path: Path, size: int, zero: int, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    for message in ranks(size).run(other_ep_size, str(tmp_path), zero, dtype, sizes):
        assert f"['ep_size_{sizes[0]}'], this engine has ['ep_size_{sizes[1]}']" in message
        assert "load_optimizer_states=False" in message


def swapped_ep_sizes(rank: int, folder: str, zero: int) -> str:
    from tests.helpers.deepspeed_cpu import deepspeed_world, engine
    from tests.helpers.deepspeed_moe import Model

    with deepspeed_world():
        run = engine(Model(True, ep_size=(1, 2), k=2), zero=zero)
        steps(run, rank, 0, 2)
        run.save_checkpoint(folder)
        engine(Model(True, ep_size=(1, 2), k=2), zero=zero).load_checkpoint(folder)
        try:
            engine(Model(True, ep_size=(2, 1), k=2), zero=zero).load_checkpoint(folder)
        except ValueError as error:
            return str(error)
        return "loaded"


@pytest.mark.parametrize("zero", [0, 1])
def test_layers_that_change_ep_size_among_each_other_are_found(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    for message in ranks(2).run(swapped_ep_sizes, str(tmp_path), zero):
        assert "layers have ep_size [1, 2], in their order, this model's have [2, 1]" in message


def foreign_states(rank: int, folder: str, zero: int) -> str:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        run = started(rank, False, zero, 2)
        steps(run, rank, 0, 2)
        run.save_checkpoint(folder)
    with deepspeed_world():
        run = started(rank, True, zero, 2)
        try:
            run.load_checkpoint(folder)
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "loaded"


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_optimizer_states_of_deepspeeds_layer_are_refused(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    for message in ranks(2).run(foreign_states, str(tmp_path), zero):
        assert message != "loaded"
