"""A host is cut off or killed while examples/train.py runs on two: what each rank raises, and how training goes on.

Each fault strikes in forward, in backward, and while a checkpoint is written. Then the run goes on at half the ranks.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from run_folder import read_metrics
from tests.cluster.imitated_hosts import RANKS_PER_HOST, ROOT, Hosts, run_on
from tests.cluster.ranks import train_on_this_rank
from tests.cluster.train_to_fault import PLACES, TIMEOUT
from tests.examples.conftest import SMALL_CONFIG
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]
TRAIN = str(ROOT / "tests" / "cluster" / "train_to_fault.py")
TRANSPORT = f'[transport]\nkind = "two_hop"\nranks_per_host = {RANKS_PER_HOST}\ntimeout = 60\n'
STEPS = 8
# Without rounding, which depends on the number of ranks. Checkpoints of steps 2, 4, ...
FLAGS = ("--steps", str(STEPS), "--rounding", "off", "--save-every", "2", "--eval-every", str(STEPS))
STRIKE = {"forward": 5, "backward": 5, "checkpoint": 4}  # the step
TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
HERE, THERE = (0, 1), (2, 3)


def losses(run: Path) -> torch.Tensor:
    records = read_metrics(run, "train")
    assert [record["step"] for record in records] == [*range(1, STEPS + 1)]
    return torch.tensor([record["loss"] for record in records], dtype=torch.float64)


@pytest.fixture(scope="module")
def uninterrupted(
    ranks: Ranks, small: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """The loss curves of four ranks of one host, by dtype."""
    folder, curves = tmp_path_factory.mktemp("uninterrupted"), {}
    for dtype in TOLERANCE:
        ranks(4).run(train_on_this_rank, 4, (*small, *FLAGS, "--dtype", dtype), folder / dtype)
        curves[dtype] = losses(folder / dtype)
        assert curves[dtype][0] - curves[dtype][-1] > 0.01
    return curves


def wait_for(paths: list[Path], seconds: float, agents: Sequence["subprocess.Popen[str]"] = ()) -> None:
    """Fails if the files are not there in time, or if one of the agents ends before."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"not all there after {seconds:g} s: {[path.name for path in paths]}"
        assert all(agent.poll() is None for agent in agents), [agent.communicate()[0] for agent in agents]
        time.sleep(0.05)


def raised_by(ranks: tuple[int, ...], folder: Path, since: float) -> list[str]:
    """The messages of these ranks, all of which came in time."""
    paths = [folder / f"raised-{rank}" for rank in ranks]
    wait_for(paths, 60.0)
    kinds, texts, times = zip(*(json.loads(path.read_text()) for path in paths), strict=True)
    assert set(kinds) == {"LostRankError"}, texts
    assert max(times) - since < 2 * TIMEOUT + 8.0
    return [*texts]


Agents = list["subprocess.Popen[str]"]


@contextlib.contextmanager
def at_the_place(hosts: Hosts, place: str, folder: Path, *flags: str) -> Iterator[Agents]:
    """Two hosts that train, the second one at the place. Yields their agents."""
    agents = run_on(hosts, TRAIN, place, str(STRIKE[place]), str(folder), *flags)
    try:
        wait_for([folder / f"reached-{rank}" for rank in THERE], 90.0, agents)
        time.sleep(0.5)  # until the others wait
        yield agents
    finally:
        kill(agents, (*HERE, *THERE), folder)
        for agent in agents:
            agent.communicate(timeout=60.0)


def kill(agents: Agents, ranks: tuple[int, ...], folder: Path) -> None:
    """Kills agents, and ranks that are not at their end: torchrun has put them into sessions of their own."""
    pids = [int(path.read_text()) for rank in ranks if (path := folder / f"pid-{rank}").exists()]
    for pid in (*(agent.pid for agent in agents if agent.poll() is None), *pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def flags_across(small: tuple[str, ...], folder: Path, dtype: str) -> tuple[str, ...]:
    config = folder / "across.toml"
    config.write_text(SMALL_CONFIG + TRANSPORT)
    return (*small, *FLAGS, "--dtype", dtype, "--config", str(config), "--run-dir", str(folder / "run"))


def goes_on_at_half_the_ranks(ranks: Ranks, run: Path, place: str) -> None:
    newest = max((run / "checkpoints").glob("step_*[0-9]")).name
    assert newest == ("step_000002" if place == "checkpoint" else "step_000004")
    assert (run / "checkpoints" / "step_000004.partial").exists() == (place == "checkpoint")
    ranks(2).run(train_on_this_rank, 2, ("--resume", str(run), "--ep-size", "2"), run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "dtype"),
    [
        ("forward", "float64"),
        pytest.param("backward", "float32", marks=pytest.mark.exhaustive),
        ("checkpoint", "float64"),
    ],
)
def test_a_host_that_is_cut_off(
    hosts: Hosts,
    ranks: Ranks,
    small: tuple[str, ...],
    uninterrupted: dict[str, torch.Tensor],
    tmp_path: Path,
    place: str,
    dtype: str,
) -> None:
    with at_the_place(hosts, place, tmp_path, *flags_across(small, tmp_path, dtype)):
        hosts.cut()
        since = time.time()
        (tmp_path / "struck").write_text("")
        here, there = (raised_by(ranks, tmp_path, since) for ranks in (HERE, THERE))
    for text in here:
        wanted = f"ranks 2 and 3 of the EP group on host 1 did not come to {PLACES[place]} within {TIMEOUT:g} s"
        assert text.startswith(wanted)
    for text in there:  # its store is on the other side
        assert text.startswith(f"a rank of the EP group did not come to {PLACES[place]} within {TIMEOUT:g} s")
        assert "on hosts 0 and 1: most likely the one that hosts the store, usually rank 0" in text
    goes_on_at_half_the_ranks(ranks, tmp_path / "run", place)
    assert (losses(tmp_path / "run") - uninterrupted[dtype]).abs().max() < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "dtype"),
    [
        pytest.param("forward", "float32", marks=pytest.mark.exhaustive),
        ("backward", "float64"),
        pytest.param("checkpoint", "float32", marks=pytest.mark.exhaustive),
    ],
)
def test_a_host_that_dies(
    any_hosts: Hosts,
    ranks: Ranks,
    small: tuple[str, ...],
    uninterrupted: dict[str, torch.Tensor],
    tmp_path: Path,
    place: str,
    dtype: str,
) -> None:
    with at_the_place(any_hosts, place, tmp_path, *flags_across(small, tmp_path, dtype)) as agents:
        kill(agents[1:], THERE, tmp_path)
        texts = raised_by(HERE, tmp_path, time.time())
        assert agents[0].wait(timeout=60.0) == 1
    for text in texts:
        assert text.startswith(f"ranks 2 and 3 of the EP group on host 1 did not come to {PLACES[place]} ")
    goes_on_at_half_the_ranks(ranks, tmp_path / "run", place)
    assert (losses(tmp_path / "run") - uninterrupted[dtype]).abs().max() < TOLERANCE[dtype]
