"""benchmarks/paths.py: the lengths of its steps, and runs on the CPU, on one rank and over gloo."""

import itertools
import json
from importlib import import_module
from pathlib import Path

import pytest

from tests.helpers.programs import ROOT, run_program


def test_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    lengths_of = import_module("paths").lengths_of

    def drawn(kind: str, rank: int) -> list[int]:
        return [*itertools.islice(lengths_of(kind, 2048, rank), 1000)]

    assert {*drawn("fixed", 1)} == {2048}
    assert drawn("8 lengths", 0) == drawn("8 lengths", 1)
    assert {*drawn("8 lengths", 0)} == {2048 - 32 * number for number in range(8)}
    some, others = (drawn("any length", rank) for rank in (0, 1))
    assert some != others
    assert min(some) >= 1536
    assert max(some) <= 2048
    assert len({*some}) > 60
    assert all(length % 8 == 0 for length in some)


@pytest.mark.slow
def test_runs(tmp_path: Path) -> None:
    some = ["fixed", "forward", "code", "8 lengths", "any length", "checkpoint"]
    for processes, only in (
        (None, [*some, "checkpoint, reentrant", "checkpoint, replay"]),
        (2, [*some, "all_to_all"]),
        (4, ["all_to_all", "two_hop"]),
    ):
        out = tmp_path / "results.json"
        options = ["--device", "cpu", "--case", "tiny:64", "--rounds", "1", "--seconds", "0", "--least", "3"]
        run_program("benchmarks/paths.py", *options, "--out", str(out), "--only", *only, processes=processes)
        found = json.loads(out.read_text())
        assert found["errors"] == {}
        ways = found["cases"]["tiny:64"]["ways"]
        assert [*ways] == only
        for way in ways.values():
            assert 0 < way["host"] <= way["step"]
            assert way["warm_s"] > 0
