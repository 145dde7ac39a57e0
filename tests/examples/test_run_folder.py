"""Which checkpoint a run goes on from, and what is left of its records."""

import json
from pathlib import Path

import pytest

from options import Options, moe_config
from run_folder import RunFolder, checkpoint_to_resume, read_metrics


def add_checkpoints(run: Path, *names: str) -> None:
    for name in names:
        (run / "checkpoints" / name).mkdir(parents=True)


def test_the_newest_finished_checkpoint(tmp_path: Path) -> None:
    add_checkpoints(tmp_path, "step_000005", "step_000010", "step_000015.partial")
    assert checkpoint_to_resume(tmp_path, 20).name == "step_000010"


def test_steps_are_numbers(tmp_path: Path) -> None:
    add_checkpoints(tmp_path, "step_999900", "step_1000000")
    assert checkpoint_to_resume(tmp_path, 2_000_000).name == "step_1000000"


def test_nothing_to_resume(tmp_path: Path) -> None:
    add_checkpoints(tmp_path, "step_000015.partial")
    with pytest.raises(ValueError, match="holds no finished checkpoint"):
        checkpoint_to_resume(tmp_path, 20)
    add_checkpoints(tmp_path, "step_000020")
    with pytest.raises(ValueError, match="at step 20 of 20: nothing is left to do; give more --steps"):
        checkpoint_to_resume(tmp_path, 20)


def test_reopening_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    lines = [json.dumps({"kind": "train", "step": step}) for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "train", "st')
    run = RunFolder(tmp_path, writes=True)
    run.open(Options(), moe_config(Options()), world_size=1, step=3)
    run.log({"kind": "train", "step": 4, "loss": 1.0})
    run.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", writes=False)
    run.open(Options(), moe_config(Options()), world_size=2, step=0)
    run.log({"kind": "train", "step": 1, "loss": 1.0})
    run.close()
    assert not (tmp_path / "run").exists()
