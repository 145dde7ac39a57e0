"""Figures of a step, made alike on every rank: what metrics.jsonl, the progress bar and the comparison show."""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from parallel import Mesh
from run_folder import read_metrics
from sonic_ep import RoutingStats

BITS_PER_NAT = 1 / math.log(2)


def routing_record(stats: list[RoutingStats], mesh: Mesh) -> dict[str, Any]:
    """Routing of one step: means over layers and ranks; `entropy` (nats) and `t` stay one figure per layer.

    A collective: every rank calls it.
    """
    names = ("changed_share", "pad_share", "rank_load_max_over_mean", "expert_load_max_over_mean", "entropy")
    rows = [[float(getattr(layer, name)) for name in names] for layer in stats]
    rows = [[*row, float(layer.tokens_without_expert)] for row, layer in zip(rows, stats, strict=True)]
    mean = mesh.mean(torch.tensor(rows, device=mesh.device))
    figures = dict(zip(names, mean.mean(0).tolist(), strict=False))
    figures["entropy"] = mean[:, names.index("entropy")].tolist()
    return {
        **figures,
        "tokens_without_expert": float(mean[:, -1].mean()) * mesh.world.size,
        "t": [int(layer.t) for layer in stats],
    }


def expert_load(stats: list[RoutingStats], mesh: Mesh) -> list[list[float]]:
    """Tokens that chose each expert over the mean of its layer, per layer, for the plot. A collective."""
    counts = mesh.mean(torch.stack([layer.counts_E for layer in stats]).to(mesh.device, torch.float32))
    load = counts / counts.mean(1, keepdim=True).clamp(min=1)
    return [[round(value, 3) for value in layer] for layer in load.tolist()]


def loss_record(kind: str, step: int, loss: float, **figures: float) -> dict[str, Any]:
    """One line of metrics.jsonl without figures of routing."""
    return {"kind": kind, "step": step, "loss": loss, "bits_per_byte": loss * BITS_PER_NAT, **figures}


class Stopwatch:
    """Seconds of training and tokens per second, pauses left out."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._mark = time.perf_counter()
        self._tokens = 0

    def count(self, tokens: int) -> None:
        """So many tokens more since the last reading."""
        self._tokens += tokens

    def tokens_per_second(self) -> float:
        """The rate since the last reading. On a GPU wait for a result of the step first."""
        now = time.perf_counter()
        elapsed, tokens = now - self._mark, self._tokens
        self.seconds += elapsed
        self._mark, self._tokens = now, 0
        return tokens / max(elapsed, 1e-9)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in here is not training."""
        start = time.perf_counter()
        yield
        self._mark += time.perf_counter() - start


def summarise(run: Path) -> dict[str, float]:
    """The end of a run in a few numbers, from its metrics: training figures are means over the last tenth."""
    train = read_metrics(run, "train")
    validation = read_metrics(run, "validation")
    end = train[-max(1, len(train) // 10) :]

    def mean(name: str, records: list[dict[str, Any]]) -> float:
        return sum(record[name] for record in records) / len(records)

    return {
        "train bits/byte": mean("bits_per_byte", end),
        "validation bits/byte": validation[-1]["bits_per_byte"],
        "byte unigram": validation[-1]["unigram_bits_per_byte"],
        "training s": train[-1]["seconds"],
        "tokens/s": mean("tokens_per_s", train),
        "changed %": 100 * mean("changed_share", train),
        "padding %": 100 * mean("pad_share", train),
        "tokens without expert": mean("tokens_without_expert", train),
        "rank load max/mean": mean("rank_load_max_over_mean", train),
        "expert load max/mean": mean("expert_load_max_over_mean", train),
    }


def comparison_table(runs: dict[str, Path]) -> str:
    """Runs as columns, figures as rows, the difference of the last two columns behind them."""
    summaries = {name: summarise(path) for name, path in runs.items()}
    lines = [f"{'':24}" + "".join(f"{name:>14}" for name in summaries) + f"{'difference':>14}"]
    for figure in next(iter(summaries.values())):
        values = [summary[figure] for summary in summaries.values()]
        cells = "".join(f"{value:14.4g}" for value in values)
        lines.append(f"{figure:24}{cells}{values[-1] - values[-2]:+14.3g}")
    return "\n".join(lines)
