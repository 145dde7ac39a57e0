"""The example as a user runs it: processes, files, resuming, comparing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import train
from corpus import load_corpus
from options import parse_options
from parallel import form_groups
from run_folder import read_metrics
from tests.examples.conftest import EXAMPLES
from tests.helpers.launch import RankPool

Launch = Callable[..., subprocess.CompletedProcess[str]]
PNG = b"\x89PNG"
TIMES = {"tokens_per_s", "seconds"}


def succeed(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def timeless(run: Path) -> list[dict[str, Any]]:
    """The run's records without what depends on the clock."""
    return [{name: value for name, value in r.items() if name not in TIMES} for r in read_metrics(run)]


def losses(run: Path, kind: str, first: int = 0) -> torch.Tensor:
    return torch.tensor([r["loss"] for r in read_metrics(run, kind) if r["step"] >= first], dtype=torch.float64)


def copy_at(step: int, run: Path, copy: Path) -> Path:
    """A copy of the run as a crash would leave it: later lines are in the records, later checkpoints are not."""
    shutil.copytree(run, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if checkpoint.name != f"step_{step:06d}":
            shutil.rmtree(checkpoint)
    return copy


def saved_tensors(checkpoint: Path, into: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its path."""
    dcp_to_torch_save(checkpoint, into)
    found: dict[str, torch.Tensor] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{name}/{key}", inner)
        elif isinstance(value, torch.Tensor):
            found[name] = value

    visit("", torch.load(into, weights_only=False))
    return found


class Straight(NamedTuple):
    """A finished run and what it printed."""

    run: Path
    result: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def straight(launch: Launch, small: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Six steps on two ranks without interruption, in the one mode that draws random numbers."""
    run = tmp_path_factory.mktemp("straight") / "run"
    flags = ("--steps", "6", "--save-every", "3", "--rounding", "stochastic", "--run-dir", str(run))
    return Straight(run, succeed(launch(2, *small, *flags)))


def test_run_folder(straight: Straight) -> None:
    run, output = straight.run, straight.result.stdout
    config = json.loads((run / "config.json").read_text())
    assert config["options"]["steps"] == 6
    assert config["moe"]["rounding"]["mode"] == "stochastic"
    assert config["world_size"] == 2
    assert (run / "loss.png").read_bytes().startswith(PNG)
    assert list(run.glob("events.out.tfevents.*"))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000003", "step_000006"]
    assert "byte unigram" in output
    assert "step 6: validation" in output


def test_a_run_saves_by_default(small: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    train.main([*small, "--steps", "42", "--eval-every", "42", "--run-dir", str(run)])
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_000040", "step_000042"]


def test_metrics(straight: Straight) -> None:
    steps, validation = read_metrics(straight.run, "train"), read_metrics(straight.run, "validation")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in validation] == [3, 6]
    expected = {"kind", "step", "loss", "bits_per_byte", "aux", "lr", "grad_norm", "changed_share", "pad_share", "t"}
    expected |= {"tokens_without_expert", "rank_load_max_over_mean", "expert_load_max_over_mean", "entropy", *TIMES}
    assert set(steps[0]) == expected
    assert len(steps[0]["entropy"]) == 2
    assert steps[0]["changed_share"] > 0
    assert steps[0]["tokens_per_s"] > 0
    load = validation[-1]["expert_load"]
    assert [len(layer) for layer in load] == [8, 8]
    assert sum(load[0]) == pytest.approx(8, abs=0.01)


def test_a_pipe_gets_no_progress_bar(straight: Straight) -> None:
    assert len(straight.result.stdout.splitlines()) < 10
    assert "step/s" not in straight.result.stderr


def test_resume_is_exact(launch: Launch, straight: Straight, tmp_path: Path) -> None:
    run = straight.run
    resumed = copy_at(3, run, tmp_path / "resumed")
    succeed(launch(2, "--resume", str(resumed)))
    assert timeless(resumed) == timeless(run)
    last = Path("checkpoints", "step_000006")
    expected, found = saved_tensors(run / last, tmp_path / "a.pt"), saved_tensors(resumed / last, tmp_path / "b.pt")
    assert found.keys() == expected.keys()
    assert len(expected) > 50
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def train_on_this_rank(rank: int, flags: tuple[str, ...], run: Path) -> None:
    """What train.main does once torch.distributed stands, as it does on the ranks of a pool."""
    options = parse_options(flags)
    mesh = form_groups(torch.device("cpu"), options.ep_size or 4)
    train.train(options, mesh, load_corpus(options.text, seq=options.seq), run)


def test_expert_parallel_equals_one_process(
    ranks: Callable[[int], RankPool], small: tuple[str, ...], tmp_path: Path
) -> None:
    """The same loss curve at EP 1 and EP 4, and across a change from 4 ranks to 1 in mid-run.

    In float64: in float32 a token whose K-th and next expert are equal but for rounding errors may go either way.
    """
    flags = (*small, "--steps", "50", "--save-every", "25", "--eval-every", "25", "--rounding", "off")
    flags = (*flags, "--dtype", "float64")
    one, four = tmp_path / "one", tmp_path / "four"
    train.main([*flags, "--run-dir", str(one)])
    ranks(4).run(train_on_this_rank, flags, four)
    mixed = copy_at(25, four, tmp_path / "mixed")
    train.main(["--resume", str(mixed)])
    for kind in ("train", "validation"):
        torch.testing.assert_close(losses(four, kind), losses(one, kind), rtol=0, atol=1e-4)
        torch.testing.assert_close(losses(mixed, kind, 26), losses(one, kind, 26), rtol=0, atol=1e-4)
    assert losses(one, "train")[-1] < losses(one, "train")[0] - 0.5


def test_copies_of_all_experts_equal_one_process(
    ranks: Callable[[int], RankPool], small: tuple[str, ...], tmp_path: Path
) -> None:
    """Two EP groups of two ranks. Without a balance loss, which counts tokens per EP group."""
    flags = (*small, "--steps", "10", "--rounding", "off", "--dtype", "float64", "--balance", "none")
    one, groups = tmp_path / "one", tmp_path / "groups"
    train.main([*flags, "--run-dir", str(one)])
    ranks(4).run(train_on_this_rank, (*flags, "--ep-size", "2"), groups)
    torch.testing.assert_close(losses(groups, "train"), losses(one, "train"), rtol=0, atol=1e-8)
    mixed = copy_at(10, groups, tmp_path / "mixed")
    train.main(["--resume", str(mixed), "--steps", "11", "--ep-size", "1"])
    assert read_metrics(mixed, "train")[-1]["step"] == 11


def test_compare(small: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "both"
    train.main([*small, "--steps", "4", "--compare", "--run-dir", str(run)])
    output = capsys.readouterr().out
    for figure in ("train bits/byte", "validation bits/byte", "training s", "changed %"):
        assert figure in output
    assert (run / "comparison.txt").read_text() in output
    assert (run / "comparison.png").read_bytes().startswith(PNG)
    top_k, rounded = read_metrics(run / "topk", "train"), read_metrics(run / "rounding", "train")
    assert all(record["changed_share"] == 0 for record in top_k)
    assert all(record["changed_share"] > 0 for record in rounded)
    assert len(top_k) == len(rounded) == 4


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_refuses_before_they_meet(
    rank: int, small: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank alone, with no other to meet: the mistake is found without a collective."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    run = tmp_path / "run"
    with pytest.raises(SystemExit, match=r"error: --batch 3 does not divide among 2 processes; give 4"):
        train.main([*small, "--batch", "3", "--run-dir", str(run)])
    assert not run.exists()


def test_options_are_checked_alone(launch: Launch, small: tuple[str, ...], tmp_path: Path) -> None:
    """What `make train` calls before it starts processes: one line, and no run."""
    run = tmp_path / "run"
    assert launch(1, *small, "--check", "--run-dir", str(run)).returncode == 0
    refused = launch(1, *small, "--check", "--steps", "0", "--run-dir", str(run))
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1
    assert refused.stderr.startswith("train.py: error: --steps 0")
    assert not run.exists()


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    small: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train.main([*small, "--steps", "4", "--save-every", "2", "--run-dir", str(run)])
    file = run / "checkpoints" / "step_000004" / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    train.main(["--resume", str(run), "--steps", "6"])
    said = capsys.readouterr().out
    assert "step_000004/__0_0.distcp is damaged" in said
    assert "going on from the checkpoint before it, step 2" in said
    assert [record["step"] for record in read_metrics(run, "train")] == [1, 2, 3, 4, 5, 6]
    for folder in (run / "checkpoints").iterdir():
        (folder / "__0_0.distcp").unlink()
    with pytest.raises(SystemExit, match="no checkpoint can be read: .*step_000006/__0_0.distcp is missing"):
        train.main(["--resume", str(run), "--steps", "8"])


@pytest.mark.parametrize("processes", [1, 2])
def test_sigterm_saves_and_a_run_goes_on(
    small: tuple[str, ...], tmp_path: Path, processes: int, launch: Launch
) -> None:
    """Of one rank alone in the second case: all ranks stop after the same step."""
    run, steps = tmp_path / "run", 100_000
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    flags = (*small, "--steps", str(steps), "--eval-every", str(steps), "--run-dir", str(run))
    command = [sys.executable, *(torchrun if processes > 1 else []), str(EXAMPLES / "train.py"), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + 120
        while len(read_metrics(run, "train")) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        second = launch(1, "--resume", str(run)) if (run / "checkpoints").exists() else None
        os.kill(int((run / "lock").read_text().split()[0]), signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    done = read_metrics(run, "train")[-1]["step"]
    assert f"stopped by SIGTERM after step {done} of {steps}; go on with --resume {run}" in output
    assert (run / "checkpoints" / f"step_{done:06d}" / "about.json").exists()
    assert second is None or "is being written by process" in second.stderr
    succeed(launch(processes, "--resume", str(run), "--steps", str(done + 2)))
    assert [record["step"] for record in read_metrics(run, "train")][-2:] == [done + 1, done + 2]


@pytest.mark.gpu
def test_on_gpus(launch: Launch, small: tuple[str, ...], tmp_path: Path) -> None:
    processes = max(size for size in (1, 2, 4) if size <= torch.cuda.device_count())
    run = tmp_path / "run"
    flags = ("--device", "cuda", "--dtype", "bfloat16", "--steps", "4", "--save-every", "2", "--run-dir", str(run))
    assert f"processes: {processes} on cuda" in succeed(launch(processes, *small, *flags)).stdout
    resumed = copy_at(2, run, tmp_path / "resumed")
    succeed(launch(processes, "--resume", str(resumed)))
    torch.testing.assert_close(losses(resumed, "train"), losses(run, "train"), rtol=0, atol=1e-2)
