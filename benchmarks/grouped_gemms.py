"""Time every grouped GEMM of the local layer over candidate tiles, and the whole layer, on one GPU.

    python benchmarks/grouped_gemms.py --out results.json            [--shape qwen3_30b_a3b_ep8] [--tiles]

TFLOP/s counts useful operations only: 6 P d n forward, 12 P d n backward over P pairs. Times are medians over CUDA
events, candidates taking turns in one run, on fresh random unit-scale inputs.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sonic_ep import load_config
from sonic_ep.kernels import expert_mlp
from sonic_ep.kernels.activations import activation_named
from sonic_ep.kernels.cuda import operations
from sonic_ep.kernels.cuda.tiles import Operation, TileConfig
from sonic_ep.kernels.expert_mlp import ExpertWeights, PairLists

# name: (config, ep_size, T received rows, pairs per row where that is not the config's K)
SHAPES: dict[str, tuple[str, int, int, float | None]] = {
    "qwen3_30b_a3b_ep8": ("qwen3_30b_a3b", 8, 43690, 1.5),  # 65,536 pairs: one of 8 ranks at 8k tokens per rank
    "sonic_7b": ("sonic_7b", 1, 24576, None),
    "qwen3_30b_a3b": ("qwen3_30b_a3b", 1, 16384, None),
    "qwen3_next_80b_a3b": ("qwen3_next_80b_a3b", 1, 16384, None),
}
CANDIDATES = [
    TileConfig(128, 192, True),
    TileConfig(128, 128, True),
    TileConfig(256, 128, False),
    TileConfig(128, 256, False),
    TileConfig(256, 192, False),
    TileConfig(128, 192, True, 1, 2),
    TileConfig(256, 128, False, 1, 2),
    TileConfig(128, 256, False, 1, 2),
    TileConfig(128, 128, False),
]


class Problem:
    """Random rows, weights, gates and lists; every expert gets a multiple of 128 pairs."""

    def __init__(self, shape: str) -> None:
        config_name, ep_size, self.T, per_row = SHAPES[shape]
        config = load_config(config_name)
        self.e, self.d, self.n = config.E // ep_size, config.d, config.n
        tiles_in_all = int(self.T * (per_row or config.K)) // 128
        counts = torch.full((self.e,), tiles_in_all // self.e) + (torch.arange(self.e) < tiles_in_all % self.e)
        self.P = int(counts.sum()) * 128
        starts = torch.nn.functional.pad((counts * 128).cumsum(0), (1, 0))
        self.starts = starts.int().cuda()
        # A row's pairs go to different experts: tokens of each expert ascending, as dispatch leaves them.
        rows = [torch.randperm(self.T)[: int(c) * 128].sort().values for c in counts]
        self.rows = torch.cat(rows).int().cuda()
        order = self.rows.long().sort(stable=True)
        self.pairs_by_row = order.indices.int()
        boundaries = torch.arange(self.T + 1, device="cuda")
        self.pair_starts = torch.searchsorted(order.values, boundaries).int()

        def draw(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, device="cuda") * scale).bfloat16()

        d, n, e = self.d, self.n, self.e
        self.x, self.do = draw(self.T, d), draw(self.T, d)
        self.w1, self.w2 = draw(e, 2 * n, d, scale=d**-0.5), draw(e, d, n, scale=n**-0.5)
        self.h, self.a, self.dh = draw(self.P, 2 * n), draw(self.P, n), draw(self.P, 2 * n)
        self.gates = torch.rand(self.P, device="cuda")
        self.activation = activation_named("swiglu")
        self.lists = PairLists(self.rows, self.pairs_by_row, self.pair_starts, self.starts)

    def calls(self) -> dict[Operation, tuple[Callable[[], Any], int]]:
        """Each operation and its useful floating-point operations."""
        unit = 2 * self.P * self.d * self.n
        o, p = operations, self
        return {
            "up": (lambda: o.up_projection(p.x, p.w1, None, p.rows, p.starts, p.activation), 2 * unit),
            "down": (lambda: o.down_projection(p.a, p.w2, None, p.starts), unit),
            "down_backward": (
                lambda: o.down_projection_backward(p.do, p.w2, None, p.h, p.gates, p.rows, p.starts, p.activation),
                unit,
            ),
            "up_backward": (lambda: o.up_projection_backward(p.dh, p.w1, p.starts), 2 * unit),
            "weight_up": (lambda: o.weight_grad(p.dh, p.x, p.rows, p.starts), 2 * unit),
            "weight_down": (lambda: o.weight_grad(p.a, p.do, p.rows, p.starts, transposed=True), unit),
        }


def median_ms(contestants: dict[str, Callable[[], Any]], rounds: int = 12) -> dict[str, float]:
    """Median milliseconds of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        for _ in range(2):
            call()
    for _ in range(rounds):
        for name, call in contestants.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(200_000)  # hides the launch overhead of short kernels
            start.record()
            call()
            stop.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(stop))
    return {name: statistics.median(values) for name, values in times.items()}


