"""Time every grouped GEMM of the local layer over candidate tiles, and the whole layer, on one GPU.

    python benchmarks/grouped_gemms.py --out results.json [--shape qwen3_30b_a3b_ep8] [--tiles [up_backward ...]]
                                       [--in-layer [up ...]] [--reserved-sms 8 ...] [--rounds 12]

TFLOP/s counts useful operations only: 6 P d n forward, 12 P d n backward over P pairs. Times are medians over CUDA
events, candidates taking turns in one run, on fresh random unit-scale inputs. `--in-layer` times the layer with the
tile of one operation replaced: at the card's power limit a GEMM that runs right after others ranks tiles otherwise
than one that runs alone. `--reserved-sms` times the layer with dX summed while dW1 runs, for which the GEMM of dW1
reserves so many multiprocessors, and with dX summed before dW1.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from local_problem import LocalProblem, tiled_pairs, topk_pairs
from other_kernels import whole_tiles, with_kernels, within
from runs import new_record, parser_of, write
from sonic_ep import load_config
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.kernels.backend import gather_sum
from sonic_ep.kernels.common.replaced import replaced
from sonic_ep.kernels.experts import grouped_gemm as operations
from sonic_ep.kernels.experts import tile_table as tiles
from sonic_ep.kernels.experts.tile_table import Operation, TileConfig
from timing import BACKLOG, medians_ms

SHORT_BACKLOG = 200_000  # cycles, for the launches of one operation
# name: (config, ep_size, T received rows, pairs of experts with full tiles; None: ragged top-K)
SHAPES: dict[str, tuple[str, int, int, int | None]] = {
    "qwen3_30b_a3b_ep8": ("qwen3_30b_a3b", 8, 43690, 65536),  # one of 8 ranks at 8k tokens per rank
    "sonic_7b": ("sonic_7b", 1, 24576, 24576 * 8),
    "qwen3_30b_a3b": ("qwen3_30b_a3b", 1, 16384, 16384 * 8),
    "qwen3_next_80b_a3b": ("qwen3_next_80b_a3b", 1, 16384, 16384 * 10),
    "sonic_7b_ragged": ("sonic_7b", 1, 24576, None),
    "qwen3_30b_a3b_ragged": ("qwen3_30b_a3b", 1, 16384, None),
    "qwen3_next_80b_a3b_ragged": ("qwen3_next_80b_a3b", 1, 16384, None),
    "sonic_30b": ("sonic_30b", 1, 32768, 32768 * 8),
    "sonic_120b": ("sonic_120b", 1, 32768, 32768 * 8),
    "sonic_30b_ragged": ("sonic_30b", 1, 32768, None),
    "sonic_120b_ragged": ("sonic_120b", 1, 32768, None),
    "qwen3_235b_a22b_ep8_ragged": ("qwen3_235b_a22b", 8, 8192, None),
    "deepseek_v3_ep8_ragged": ("deepseek_v3", 8, 8192, None),
    # all experts on one GPU
    "deepseek_v3_ragged": ("deepseek_v3", 1, 16384, None),
    "kimi_k2_ragged": ("kimi_k2", 1, 16384, None),
    "mixtral_8x7b_ragged": ("mixtral_8x7b", 1, 16384, None),
    "mixtral_8x22b_ragged": ("mixtral_8x22b", 1, 16384, None),
    # few rows an expert: 512, and 256 in the "shortest"
    "deepseek_v3_ep8_short_ragged": ("deepseek_v3", 8, 2048, None),
    "deepseek_v3_ep8_shortest_ragged": ("deepseek_v3", 8, 1024, None),
    "sonic_30b_short_ragged": ("sonic_30b", 1, 8192, None),
    "sonic_30b_shortest_ragged": ("sonic_30b", 1, 4096, None),
    "qwen3_30b_a3b_short_ragged": ("qwen3_30b_a3b", 1, 8192, None),
    "qwen3_30b_a3b_shortest_ragged": ("qwen3_30b_a3b", 1, 4096, None),
}
_TILES = [
    *((128, 192, True), (128, 128, True), (192, 128, True)),
    *((128, 256, False), (256, 192, False), (256, 128, False)),
]
CANDIDATES = [TileConfig(*tile, 1, 1, dynamic) for tile in _TILES for dynamic in (False, True)] + [
    TileConfig(128, 192, True, 2),
    TileConfig(128, 128, True, 2),
    TileConfig(128, 256, False, 2),
    TileConfig(128, 256, False, 2, 1, True),
    TileConfig(256, 192, False, 2),
    TileConfig(192, 128, True, 2),
    TileConfig(128, 192, True, 4),
    TileConfig(128, 256, False, 4),
    TileConfig(128, 192, True, 1, 2),
    TileConfig(128, 256, False, 1, 2),
    TileConfig(256, 128, False, 1, 2),
    TileConfig(256, 192, False, 1, 2),
    TileConfig(192, 128, True, 1, 2),
    TileConfig(192, 128, True, 1, 2, True),
]
IN_LAYER: dict[Operation, list[TileConfig]] = {
    "up": [
        TileConfig(128, 192, True, dynamic=True),
        TileConfig(128, 192, True, 2),
        TileConfig(128, 256, False, dynamic=True),
    ],
    "down": [
        TileConfig(128, 192, True, dynamic=True),
        TileConfig(128, 192, True, 1, 2),
        TileConfig(128, 192, True, 1, 2, dynamic=True),
        TileConfig(192, 128, True, dynamic=True),
        TileConfig(192, 128, True, 1, 2),
        TileConfig(192, 128, True, 1, 2, dynamic=True),
        TileConfig(256, 192, False, 1, 2),
        TileConfig(256, 192, False, 1, 2, dynamic=True),
    ],
    "down_backward": [
        TileConfig(128, 128, True, dynamic=True),
        TileConfig(128, 192, True, dynamic=True),
    ],
    "weight_up": [
        TileConfig(128, 256, False, 2),
        TileConfig(128, 256, False, 2, dynamic=True),
        TileConfig(128, 192, True, 2),
        TileConfig(128, 192, True, 2, dynamic=True),
    ],
}
IN_LAYER["up_backward"], IN_LAYER["weight_down"] = IN_LAYER["down"], IN_LAYER["weight_up"]


class Problem(LocalProblem):
    """With random operands for every single operation."""

    def __init__(self, shape: str) -> None:
        config_name, ep_size, T, num_pairs = SHAPES[shape]
        config = load_config(config_name)
        E = config.E // ep_size
        pairs = topk_pairs(T, E, config.K) if num_pairs is None else tiled_pairs(T, E, num_pairs)
        super().__init__(pairs, T, E, config.d, config.n, tile_aligned=num_pairs is not None)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, device="cuda").bfloat16()

        self.h, self.a, self.dh = draw(self.P, 2 * self.n), draw(self.P, self.n), draw(self.P, 2 * self.n)

    def calls(self) -> dict[Operation, tuple[Callable[[], Any], int]]:
        """Each operation and its useful floating-point operations."""
        unit = 2 * self.P * self.d * self.n
        o, p, lists = operations, self, self.lists
        x, w1, w2 = p.x.detach(), p.w1.detach(), p.w2.detach()
        rows, starts, tile_aligned = lists.row_of_pair_P, lists.expert_starts_e, lists.tile_aligned
        return {
            "up": (lambda: o.up_projection(x, w1, None, rows, starts, p.activation), 2 * unit),
            "down": (lambda: o.down_projection(p.a, w2, None, starts, tile_aligned=tile_aligned), unit),
            "down_backward": (
                lambda: o.down_projection_backward(p.dout, w2, None, p.h, p.pair_weights, rows, starts, p.activation),
                unit,
            ),
            "up_backward": (lambda: o.up_projection_backward(p.dh, w1, starts, tile_aligned=tile_aligned), 2 * unit),
            "weight_up": (lambda: o.weight_grad(p.dh, x, rows, starts), 2 * unit),
            "weight_down": (lambda: o.weight_grad(p.a, p.dout, rows, starts, transposed=True), unit),
        }


def with_tile(tile: TileConfig, call: Callable[[], Any], only: Operation | None = None) -> Callable[[], Any]:
    """The call under another tile, of one operation or of all: its own kernels, kept apart from the others'."""

    def tile_config(operation: Operation, *shape: int, **rows: bool) -> TileConfig:
        return tile if only in (None, operation) else tiles.tile_config(operation, *shape, **rows)

    return within(with_kernels(tile_config=tile_config), call)


