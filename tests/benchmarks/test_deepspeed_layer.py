"""benchmarks/deepspeed_layer.py on the CPU: contestants take turns on equal weights, and one that fails is reported."""

import json
from typing import Any

import pytest

from tests.helpers.programs import run_program

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

PLAIN = ("MoE", "sonic_ep MoE", "AutoEP", "sonic_ep AutoEP")
ROUNDED = ("sonic_ep MoE, apportion", "sonic_ep AutoEP, apportion")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("deepspeed_layer") / "out.json"
    sizes = "--shape tiny --layers 2 --tokens 1024 --length 128 --micro-batches 2".split()
    turns = "--device cpu --rounds 2 --seconds 0.1".split()
    run_program("benchmarks/deepspeed_layer.py", *sizes, *turns, "--out", str(out), processes=2)
    return json.loads(out.read_text())


@pytest.mark.slow
def test_contestants_take_turns_on_equal_weights(record: dict[str, Any]) -> None:
    found = record["contestants"]
    assert set(found) == {*PLAIN, *ROUNDED}
    losses = {name: each["first_loss"] for name, each in found.items()}
    for name in PLAIN:
        assert losses[name] == pytest.approx(losses["MoE"], abs=1e-5)
    for name in ROUNDED:
        assert losses[name] == pytest.approx(losses["MoE"], abs=1e-3)
        assert losses[name] != pytest.approx(losses["MoE"], abs=1e-5)  # it rounds


@pytest.mark.slow
def test_one_that_fails_is_reported(record: dict[str, Any]) -> None:
    assert list(record["errors"]) == ["AutoEP, fused"]
    assert "RuntimeError" in record["errors"]["AutoEP, fused"]


@pytest.mark.slow
def test_figures_are_of_every_round(record: dict[str, Any]) -> None:
    for name, figures in record["contestants"].items():
        assert figures.get("programs") == (0 if name.startswith("sonic_ep") else None)
        assert figures["turns"] == 2
        assert figures["tokens_per_second"] == pytest.approx(2_048_000 / figures["step"])
        assert 0 < figures["layer_host"] <= figures["layer"]
        assert 0 < figures["host"] <= figures["step"]
