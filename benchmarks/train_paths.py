"""`make train` on a GPU by our kernels and by the plain torch reference: do their loss curves agree?

    python benchmarks/train_paths.py --out results.json --plot curves.png

One seed, one order of data, runs of examples/train.py under bfloat16 autocast: on the kernels, on the reference, and on
the reference from weights nudged by a hundred-thousandth. Routing turns any difference into others, so how far nudged
runs end from the reference is the noise to judge the kernels by. A run in float32 shows what bfloat16 itself does.
"""

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from runs import new_record, parser_of, shown, write

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import train
from run_folder import read_metrics
from sonic_ep import expert_parallel_mlp
from sonic_ep.kernels.common.replaced import replaced
from sonic_ep.kernels.experts import reference

NUDGES = (1e-5, -1e-5, 2e-5)


def run(
    folder: Path, steps: int, *, precision: str = "bfloat16", on_kernels: bool = False, nudge: float = 0.0
) -> dict[str, list[float]]:
    make_optimizer = train.make_optimizer

    def nudged(model: torch.nn.Module, options: Any) -> torch.optim.AdamW:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + nudge)
        return make_optimizer(model, options)  # type: ignore[arg-type]

    chosen = replaced(expert_parallel_mlp, operations_for=lambda *_: reference)
    with nullcontext() if on_kernels else chosen, replaced(train, make_optimizer=nudged):
        train.main(["--run-dir", str(folder), "--steps", str(steps), "--precision", precision, "--log-every", "1"])
    records = {kind: read_metrics(folder, kind) for kind in ("train", "validation")}
    return {kind: [record["bits_per_byte"] for record in records[kind]] for kind in records} | {
        "tokens_per_s": [record["tokens_per_s"] for record in records["train"]]
    }


def distance(one: dict[str, list[float]], other: dict[str, list[float]], kind: str) -> dict[str, float]:
    gaps = [abs(a - b) for a, b in zip(one[kind], other[kind], strict=True)]
    return {"largest": max(gaps), "mean": sum(gaps) / len(gaps), "last": gaps[-1]}


def plot(runs: dict[str, dict[str, list[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 7), layout="constrained")
    losses, gaps = figure.subplots(2, 1)
    for name in ("reference", "kernels"):
        losses.plot(runs[name]["train"], label=f"{name}, training", alpha=0.7)
    losses.set(xlabel="step", ylabel="bits per byte")
    losses.legend()
    for name in runs:
        if name != "reference":
            gap = [a - b for a, b in zip(runs[name]["train"], runs["reference"]["train"], strict=True)]
            style = {"color": "tab:orange"} if name == "kernels" else {"color": "gray", "alpha": 0.5, "linewidth": 0.8}
            gaps.plot(gap, label=name, zorder=2 if name == "kernels" else 1, **style)
    gaps.set(xlabel="step", ylabel="training loss less the reference's, bits per byte")
    gaps.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = parser_of(__doc__, out_required=True)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--plot", type=Path, required=True)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    runs = {
        "reference": run(folder / "reference", options.steps),
        "kernels": run(folder / "kernels", options.steps, on_kernels=True),
    }
    for nudge in NUDGES:
        runs[f"reference, weights nudged by {nudge:g}"] = run(folder / str(nudge), options.steps, nudge=nudge)
    runs["reference, float32"] = run(folder / "float32", options.steps, precision="weights")
    distances = {
        f"{kind}: {name}": distance(curves, runs["reference"], kind)
        for kind in ("train", "validation")
        for name, curves in runs.items()
        if name != "reference"
    }
    record = new_record(steps=options.steps, distance_to_reference_bits_per_byte=distances, runs=runs)
    write(record, options.out)
    plot(runs, options.plot)
    for name, figures in distances.items():
        print(name, shown(figures))


if __name__ == "__main__":
    main()
