"""Who sends what to whom, and a run over gloo."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sonic_ep.groups import HostLayout

Exchanges = Callable[[HostLayout, int], dict[str, Any]]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Exchanges:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("links").exchanges


def test_two_hosts_of_two(exchanges: Exchanges) -> None:
    assert exchanges(HostLayout.imitated(4, 2), 7) == {
        "to itself": [[7, 0, 0, 0], [0, 7, 0, 0], [0, 0, 7, 0], [0, 0, 0, 7]],
        "to one rank of its host": [[0, 7, 0, 0], [7, 0, 0, 0], [0, 0, 0, 7], [0, 0, 7, 0]],
        "to all others of its host": [[0, 7, 0, 0], [7, 0, 0, 0], [0, 0, 0, 7], [0, 0, 7, 0]],
        "to its number on one other host": [[0, 0, 7, 0], [0, 0, 0, 7], [7, 0, 0, 0], [0, 7, 0, 0]],
        "to its number on all other hosts": [[0, 0, 7, 0], [0, 0, 0, 7], [7, 0, 0, 0], [0, 7, 0, 0]],
        "to all other ranks": [[0, 3, 2, 2], [2, 0, 3, 2], [2, 2, 0, 3], [3, 2, 2, 0]],
    }


def test_what_has_no_peer_is_left_out(exchanges: Exchanges) -> None:
    names = {size: [*exchanges(HostLayout.imitated(size, 2), 6)] for size in (1, 2)}
    assert names[1] == ["to itself"]
    assert names[2] == ["to itself", "to one rank of its host", "to all others of its host", "to all other ranks"]


@pytest.mark.slow
def test_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    options = ["--device", "cpu", "--ranks-per-host", "2", "--mib", "1", "--rounds", "1", "--out", str(tmp_path / "a")]
    done = subprocess.run(
        [*command, str(BENCHMARKS / "links.py"), *options], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "a").read_text())
    assert found["ranks_per_host"] == 2
    assert len(found["exchanges"]) == 6
    assert all(each["gb_s"] == pytest.approx(2**20 / each["ms"] / 1e6) for each in found["exchanges"].values())
    assert "to its number on one other host" in done.stdout