def with_tile(tile: TileConfig, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call under another tile: its own plans, kept apart from the others'."""
    plans: dict[tuple[object, ...], Any] = {}

    def run() -> None:
        kept, operations._PLANS = operations._PLANS, plans
        chosen, operations.tile_config = operations.tile_config, lambda *_: tile
        try:
            call()
        finally:
            operations._PLANS, operations.tile_config = kept, chosen

    return run


def time_tiles(problem: Problem) -> dict[str, dict[str, float]]:
    """Milliseconds of every operation under every candidate that runs."""
    results: dict[str, dict[str, float]] = {}
    for operation, (call, flops) in problem.calls().items():
        contestants: dict[str, Callable[[], Any]] = {}
        for tile in CANDIDATES:
            if tile.cluster_n > 1 and operation != "down" and operation != "up_backward":
                continue  # a gathered operand cannot be multicast along N
            run = with_tile(tile, call)
            try:
                run()
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001  a tile that cannot run is a result too
                print(f"  {operation} {tile}: {type(error).__name__} {str(error)[:80]}")
                continue
            contestants[str(tile)] = run
        results[operation] = median_ms(contestants)
        ranked = sorted(results[operation].items(), key=lambda item: item[1])
        print(f"{operation:14}", ", ".join(f"{name} {ms:.3f} ({flops / ms / 1e9:.0f})" for name, ms in ranked))
    return results


def time_layer(problem: Problem) -> dict[str, float]:
    """The table's tiles: each operation, gather-sum, the local layer forward and backward."""
    p, weights = problem, ExpertWeights(problem.w1, problem.w2)
    y = operations.down_projection(p.a, p.w2, None, p.starts)

    def forward() -> None:
        expert_mlp.forward(operations, p.x, p.gates, weights, p.lists, p.activation)  # type: ignore[arg-type]

    def backward() -> None:
        grads, _ = expert_mlp.backward_activations(operations, p.do, p.h, p.gates, weights, p.lists, p.activation)  # type: ignore[arg-type]
        expert_mlp.backward_up_weights(operations, p.x, grads, p.lists)  # type: ignore[arg-type]
        expert_mlp.backward_down_weights(operations, p.do, grads, p.lists)  # type: ignore[arg-type]

    contestants: dict[str, Callable[[], Any]] = {name: call for name, (call, _) in p.calls().items()}
    contestants["gather_sum"] = lambda: operations.gather_sum(y, p.pairs_by_row, p.pair_starts, p.gates)
    contestants["forward"], contestants["backward"] = forward, backward
    times = median_ms(contestants, rounds=20)
    unit = 6 * p.P * p.d * p.n
    for name, ms in times.items():
        print(f"  {name:14} {ms:.3f} ms")
    print(f"  forward {unit / times['forward'] / 1e9:.0f} TFLOP/s, backward {2 * unit / times['backward'] / 1e9:.0f}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--tiles", action="store_true", help="time every candidate tile too")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "shapes": {}}
    for shape in options.shape:
        torch.manual_seed(0)
        problem = Problem(shape)
        print(f"{shape}: P={problem.P} e={problem.e} d={problem.d} n={problem.n}", flush=True)
        record: dict[str, Any] = {"P": problem.P, "e": problem.e, "d": problem.d, "n": problem.n}
        record["layer_ms"] = time_layer(problem)
        if options.tiles:
            record["tiles_ms"] = time_tiles(problem)
        results["shapes"][shape] = record
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        del problem
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
