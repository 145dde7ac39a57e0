"""Pictures of a run, drawn from its metrics.jsonl alone."""

from pathlib import Path
from typing import Any

from run_folder import read_metrics


def _figure(rows: int, height: float) -> tuple[Any, Any]:
    """A matplotlib figure that needs no display; imported here, for only rank 0 draws and the import takes a second."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("the example draws its plots with matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.subplots(rows, 1, squeeze=False)[:, 0]


def _draw_losses(axis: Any, run: Path, name: str, color: str) -> None:
    train = read_metrics(run, "train")
    validation = read_metrics(run, "validation")
    prefix = f"{name}: " if name else ""
    axis.plot(
        [r["step"] for r in train],
        [r["bits_per_byte"] for r in train],
        color=color,
        alpha=0.35,
        label=f"{prefix}training",
    )
    axis.plot(
        [r["step"] for r in validation],
        [r["bits_per_byte"] for r in validation],
        color=color,
        marker="o",
        label=f"{prefix}validation (plain top-K)",
    )


def _finish_losses(axis: Any, run: Path) -> None:
    if validation := read_metrics(run, "validation"):
        unigram = validation[-1]["unigram_bits_per_byte"]
        axis.axhline(unigram, color="gray", linestyle="--", label=f"byte unigram, {unigram:.2f}")
    axis.set(xlabel="step", ylabel="bits per byte", ylim=(0, 8.2))
    axis.legend()


def plot_run(run: Path) -> Path | None:
    """loss.png: training and validation loss with the byte unigram's, and the load of every expert in every layer."""
    loads = [record["expert_load"] for record in read_metrics(run, "validation")]
    if not loads:
        return None
    layers = len(loads[-1])
    figure, (losses, load) = _figure(2, 6.5 + 0.25 * layers)
    _draw_losses(losses, run, "", "tab:blue")
    _finish_losses(losses, run)
    image = load.imshow(loads[-1], aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    load.set(xlabel="expert", ylabel="layer", yticks=range(layers))
    load.set_title("tokens per expert over the layer's mean (plain top-K), at the last step drawn above")
    load.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=load)
    figure.savefig(run / "loss.png", dpi=120)
    return run / "loss.png"


def plot_comparison(runs: dict[str, Path], path: Path) -> None:
    """One picture of several runs: their losses over each other, below what rounding changed."""
    figure, (losses, changed) = _figure(2, 8)
    for (name, run), color in zip(runs.items(), ("tab:blue", "tab:orange"), strict=True):
        _draw_losses(losses, run, name, color)
        train = read_metrics(run, "train")
        share = [100 * r["changed_share"] for r in train]
        changed.plot([r["step"] for r in train], share, color=color, label=name)
    _finish_losses(losses, next(iter(runs.values())))
    changed.set(xlabel="step", ylabel="assignments changed, %")
    changed.legend()
    figure.savefig(path, dpi=120)
