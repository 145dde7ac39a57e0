"""Two imitated hosts of two ranks: what crosses between them, training, and a host that is cut off or killed.

`make cluster-test` runs all of it and says how the hosts are imitated.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from run_folder import read_metrics
from tests.cluster.imitated_hosts import ROOT, Hosts, imitated_hosts, run_on
from tests.cluster.ranks import REPEATS, TIMEOUT, H, T
from tests.examples.conftest import SMALL_CONFIG, Launch

RANKS = str(ROOT / "tests" / "cluster" / "ranks.py")
# Frame headers, acknowledgements, headers of gloo's messages, three barriers and the agents' heartbeats.
OVERHEAD = 0.03


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Hosts in namespaces; skips where those are not permitted."""
    with imitated_hosts() as made:
        if made.way != "namespaces":
            pytest.skip(str(made))
        yield made


def finish(agents: list[subprocess.Popen[str]], timeout: float = 240.0) -> None:
    """Waits for agents that should succeed."""
    outputs = [agent.communicate(timeout=timeout)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)


def kill(agent: subprocess.Popen[str], ranks: tuple[int, ...], folder: Path) -> None:
    """Kills an agent and its ranks, which torchrun has put into sessions of their own."""
    for pid in (agent.pid, *(int((folder / f"ready-{rank}").read_text()) for rank in ranks)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.communicate()


def bytes_by_host(hosts: Hosts, folder: Path) -> dict[str, list[tuple[int, int]]]:
    """For each transport and host: bytes sent to the other one, and what its interface counted."""
    finish(run_on(hosts, RANKS, "bytes", str(folder)))
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
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-9)])
def test_training_on_two_hosts_is_training_on_one(
    launch: Launch, small: tuple[str, ...], tmp_path: Path, dtype: str, tolerance: float
) -> None:
    """EP 4 over two hosts in two hops, and over four ranks of one host by all-to-all."""
    config = tmp_path / "across.toml"
    config.write_text(f'{SMALL_CONFIG}[transport]\nkind = "two_hop"\nranks_per_host = 2\n')
    flags = (*small, "--steps", "12", "--save-every", "0", "--dtype", dtype)
    one, two = tmp_path / "one", tmp_path / "two"
    result = launch(4, *flags, "--run-dir", str(one))
    assert result.returncode == 0, result.stdout + result.stderr
    with imitated_hosts() as hosts:
        finish(run_on(hosts, "examples/train.py", *flags, "--config", str(config), "--run-dir", str(two)))
    assert len(losses(one)) == 12
    assert losses(one)[0] - losses(one)[-1] > 0.01
    assert (losses(two) - losses(one)).abs().max() < tolerance


# --- faults --------------------------------------------------------------------------------------------------------


def raised_by(ranks: tuple[int, ...], folder: Path, since: float) -> list[str]:
    """The messages of these ranks, all of which came in time."""
    deadline = time.monotonic() + 60.0
    paths = [folder / f"raised-{rank}" for rank in ranks]
    while not all(path.exists() and path.read_text() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.1)
    kinds, texts, times = zip(*(json.loads(path.read_text()) for path in paths), strict=True)
    assert set(kinds) == {"LostRankError"}
    assert max(times) - since < 2 * TIMEOUT + 8.0
    return [*texts]


@contextlib.contextmanager
def in_mid_step(hosts: Hosts, folder: Path) -> Iterator[Callable[[int], None]]:
    """Two hosts with ranks in mid-step, and a function that kills a host."""
    agents = dict(enumerate(run_on(hosts, RANKS, "steps", str(folder))))

    def kill_host(host: int) -> None:
        kill(agents.pop(host), ((0, 1), (2, 3))[host], folder)

    try:
        deadline = time.monotonic() + 90.0
        while not all((folder / f"ready-{rank}").exists() for rank in range(4)) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)
        yield kill_host
    finally:
        for host in [*agents]:
            kill_host(host)


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named(hosts: Hosts, tmp_path: Path) -> None:
    with in_mid_step(hosts, tmp_path):
        hosts.cut()
        since = time.time()
        here, there = (raised_by(ranks, tmp_path, since) for ranks in ((0, 1), (2, 3)))
    for text in here:
        assert text.startswith("ranks 2 and 3 of the EP group on host 1 did not come to ")
        assert f"within {TIMEOUT:g} s" in text
    for text in there:  # its store is on the other side
        assert text.startswith("a rank of the EP group did not come to ")
        assert "on hosts 0 and 1: most likely the one that hosts the store, usually rank 0" in text


@pytest.mark.slow
def test_a_host_that_dies_is_named(tmp_path: Path) -> None:
    with imitated_hosts() as hosts, in_mid_step(hosts, tmp_path) as kill_host:
        kill_host(1)
        texts = raised_by((0, 1), tmp_path, time.time())
    for text in texts:
        assert text.startswith("ranks 2 and 3 of the EP group on host 1 did not come to ")
