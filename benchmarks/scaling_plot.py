"""Draw the record of scaling.py: modelled milliseconds of a step by ranks of the EP group, shape by shape.

    python benchmarks/scaling_plot.py benchmarks/results/scaling.json --out docs/scaling.png

Lines: a skewed routing on as many GPUs as the record has. Dots: balanced routing, GPUs that are all alike.
"""

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

COLORS = {
    "pairs": ("tab:gray", "all-to-all, a row a pair"),
    "all_to_all": ("tab:orange", "all_to_all"),
    "two_hop": ("tab:blue", "two_hop"),
    "two_hop_overlapped": ("tab:green", "two_hop, if its hops overlapped"),
    "symmetric": ("tab:red", "symmetric (one host)"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    # A shape of so few experts that its groups fit one host has nothing to show.
    shapes = list(dict.fromkeys(case["config"] for case in record["cases"] if case["hosts"] > 1))
    columns = 4
    figure = Figure(figsize=(13, 9.5), layout="constrained")
    panels = figure.subplots(-(-len(shapes) // columns), columns).flatten()
    for axes, shape in zip(panels, shapes, strict=False):
        cases = [case for case in record["cases"] if case["config"] == shape]
        for kind, (color, label) in COLORS.items():
            points = [
                (
                    case["ranks"],
                    max(case["by_gpus"].items(), key=lambda item: int(item[0]))[1][kind],
                    case["balanced"][kind],
                )
                for case in cases
                if kind in case["balanced"]
            ]
            if points:
                ranks, skewed, balanced = zip(*points, strict=True)
                axes.plot(ranks, skewed, color=color, label=label, marker="s" if kind == "symmetric" else None)
                axes.plot(ranks, balanced, color=color, linestyle=":", marker=".")
        axes.set(title=shape, xscale="log", xlabel="ranks of the EP group", ylabel="ms a step, modelled")
        ticks = [case["ranks"] for case in cases]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(7, 600)
        axes.set_ylim(0)
    for axes in panels[len(shapes) :]:
        axes.remove()
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=5)
    figure.savefig(options.out, dpi=80)


if __name__ == "__main__":
    main()
