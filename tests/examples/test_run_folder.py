"""Which checkpoint a run goes on from, and what is left of its records."""

import json
import os
from pathlib import Path

import pytest
import torch

from options import Options, moe_config
from parallel import form_groups
from run_folder import RunFolder, checkpoints_to_resume, read_metrics, save_checkpoint


def add_checkpoints(run: Path, *names: str) -> None:
    for name in names:
        (run / "checkpoints" / name).mkdir(parents=True)


def test_the_newest_finished_checkpoint(tmp_path: Path) -> None:
    add_checkpoints(tmp_path, "step_000005", "step_000010", "step_000015.partial")
    assert [folder.name for folder in checkpoints_to_resume(tmp_path, 20)] == ["step_000010", "step_000005"]


def test_steps_are_numbers(tmp_path: Path) -> None:
    add_checkpoints(tmp_path, "step_999900", "step_1000000")
    assert checkpoints_to_resume(tmp_path, 2_000_000)[0].name == "step_1000000"


def test_nothing_to_resume(tmp_path: Path) -> None:
    add_checkpoints(tmp_path, "step_000015.partial")
    with pytest.raises(ValueError, match="holds no finished checkpoint"):
        checkpoints_to_resume(tmp_path, 20)
    add_checkpoints(tmp_path, "step_000020")
    with pytest.raises(ValueError, match="at step 20 of 20: nothing is left to do; give more --steps"):
        checkpoints_to_resume(tmp_path, 20)


def test_files_of_a_checkpoint_that_was_cut_short_do_not_stay(tmp_path: Path) -> None:
    """They may be of ranks that there no longer are."""
    add_checkpoints(tmp_path, "step_000003.partial")
    (tmp_path / "checkpoints" / "step_000003.partial" / "__2_0.distcp").write_text("of rank 2")
    model = torch.nn.Linear(2, 2)
    save_checkpoint(tmp_path, form_groups(torch.device("cpu"), 1), model, torch.optim.SGD(model.parameters()), 3)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    assert folder.name == "step_000003"
    assert sorted(path.name for path in folder.glob("*.distcp")) == ["__0_0.distcp"]


def test_reopening_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    lines = [json.dumps({"kind": "train", "step": step}) for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "train", "st')
    run = RunFolder(tmp_path, writes=True)
    assert run.lock() is None
    run.open(Options(), moe_config(Options()), world_size=1, step=3)
    run.log({"kind": "train", "step": 4, "loss": 1.0})
    run.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", writes=False)
    assert run.lock() is None
    run.open(Options(), moe_config(Options()), world_size=2, step=0)
    run.log({"kind": "train", "step": 1, "loss": 1.0})
    run.close()
    assert not (tmp_path / "run").exists()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    first, second = (RunFolder(tmp_path / "run", writes=True) for _ in range(2))
    assert first.lock() is None
    problem = second.lock()
    assert problem is not None
    assert f"run is being written by process {os.getpid()} on " in problem
    assert "give another --run-dir" in problem
    first.open(Options(), moe_config(Options()), world_size=1, step=0)
    first.close()
    assert second.lock() is None
    second.close()
