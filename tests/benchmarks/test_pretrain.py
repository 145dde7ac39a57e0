"""benchmarks/pretrain.py on the CPU: contestants take turns and learn, on one rank and across two."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.programs import run_program

TINY = ["--device", "cpu", "--shape", "tiny", "--layers", "1", "--tokens", "64", "--length", "32", "--rounds", "1"]


def run(out: Path, *options: str, processes: int | None = None) -> dict[str, Any]:
    flags = [*TINY, "--seconds", "0.1", "--no-compile", *options, "--out", str(out)]
    run_program("benchmarks/pretrain.py", *flags, processes=processes)
    return json.loads(out.read_text())["contestants"]


@pytest.mark.slow
def test_contestants_train_one_model(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone.json", "--only", "nearest", "nearest, bf16 router", "torch")
    options = "--ep-size", "2", "--micro-batches", "2", "--no-reshard"
    across = run(tmp_path / "across.json", *options, processes=2)
    assert list(alone) == ["nearest", "nearest, bf16 router", "torch"]
    assert list(across) == ["off, all_to_all", "torch"]
    for contestants, tokens in ((alone, 64_000), (across, 128_000)):
        for figures in contestants.values():
            assert figures["loss"] < 5.5  # ln 256 = 5.545 at the start
            assert figures["tokens_per_second"] == pytest.approx(tokens / figures["step"])
