"""Pictures of a run, drawn from its metrics.jsonl alone."""

from pathlib import Path
from typing import Any

from run_folder import read_metrics


def _figure(rows: int, height: float) -> tuple[Any, Any]:
    """A matplotlib figure that needs no display; imported here, for only rank 0 draws and the import takes a second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def _draw_losses(axis: Any, run: Path, name: str, color: str) -> None:
    prefix = f"{name}: " if name else ""
    axis.plot(*_series(run, "train", "bits_per_byte"), color=color, alpha=0.35, label=f"{prefix}training")
    label = f"{prefix}validation (plain top-K)"
    axis.plot(*_series(run, "validation", "bits_per_byte"), color=color, marker="o", label=label)


def _finish_losses(axis: Any, run: Path) -> None:
    if validation := read_metrics(run, "validation"):
        unigram = validation[-1]["unigram_bits_per_byte"]
        axis.axhline(unigram, color="gray", linestyle="--", label=f"byte unigram, {unigram:.2f}")
    axis.set(xlabel="step", ylabel="bits per byte", ylim=(0, 8.2))
    axis.legend()


def plot_run(run: Path) -> Path | None:
    """loss.png: training and validation loss with the byte unigram's, and the load of every expert in every layer.

    Without the load where the records have none.
    """
    validation = read_metrics(run, "validation")
    if not validation:
        return None
    loads = validation[-1].get("expert_load", [])
    figure, (losses, *others) = _figure(2, 6.5 + 0.25 * len(loads)) if loads else _figure(1, 4.5)
    _draw_losses(losses, run, "", "tab:blue")
    _finish_losses(losses, run)
    for load in others:
        _draw_load(load, figure, loads)
    figure.savefig(run / "loss.png", dpi=120)
    return run / "loss.png"


def _draw_load(load: Any, figure: Any, loads: list[list[float]]) -> None:
    image = load.imshow(loads, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    load.set(xlabel="expert", ylabel="layer", yticks=range(len(loads)))
    load.set_title("tokens per expert over the layer's mean (plain top-K), at the last step drawn above")
    load.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=load)


def plot_comparison(runs: dict[str, Path], path: Path) -> None:
    """One picture of two runs: their losses over each other, the second's less the first's, what rounding changed."""
    figure, (losses, difference, changed) = _figure(3, 10)
    for (name, run), color in zip(runs.items(), ("tab:blue", "tab:orange"), strict=True):
        _draw_losses(losses, run, name, color)
        steps, share = _series(run, "train", "changed_share")
        changed.plot(steps, [100 * value for value in share], color=color, label=name)
    (first, before), (second, after) = runs.items()
    _finish_losses(losses, before)
    for kind, style in (("train", {"alpha": 0.35}), ("validation", {"marker": "o"})):
        steps, low = _series(before, kind, "bits_per_byte")
        _, high = _series(after, kind, "bits_per_byte")
        gap = [b - a for a, b in zip(low, high, strict=True)]
        difference.plot(steps, gap, color="tab:green", label=kind, **style)
    difference.axhline(0, color="gray", linewidth=0.8)
    difference.set(xlabel="step", ylabel=f"{second} - {first}, bits per byte")
    difference.legend()
    changed.set(xlabel="step", ylabel="assignments changed, %")
    changed.legend()
    figure.savefig(path, dpi=120)


def _series(run: Path, kind: str, name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one figure."""
    records = read_metrics(run, kind)
    return [record["step"] for record in records], [record[name] for record in records]
