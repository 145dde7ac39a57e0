"""examples/deepspeed_moe.py as a user starts it: DeepSpeed's MoE layer and ours learn the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import deepspeed_moe

pytest.importorskip("deepspeed")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "deepspeed_moe.py"


def run(tmp_path: Path, *command: str, flags: tuple[str, ...]) -> list[list[float]]:
    """The table that it prints."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"part_{number}.txt").write_text(f"{number} times {number} is {number * number}; " * 20)
    small = ("--steps", "4", "--seq", "16", "--batch", "8", "--text", str(tmp_path / "text"))
    done = subprocess.run(
        [*command, str(EXAMPLE), *small, *flags],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(EXAMPLE.parents[1]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return [[float(value) for value in line] for line in lines if len(line) == 7 and line[0].isdigit()]


def check(table: list[list[float]]) -> None:
    assert [int(row[0]) for row in table] == [1, 2, 3, 4]
    for _, loss, our_loss, norm, our_norm, *_ in table:
        assert our_loss == pytest.approx(loss, abs=1e-5)
        assert our_norm == pytest.approx(norm, abs=2e-5)
    assert table[-1][1] < table[0][1]


@pytest.mark.slow
def test_stock_and_ours_side_by_side_under_torchrun(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    check(run(tmp_path, *torchrun, flags=("--zero", "1")))


@pytest.mark.slow
def test_stock_and_ours_side_by_side_under_the_deepspeed_launcher(tmp_path: Path) -> None:
    check(run(tmp_path, "deepspeed", "--num_gpus", "2", "--master_port", "29731", flags=("--zero", "2")))


@pytest.mark.slow
def test_a_qwen3_moe_of_hugging_face_through_autoep(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    check(run(tmp_path, *torchrun, flags=("--model", "qwen3-moe", "--zero", "3", "--layers", "1")))


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
