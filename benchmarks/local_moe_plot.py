"""Draw the records of local_moe.py: rates and memory of the experts, shape by shape.

    python benchmarks/local_moe_plot.py benchmarks/results/local_moe_*.json --out docs/local_moe.png

A shape that several files hold is drawn from the first, and of each shape the contestants that were measured.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

CONTESTANTS = {"torch_grouped_mm": "torch grouped_mm, eager", "sonic_moe": "sonic-moe 0.1.2", "sonic_ep": "sonic_ep"}


def shapes_of(files: list[Path]) -> dict[str, Any]:
    shapes: dict[str, Any] = {}
    for file in files:
        for name, record in json.loads(file.read_text())["shapes"].items():
            shapes.setdefault(name, record)
    return shapes


def tflops(record: dict[str, Any], contestant: str) -> float:
    """Useful operations of forward and backward, 18 T K d n, over their time."""
    T, _, K, d, n = record["sizes"]
    times = record["contestants"][contestant]
    return 18 * T * K * d * n / (times["forward_ms"] + times["backward_ms"]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shapes = shapes_of(options.records)
    figure = Figure(figsize=(11, 9), layout="constrained")
    rates, saved, peaks = figure.subplots(3, 1)
    for number, (contestant, label) in enumerate(CONTESTANTS.items()):
        drawn = [
            (index + 0.27 * (number - 1), record)
            for index, record in enumerate(shapes.values())
            if contestant in record["contestants"]
        ]
        places = [place for place, _ in drawn]
        figures = [record["contestants"][contestant] for _, record in drawn]
        rates.bar(places, [tflops(record, contestant) for _, record in drawn], 0.25, label=label)
        saved.bar(places, [each["kept_mib"] for each in figures], 0.25, label=label)
        peaks.bar(places, [each["backward_peak_mib"] for each in figures], 0.25, label=label)
    rates.set(ylabel="TFLOP/s, forward and backward")
    saved.set(ylabel="MiB kept for backward", yscale="log")
    peaks.set(ylabel="MiB at the peak of backward", yscale="log")
    for axes in (rates, saved, peaks):
        axes.set_xticks(range(len(shapes)), [name.replace("_", "\n", 2) for name in shapes])
    figure.legend(*rates.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(options.out, dpi=100)


if __name__ == "__main__":
    main()
