"""benchmarks/transformers_step.py on the CPU: contestants of both families take turns on equal weights and report."""

import json
from pathlib import Path

import pytest

from tests.helpers.programs import run_program

pytest.importorskip("transformers")

STOCK, OURS, ROUNDED = "all_to_all, grouped_mm", "sonic_ep", "sonic_ep, apportion"


@pytest.mark.slow
@pytest.mark.parallel_registry
@pytest.mark.parametrize("shape", ["tiny", pytest.param("tiny_gpt_oss", marks=pytest.mark.exhaustive)])
def test_contestants_take_turns_on_equal_weights(shape: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = ["--shape", shape, "--layers", "2", "--tokens", "64", "--length", "32", "--rounds", "2"]
    flags = ["--device", "cpu", *sizes, "--seconds", "0.1", "--out", str(out)]
    run_program("benchmarks/transformers_step.py", *flags, processes=2)
    record = json.loads(out.read_text())
    found = record["contestants"]
    assert record["shape"] == shape
    assert set(found) == {STOCK, OURS, ROUNDED}
    assert found[OURS]["first_loss"] == pytest.approx(found[STOCK]["first_loss"], rel=1e-3)  # in bfloat16
    for figures in found.values():
        assert figures["tokens_per_second"] == pytest.approx(64_000 / figures["step"])
        assert figures["layer"] > 0
