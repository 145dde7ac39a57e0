"""Two imitated hosts of two ranks: how they are made, what crosses between them, and training.

`make cluster-test` runs all of tests/cluster and says how the hosts are imitated.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from run_folder import read_metrics
from tests.cluster.imitated_hosts import ROOT, Hosts, imitated_hosts, run_on
from tests.cluster.ranks import REPEATS, H, T, train_on_this_rank
from tests.examples.conftest import SMALL_CONFIG
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]
RANKS = str(ROOT / "tests" / "cluster" / "ranks.py")
# Frame headers, acknowledgements, headers of gloo's messages, three barriers and the agents' heartbeats.
OVERHEAD = 0.03


def finish(agents: list[subprocess.Popen[str]], timeout: float = 240.0) -> None:
    """Waits for agents that should succeed."""
    outputs = [agent.communicate(timeout=timeout)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)


def bytes_by_host(hosts: Hosts, folder: Path) -> dict[str, list[tuple[int, int]]]:
    """For each transport and host: bytes sent to the other one, and what its interface counted."""
    finish(run_on(hosts, RANKS, str(folder)))
    found = [json.loads((folder / f"bytes-{rank}").read_text()) for rank in range(4)]
    return {
        name: [
            (sum(found[rank][name]["sent"] for rank in ranks), found[ranks[0]][name]["counted"])
            for ranks in ((0, 1), (2, 3))
        ]
        for name in ("two_hop", "all_to_all")
    }


@pytest.mark.slow
def test_interfaces_count_what_the_formula_says(hosts: Hosts, tmp_path: Path) -> None:
    found = bytes_by_host(hosts, tmp_path)
    for each in found.values():
        for sent, counted in each:
            assert sent <= counted <= sent * (1 + OVERHEAD)
    # In two hops a token crosses once each way at most, whatever the number of its experts.
    two_hop, all_to_all = (sum(sent for sent, _ in found[name]) for name in ("two_hop", "all_to_all"))
    assert two_hop <= REPEATS * 2 * 4 * T * H * 4 < all_to_all


def test_without_namespaces_two_agents_meet_on_the_loopback_interface(tmp_path: Path) -> None:
    with imitated_hosts("loopback") as hosts:
        assert str(hosts) == "two hosts as loopback"
        found = bytes_by_host(hosts, tmp_path)
    assert sum(sent for sent, _ in found["two_hop"]) < sum(sent for sent, _ in found["all_to_all"])


def test_the_fallback_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ip = tmp_path / "ip"
    ip.write_text("#!/bin/sh\necho 'mount --make-shared /run/netns failed: Operation not permitted' >&2\nexit 1\n")
    ip.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with imitated_hosts() as hosts:
        assert hosts.way == "loopback"
        assert str(hosts).endswith(
            "because namespaces are not permitted: mount --make-shared /run/netns failed: Operation not permitted"
        )


def test_namespaces_are_removed() -> None:
    with imitated_hosts() as hosts:
        if hosts.namespaces is None:
            pytest.skip(str(hosts))
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert all(name in listed for name in hosts.namespaces)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in listed for name in hosts.namespaces)


# --- training ------------------------------------------------------------------------------------------------------


def losses(run: Path) -> torch.Tensor:
    return torch.tensor([record["loss"] for record in read_metrics(run, "train")], dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param("float32", 1e-4, marks=pytest.mark.exhaustive), ("float64", 1e-9)]
)
def test_training_on_two_hosts_is_training_on_one(
    ranks: Ranks, small: tuple[str, ...], tmp_path: Path, dtype: str, tolerance: float
) -> None:
    """EP 4 over two hosts in two hops, and over four ranks of one host by all-to-all."""
    config = tmp_path / "across.toml"
    config.write_text(f'{SMALL_CONFIG}[transport]\nkind = "two_hop"\nranks_per_host = 2\n')
    flags = (*small, "--steps", "12", "--save-every", "0", "--dtype", dtype)
    one, two = tmp_path / "one", tmp_path / "two"
    ranks(4).run(train_on_this_rank, 4, flags, one)
    with imitated_hosts() as hosts:
        finish(run_on(hosts, "examples/train.py", *flags, "--config", str(config), "--run-dir", str(two)))
    assert len(losses(one)) == 12
    assert losses(one)[0] - losses(one)[-1] > 0.01
    assert (losses(two) - losses(one)).abs().max() < tolerance
