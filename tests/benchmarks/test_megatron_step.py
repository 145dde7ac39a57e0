"""benchmarks/megatron_step.py on the CPU: contestants that run there take turns on equal weights and report."""

import json
from typing import Any

import pytest

from tests.helpers.programs import run_program

pytest.importorskip("megatron.core")

OURS, SEQUENTIAL = "sonic_ep", "MoELayer, SequentialMLP"
ROUNDED = "sonic_ep, apportion"


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("megatron_step") / "out.json"
    tiny = "--shape tiny --layers 2 --tokens 512 --length 128 --micro-batches 2".split()
    turns = "--device cpu --rounds 2 --seconds 0.1".split()
    run_program("benchmarks/megatron_step.py", *tiny, *turns, "--out", str(out), processes=2)
    return json.loads(out.read_text())


@pytest.mark.slow
def test_contestants_take_turns_on_equal_weights(record: dict[str, Any]) -> None:
    found = record["contestants"]
    assert set(found) == {OURS, SEQUENTIAL, ROUNDED}
    assert list(record["errors"]) == ["MoELayer, TEGroupedMLP"]
    losses = {name: each["first_loss"] for name, each in found.items()}
    assert losses[SEQUENTIAL] == pytest.approx(losses[OURS], abs=1e-5)
    assert losses[ROUNDED] == pytest.approx(losses[OURS], abs=1e-3)


@pytest.mark.slow
def test_figures_are_of_every_round(record: dict[str, Any]) -> None:
    for figures in record["contestants"].values():
        assert figures["turns"] == 2
        assert figures["tokens_per_second"] == pytest.approx(2 * 512_000 / figures["step"])
        assert 0 < figures["layer"] < figures["step"]
        assert 0 < figures["host"] <= figures["step"]
