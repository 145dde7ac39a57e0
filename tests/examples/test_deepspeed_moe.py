"""examples/deepspeed_moe.py: DeepSpeed's MoE layer and ours learn the same, once as DeepSpeed's launcher starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed_moe
from tests.helpers.programs import ROOT, run_program

pytest.importorskip("deepspeed")
PROGRAM = "examples/deepspeed_moe.py"


def flags_of(tmp_path: Path, *flags: str) -> tuple[str, ...]:
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"part_{number}.txt").write_text(f"{number} times {number} is {number * number}; " * 20)
    return "--steps", "4", "--seq", "16", "--batch", "8", "--text", str(tmp_path / "text"), *flags


def table_in(lines: list[str]) -> list[list[float]]:
    split = [line.split() for line in lines]
    return [[float(value) for value in line] for line in split if len(line) == 7 and line[0].isdigit()]


def check(table: list[list[float]]) -> None:
    assert [int(row[0]) for row in table] == [1, 2, 3, 4]
    for _, loss, our_loss, norm, our_norm, *_ in table:
        assert our_loss == pytest.approx(loss, abs=1e-5)
        assert our_norm == pytest.approx(norm, abs=2e-5)
    assert table[-1][1] < table[0][1]


@pytest.mark.slow
def test_stock_and_ours_side_by_side(tmp_path: Path) -> None:
    check(table_in(run_program(PROGRAM, *flags_of(tmp_path, "--zero", "1"), processes=2)))


@pytest.mark.slow
def test_stock_and_ours_side_by_side_under_the_deepspeed_launcher(tmp_path: Path) -> None:
    launcher = "deepspeed", "--num_gpus", "2", "--master_port", "29731"
    done = subprocess.run(
        [*launcher, str(ROOT / PROGRAM), *flags_of(tmp_path, "--zero", "2")],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    check(table_in(done.stdout.splitlines()))


@pytest.mark.slow
def test_a_qwen3_moe_of_hugging_face_through_autoep(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    flags = "--model", "qwen3-moe", "--zero", "3", "--layers", "1"
    check(table_in(run_program(PROGRAM, *flags_of(tmp_path, *flags), processes=2)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--zero", "3"), "--zero 3 is for AutoEP: take --model qwen3-moe"),
        (("--ep-size", "3"), "--ep-size 3 divides not both 1 processes and the 16 experts of --config tiny"),
        (("--config", "none"), "none"),
        ((), "start it with python -m torch.distributed.run .* examples/deepspeed_moe.py"),
    ],
)
def test_what_cannot_run_is_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        deepspeed_moe.main(flags)


def test_what_counts_something_is_at_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--ep-size", "--seq"):
        with pytest.raises(SystemExit):
            deepspeed_moe.main((flag, "0"))
        assert f"{flag}: 0 must be at least 1" in capsys.readouterr().err
