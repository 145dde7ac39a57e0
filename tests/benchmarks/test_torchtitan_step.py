"""benchmarks/torchtitan_step.py on the CPU: contestants take turns on equal weights and report."""

import json
from pathlib import Path

import pytest

from tests.helpers.programs import run_program

pytest.importorskip("torchtitan")

STOCK, OURS, ROUNDED = "all_to_all, grouped_mm", "sonic_ep", "sonic_ep, apportion"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [[], *[pytest.param([each], marks=pytest.mark.exhaustive) for each in ("--compile", "--checkpoint")]],
    ids=str,
)
def test_contestants_take_turns_on_equal_weights(options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    sizes = "--shape tiny --layers 2 --tokens 64 --length 32 --rounds 2 --seconds 0.1".split()
    run_program("benchmarks/torchtitan_step.py", "--device", "cpu", *options, *sizes, "--out", str(out), processes=2)
    record = json.loads(out.read_text())
    found = record["contestants"]
    assert record["errors"] == {}
    assert set(found) == {STOCK, OURS, ROUNDED}
    losses = {name: figures["first_loss"] for name, figures in found.items()}
    assert losses[OURS] == pytest.approx(losses[STOCK], rel=1e-3)  # in bfloat16
    assert losses[ROUNDED] == pytest.approx(losses[OURS], rel=1e-3)
    for figures in found.values():
        assert figures["turns"] == 2
        assert figures["tokens_per_second"] == pytest.approx(64_000 / figures["step"])
        assert 0 < figures["layer"] < figures["step"]
