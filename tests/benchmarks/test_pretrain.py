"""benchmarks/pretrain.py on the CPU: contestants take turns and learn, on one rank and across two."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--shape", "tiny", "--layers", "1", "--tokens", "64", "--length", "32", "--rounds", "1"]


def run(launcher: list[str], out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, *launcher, "benchmarks/pretrain.py", *TINY, "--seconds", "0.1", "--no-compile", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--out", str(out)], check=True, cwd=ROOT, env=environment, timeout=300)
    return json.loads(out.read_text())["contestants"]


@pytest.mark.slow
def test_contestants_train_one_model(tmp_path: Path) -> None:
    alone = run([], tmp_path / "alone.json", "--only", "nearest", "nearest, bf16 router", "torch")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = "--ep-size", "2", "--micro-batches", "2", "--no-reshard"
    across = run(launcher, tmp_path / "across.json", *options)
    assert list(alone) == ["nearest", "nearest, bf16 router", "torch"]
    assert list(across) == ["off, all_to_all", "torch"]
    for contestants, tokens in ((alone, 64_000), (across, 128_000)):
        for figures in contestants.values():
            assert figures["loss"] < 5.5  # ln 256 = 5.545 at the start
            assert figures["tokens_per_second"] == pytest.approx(tokens / figures["step"])