def time_tiles(problem: Problem, operations: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of these operations, or of all, under every candidate that runs."""
    results: dict[str, dict[str, float]] = {}
    for operation, (call, flops) in problem.calls().items():
        if operations and operation not in operations:
            continue
        contestants: dict[str, Callable[[], Any]] = {}
        for tile in CANDIDATES:
            if tile.cluster_n > 1 and operation not in ("down", "up_backward"):
                continue  # a gathered operand cannot be multicast along N
            run = with_tile(tile, call)
            try:
                run()
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001  a tile that cannot run is a result too
                print(f"  {operation} {tile}: {type(error).__name__} {str(error)[:80]}")
                continue
            contestants[str(tile)] = run
        results[operation] = medians_ms(contestants, rounds, backlog=SHORT_BACKLOG)
        ranked = sorted(results[operation].items(), key=lambda item: item[1])
        print(f"{operation:14}", ", ".join(f"{name} {ms:.3f} ({flops / ms / 1e9:.0f})" for name, ms in ranked))
    return results


def time_layer(problem: Problem) -> dict[str, float]:
    """The table's tiles: each operation, gather-sum, the local layer forward and backward, also with whole tiles."""
    p, lists = problem, problem.lists
    y = operations.down_projection(p.a, p.w2.detach(), None, lists.expert_starts_e, tile_aligned=lists.tile_aligned)
    forward, backward = p.kernels()
    by_row = (p.handle.pairs_by_row_V, p.handle.pair_starts_R)
    contestants: dict[str, Callable[[], Any]] = {name: call for name, (call, _) in p.calls().items()}
    contestants["gather_sum"] = lambda: gather_sum(y, *by_row, p.pair_weights)
    for name, call in (("forward", forward), ("backward", backward)):
        contestants[name], contestants[f"{name}, whole tiles"] = call, within(whole_tiles, call)
    times = medians_ms(contestants, 20, backlog=SHORT_BACKLOG)
    unit = 6 * p.P * p.d * p.n
    for name, ms in times.items():
        print(f"  {name:21} {ms:.3f} ms")
    print(f"  forward {unit / times['forward'] / 1e9:.0f} TFLOP/s, backward {2 * unit / times['backward'] / 1e9:.0f}")
    return times


def time_in_layer(
    problem: Problem, operations: Sequence[Operation], rounds: int
) -> dict[str, dict[str, tuple[float, float]]]:
    """Forward and backward ms of the local layer with the tile of one operation replaced, of these or of all."""
    forward, backward = problem.kernels()
    contestants: dict[str, Callable[[], Any]] = {}
    replaced: dict[Operation, list[TileConfig]] = {name: IN_LAYER[name] for name in operations or IN_LAYER}
    for operation, candidates in replaced.items():
        for tile in candidates:
            for name, call in (("forward", forward), ("backward", backward)):
                contestants[f"{operation} {tile} {name}"] = with_tile(tile, call, operation)
    times = medians_ms(contestants, rounds, backlog=BACKLOG)
    results = {
        operation: {
            str(tile): (times[f"{operation} {tile} forward"], times[f"{operation} {tile} backward"])
            for tile in candidates
        }
        for operation, candidates in replaced.items()
    }
    for operation, rows in results.items():
        print(f"in the layer: {operation:14}", ", ".join(f"{tile} {a:.3f} + {b:.3f}" for tile, (a, b) in rows.items()))
    return results


def time_reserved(problem: Problem, candidates: Sequence[int], rounds: int) -> dict[str, float]:
    """Backward ms of the local layer by multiprocessors that dW1 leaves to the sums of dX; "before": nothing beside."""
    _, backward = problem.kernels()

    def before() -> None:
        combine = LocalTransport.combine
        with replaced(LocalTransport, combine=lambda *arguments, overlap=False: combine(*arguments)):
            backward()

    def overlapped(free: int) -> None:
        with replaced(operations, reserved_clusters=lambda *_: free // 2):  # clusters of 2
            backward()

    contestants: dict[str, Callable[[], Any]] = {"before": before}
    contestants |= {str(free): partial(overlapped, free) for free in candidates}
    times = medians_ms(contestants, rounds, backlog=BACKLOG)
    print("dX summed beside dW1: ", ", ".join(f"{name} {ms:.3f}" for name, ms in times.items()))
    return times


def main() -> None:
    parser = parser_of(__doc__, out_required=True)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument(
        "--tiles", nargs="*", choices=get_args(Operation), help="time every candidate tile of these too"
    )
    parser.add_argument(
        "--in-layer",
        nargs="*",
        choices=get_args(Operation),
        help="time the layer with the tile of one of these replaced",
    )
    parser.add_argument("--reserved-sms", nargs="+", type=int, help="multiprocessors that dW1 leaves to the sums of dX")
    parser.add_argument("--rounds", type=int, default=12, help="of tiles")
    options = parser.parse_args()
    results = new_record(shapes={})
    for shape in options.shape:
        torch.manual_seed(0)
        problem = Problem(shape)
        print(f"{shape}: P={problem.P} e={problem.E} d={problem.d} n={problem.n}", flush=True)
        record: dict[str, Any] = {"P": problem.P, "e": problem.E, "d": problem.d, "n": problem.n}
        record["layer_ms"] = time_layer(problem)
        if options.tiles is not None:
            record["tiles_ms"] = time_tiles(problem, options.tiles, options.rounds)
        if options.in_layer is not None:
            record["in_layer_ms"] = time_in_layer(problem, options.in_layer, options.rounds)
        if options.reserved_sms is not None:
            record["left_free_ms"] = time_reserved(problem, options.reserved_sms, options.rounds)
        results["shapes"][shape] = record
        write(results, options.out)
        del problem
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
