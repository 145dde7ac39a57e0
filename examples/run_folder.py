"""The folder of one run: what was asked, what happened, and checkpoints from which it goes on.

    runs/2026-01-31-120000/
        config.json          the options, the MoE config, versions
        metrics.jsonl        one JSON object per line; "kind" is train or validation
        events.out.tfevents  the same numbers for TensorBoard
        loss.png             drawn from metrics.jsonl
        checkpoints/step_000400/
        lock                 held by the process that writes

Rank 0 writes everything but the checkpoints, which all ranks write together.
"""

import fcntl
import json
import os
import platform
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel import Mesh
from sonic_ep import MoEConfig, checkpoint

MAX_CHECKPOINTS = 2


class RunFolder:
    """Writes one run's records. On ranks other than 0 every method but the checkpoints' does nothing."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self._writes = writes
        self._events: Any = None
        self._lock: Any = None

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def lock(self) -> str | None:
        """Create the folder and refuse it to others until `close`, or the process ends. Returns a problem, or None."""
        if not self._writes:
            return None
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with file:
                file.seek(0)
                holder = file.read().strip()
            return (
                f"{self.path} is being written by process {holder}: killing torchrun alone leaves its workers running; "
                "stop them, or give another --run-dir"
            )
        file.truncate(0)
        file.write(f"{os.getpid()} on {platform.node()}\n")
        file.flush()
        self._lock = file
        return None

    def open(self, options: Any, moe: MoEConfig | None, *, world_size: int, step: int) -> None:
        """Begin in the folder at `step`: what a crash left behind after the checkpoint is dropped.

        options: a dataclass. moe: of a model with our layers, not of one that transformers makes.
        """
        if not self._writes:
            return
        retained = [record for record in read_metrics(self.path) if record["step"] <= step]
        self.metrics_path.write_text("".join(json.dumps(record) + "\n" for record in retained))
        config = {
            "options": asdict(options),
            "moe": None if moe is None else moe.to_dict(),
            "world_size": world_size,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        (self.path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        from torch.utils.tensorboard import SummaryWriter  # takes a second, and only rank 0 needs it

        self._events = SummaryWriter(str(self.path), purge_step=step + 1)

    def log(self, record: dict[str, Any]) -> None:
        """Append one record to metrics.jsonl and its numbers to the TensorBoard events."""
        if not self._writes:
            return
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step":
                self._events.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        """Write out what TensorBoard still buffers, and let others write."""
        for file in (self._events, self._lock):
            if file is not None:
                file.close()


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a run folder in order, of one kind or all; a last line cut off by a crash is left out."""
    file = path / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in records if kind is None or record["kind"] == kind]


def _checkpoints(path: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    finished = [folder for folder in (path / "checkpoints").glob("step_*") if folder.suffix != ".partial"]
    return sorted(finished, key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def checkpoints_to_resume(path: Path, steps: int) -> list[Path]:
    """Finished checkpoints of a run, newest first. Raises ValueError if there is none, or nothing left to do."""
    found = _checkpoints(path)
    if not found:
        raise ValueError(f"--resume {str(path)!r} holds no finished checkpoint; start it again without --resume")
    done = _step_of(found[-1])
    if done >= steps:
        raise ValueError(
            f"--resume {str(path)!r} is at step {done} of {steps}: nothing is left to do; give more --steps"
        )
    return found[::-1]


def save_checkpoint(path: Path, mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write checkpoints/step_NNNNNN: weights, optimizer, every rank's random number generators, the step.

    The step is all there is to the position in the data (see corpus.py). The folder gets its name only when every rank
    is done, so a crash never leaves half a checkpoint under a good name.
    """
    folder = path / "checkpoints" / f"step_{step:06d}"
    partial = folder.with_suffix(".partial")
    if mesh.is_main:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that ended while it wrote, maybe with more ranks
    extra = {"step": step, **_random_states(mesh)}
    checkpoint.save(partial, model, optimizer, extra, timeout=mesh.world.timeout)
    if mesh.is_main:
        about = {"step": step, "world_size": mesh.world.size, "device": mesh.device.type}
        (partial / "about.json").write_text(json.dumps(about) + "\n")
    mesh.wait()
    if mesh.is_main:
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        for old in _checkpoints(path)[:-MAX_CHECKPOINTS]:
            shutil.rmtree(old)
    mesh.wait()


def load_newest(
    folders: list[Path], mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, list[str]]:
    """Fill model and optimizer from the first intact one. Returns the step to go on from, and what was damaged.

    Raises ValueError if none is intact.
    """
    damaged: list[str] = []
    for folder in folders:
        try:
            return load_checkpoint(folder, mesh, model, optimizer), damaged
        except (ValueError, OSError) as error:
            damaged.append(str(error))
    raise ValueError("; ".join(damaged))


def load_checkpoint(folder: Path, mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Fill model and optimizer from a checkpoint of any number of ranks; returns the step to go on from.

    Random number generators are restored when the number of ranks and the kind of device are the same; otherwise they
    go on from the seed, which matters only to jitter and stochastic rounding.
    """
    about = json.loads((folder / "about.json").read_text())
    same_ranks = about["world_size"] == mesh.world.size and about["device"] == mesh.device.type
    extra = checkpoint.load(
        folder, model, optimizer, extra=_random_states(mesh) if same_ranks else None, timeout=mesh.world.timeout
    )
    if same_ranks:
        torch.set_rng_state(extra[f"rng_cpu_{mesh.world.rank}"])
        if mesh.device.type == "cuda":
            torch.cuda.set_rng_state(extra[f"rng_cuda_{mesh.world.rank}"], mesh.device)
    return about["step"]


def _random_states(mesh: Mesh) -> dict[str, Tensor]:
    """Every rank saves under its own names, so that no state is taken for another rank's copy."""
    states = {f"rng_cpu_{mesh.world.rank}": torch.get_rng_state()}
    if mesh.device.type == "cuda":
        states[f"rng_cuda_{mesh.world.rank}"] = torch.cuda.get_rng_state(mesh.device)
    return states
