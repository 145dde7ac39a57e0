"""A small model and text, and a way to run examples/train.py; its modules are importable by pytest's pythonpath."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# As little of everything as makes rounding change something: chunks are multiples of 2 rows, totals of 4.
SMALL_CONFIG = """
[moe]
d = 32
n = 16
E = 8
K = 2
[router]
balance = "global"
balance_coef = 0.01
z_loss_coef = 0.001
[rounding]
t = 2
G = 4
"""
SMALL_MODEL = ("--layers", "2", "--head-dim", "16", "--device", "cpu")
SMALL_DATA = ("--batch", "4", "--seq", "16", "--eval-batches", "2", "--eval-every", "3", "--log-every", "1")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a model that takes milliseconds a step, on a text of 40 small files."""
    folder = tmp_path_factory.mktemp("small")
    config = folder / "small.toml"
    config.write_text(SMALL_CONFIG)
    text = folder / "text"
    text.mkdir()
    for number in range(40):
        (text / f"part_{number}.txt").write_text(f"{number} times {number} is {number * number}; " * 20)
    return ("--config", str(config), "--text", str(text), *SMALL_MODEL, *SMALL_DATA)


Launch = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def launch() -> Launch:
    """`launch(processes, *flags)` runs examples/train.py as a user would, its output piped."""

    def launch_training(processes: int, *flags: str) -> subprocess.CompletedProcess[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        return subprocess.run(
            [sys.executable, *(torchrun if processes > 1 else []), str(EXAMPLES / "train.py"), *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return launch_training
