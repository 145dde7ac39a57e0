"""Compute the constants of sonic_ep/cli/time_model.py from benchmarks/results, and print them.

    python benchmarks/fit_time_model.py

Least squares of relative errors: a constant is a time for a unit of work, so each case gives one linear equation. The
time that the layer adds to its stages, and that a host waits, is fitted last, to what the other constants leave over.
tests/benchmarks/test_fit_time_model.py compares the result with the constants of the module.

Legend: S ranks of the EP group, T tokens on this rank, E experts, K experts per token, d hidden size, n expert width,
P rows of the pair buffer, e local experts.
"""

import json
import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from sonic_ep import MoEConfig, RoundingConfig, load_config
from sonic_ep.cli import time_model
from sonic_ep.cli.expected_rows import rows_per_token
from sonic_ep.cli.plan import Kind, Layout
from sonic_ep.cli.time_constants import CONSTANTS
from sonic_ep.cli.time_model import gemm_features, sent_features, stages

RESULTS = Path(__file__).parent / "results"
PLAIN = RoundingConfig(mode="off")  # what benchmarks/ep_layer.py routes by without a router


def record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def fitted(equations: Iterable[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    """Returns the constants for which features * constants is closest to the times, relative to each time."""
    rows = [(*(feature / t for feature in features), 1.0) for features, t in equations]
    table = torch.tensor(rows, dtype=torch.float64)
    return tuple(torch.linalg.lstsq(table[:, :-1], table[:, -1:], driver="gelsd").solution.flatten().tolist())


def dispatch_cases(contestant: str, way: str) -> Iterator[tuple[int, int, int, dict[str, float], float]]:
    """Yields S, T, d, MB of a rank's rows by what they are, and microseconds. way: dispatch or combine."""
    for S in (2, 4, 8):
        found = record(f"dispatch_{S}_ranks_h200.json")
        config = MoEConfig(d=8, n=8, E=found["E"], K=found["K"])
        rows = rows_per_token(config, S, S)
        for case in found["cases"]:
            if case["skew"] == 0:
                row_mb = case["T"] * case["d"] * time_model.ITEM_BYTES / 1e6
                counts = {"sent": rows.local_ranks, "rows": rows.ranks, "sent_pairs": rows.local_pairs}
                counts |= {"pairs": config.K, "copied": S - 1}
                mb = {name: count * row_mb for name, count in counts.items()}
                yield S, case["T"], case["d"], mb, case["times"][contestant][f"{way}_us"]


def of_dispatch() -> dict[str, tuple[float, ...]]:
    push, dedup, pairs = "symmetric, push", "all_to_all, dedup", "all_to_all, pairs"
    least = [
        statistics.mean(us for _, T, d, _, us in dispatch_cases(dedup, way) if T == 1024 and d < 7168)
        for way in ("dispatch", "combine")
    ]
    found = {
        "push": fitted((sent_features(S, mb["sent"]), us) for S, _, _, mb, us in dispatch_cases(push, "dispatch")),
        "combine_push": fitted(
            ((*sent_features(S, mb["sent"]), mb["pairs"]), us) for S, _, _, mb, us in dispatch_cases(push, "combine")
        ),
        "copy": fitted(((1, mb["copied"]), us) for _, _, _, mb, us in dispatch_cases("symmetric, copy", "dispatch")),
        "least exchange": tuple(least),
    }
    for way in ("dispatch", "combine"):
        found[way] = fitted(
            ((1, mb["sent"], mb["rows"]), us) for _, T, _, mb, us in dispatch_cases(dedup, way) if T >= 8192
        )
        found[f"{way} of pairs"] = fitted(
            ((1, mb["sent_pairs"], mb["pairs"]), us) for _, _, _, mb, us in dispatch_cases(pairs, way)
        )
    return found


def gemm_shapes() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in CONSTANTS["up"].records:
        yield from record(name)["shapes"].items()


def of_gemms() -> dict[str, tuple[float, ...]]:
    equations: dict[str, list[tuple[tuple[float, ...], float]]] = {}
    for name, shape in gemm_shapes():
        P, e, d, n = (shape[key] for key in ("P", "e", "d", "n"))
        found: dict[str, tuple[float, ...]] = {**gemm_features(P, e, d, n, 2 * n, 64 if "ragged" in name else 0)}
        found["gather_sum"] = 1, P * d * time_model.ITEM_BYTES / 1e6
        for gemm, features in found.items():
            equations.setdefault(gemm, []).append((features, 1e3 * shape["layer_ms"][gemm]))
    return {gemm: fitted(each) for gemm, each in equations.items()}


def rested() -> float:
    """Median over shapes: the best layer behind a backlog over the layer back to back."""
    ratios = []
    for name in CONSTANTS["rested GEMMs"].records:
        for shape in record(name)["shapes"].values():
            in_layer = [times for tiles in shape["in_layer_ms"].values() for times in tiles.values()]
            best = min(forward for forward, _ in in_layer) + min(backward for _, backward in in_layer)
            ratios.append(best / (shape["layer_ms"]["forward"] + shape["layer_ms"]["backward"]))
    return statistics.median(ratios)


def deviation_of_gpus() -> float:
    times: dict[str, list[float]] = {}
    for name, shape in gemm_shapes():
        for way in ("forward", "backward"):
            times.setdefault(f"{name} {way}", []).append(shape["layer_ms"][way])
    several = [each for each in times.values() if len(each) > 1]
    return statistics.pstdev(t / statistics.mean(each) for each in several for t in each)


def of_router() -> dict[str, tuple[float, ...]]:
    tokens = {"sonic_7b": 24576, "qwen3_30b_a3b": 16384, "qwen3_next_80b_a3b": 16384, "deepseek_v3": 8192}
    forward, backward = [], []
    for name, shape in record("router_h200.json")["shapes"].items():
        config, times = load_config(name), shape["microseconds"]
        gflop = 2 * tokens[name] * config.E * config.d / 1e9
        forward.append(((1, gflop), times["logits"]))
        backward.append(((1, 2 * gflop), times["gradients_of_x_and_weight"] + times["logits_gradient_with_losses"]))
    routing = {
        mode: fitted(
            ((1, case["T"] * case["E"] / 1e6), case["times"]["sonic_ep"])
            for name in CONSTANTS["routing"].records
            for case in record(name)["cases"]
            if case["mode"] == mode
        )
        for mode in ("apportion", "off")
    }
    found = {"logits": fitted(forward), "router, backward": fitted(backward)}
    return found | {"routing": routing["apportion"], "routing, plain top-K": routing["off"]}


def hosts() -> tuple[float, ...]:
    cases = record("sustained_2_gpus.json")["cases"].values()
    return tuple(
        1e3 * math.exp(statistics.mean(math.log(case["contestants"][name]["host"]) for case in cases))
        for name in ("apportion, symmetric", "off, all_to_all")
    )


def left_over(contestant: str, kind: Kind, ways: tuple[str, ...]) -> tuple[float, ...]:
    """Returns the time that layers take in addition to their stages, by the constants that are in force."""
    equations: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for name in CONSTANTS["layer"].records:
        found = record(name)
        for case in found["cases"]:
            config = load_config(case["shape"]).replace(rounding=PLAIN, shared_n=0, shared_gate=False)
            layout = Layout(found["ranks"], found["ranks"])
            modelled = stages(config, case["T"], layout, kind, sustained=False, router=False, overlap="nothing")
            for way in ways:
                times = {"forward": modelled.forward, "backward": modelled.backward}[way]
                equations[way].append((1e3 * case["times"][contestant][f"{way}_ms"], 1e3 * sum(times.values())))
    # Least squares of (stages + x) / measured - 1 over x.
    return tuple(
        sum((t - stage) / t**2 for t, stage in each) / sum(1 / t**2 for t, _ in each) for each in equations.values()
    )


def constants() -> dict[str, tuple[float, ...]]:
    """Returns the values of all of CONSTANTS."""
    found = of_dispatch() | of_gemms() | of_router()
    found |= {"rested GEMMs": (rested(),), "GPU": (deviation_of_gpus(),), "host": hosts()}
    before = dict(CONSTANTS)
    try:
        CONSTANTS.update({name: CONSTANTS[name]._replace(values=values) for name, values in found.items()})
        for name, zeros in (("layer", (0.0, 0.0)), ("host waits", (0.0,))):
            CONSTANTS[name] = CONSTANTS[name]._replace(values=zeros)
        found["layer"] = left_over("symmetric, static, behind a backlog", "symmetric", ("forward", "backward"))
        found["host waits"] = left_over("all_to_all, behind a backlog", "all_to_all", ("forward",))
    finally:
        CONSTANTS.update(before)
    return {name: found[name] for name in CONSTANTS}


if __name__ == "__main__":
    for constant, fit in constants().items():
        print(f"{constant:24} ({', '.join(f'{value:.4g}' for value in fit)})")
