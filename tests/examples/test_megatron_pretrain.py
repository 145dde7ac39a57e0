"""examples/megatron_pretrain.py as a user starts it: Megatron-Core's MoE layer and ours learn the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_pretrain

pytest.importorskip("megatron.core")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron_pretrain.py"
SMALL = ("--steps", "4", "--seq", "16", "--hidden", "32", "--expert-width", "16", "--experts", "8", "--top-k", "2")


@pytest.mark.slow
def test_stock_and_ours_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"part_{number}.txt").write_text(f"{number} times {number} is {number * number}; " * 20)
    data = tmp_path / "data"
    flags = (*SMALL, "--ep-size", "2", "--text", str(tmp_path / "text"), "--data-dir", str(data))
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(EXAMPLE), *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    table = [[float(value) for value in line] for line in lines if len(line) == 7 and line[0].isdigit()]
    assert [int(row[0]) for row in table] == [1, 2, 3, 4]
    for _, loss, our_loss, norm, our_norm, *_ in table:
        assert our_loss == pytest.approx(loss, abs=1e-5)
        assert our_norm == pytest.approx(norm, abs=2e-5)
    assert table[-1][1] < table[0][1]
    assert len(list(data.glob("text-*.idx"))) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batch", "7"), "--batch 7 is not a multiple of 1 processes times --micro-batch 2; take --batch 2"),
        (("--ep-size", "3"), "--ep-size 3 divides not both 1 processes and --experts 8"),
        ((), "start it with python -m torch.distributed.run .* examples/megatron_pretrain.py"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        megatron_pretrain.main([*SMALL, *flags])
