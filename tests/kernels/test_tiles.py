"""The tile table: what was measured fastest on an H200 is what it gives; other architectures are refused by name."""

import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonic_ep.kernels.cuda.tiles import FEW_ROWS, Operation, tile_config

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHAPES = {
    f"{record}/{name}": shape
    for record in ("tiles", "few_rows")
    for name, shape in json.loads((RESULTS / f"grouped_gemms_{record}_h200.json").read_text())["shapes"].items()
}
of_measured = pytest.mark.parametrize(
    ("shape", "operation"), [(shape, operation) for shape, record in SHAPES.items() for operation in record["tiles_ms"]]
)


def tile_of(shape: str, operation: Operation) -> str:
    """The table's, for the GEMM of an operation."""
    d, n = SHAPES[shape]["d"], SHAPES[shape]["n"]
    columns = {"up": 2 * n, "down": d, "down_backward": n, "up_backward": d, "weight_up": 2 * n, "weight_down": n}
    rows = {"rounded": not shape.endswith("_ragged"), "few_rows": SHAPES[shape]["P"] < FEW_ROWS * SHAPES[shape]["e"]}
    return str(tile_config(operation, columns[operation], 9, **rows))


# Fastest are tiles that lose elsewhere: a cluster along M pads experts to 256 rows; of few rows an expert and wide
# weights, gradients are bound by what they write, which ping-pong hides.
SLOWER_ALONE = {
    ("qwen3_30b_a3b_ep8", "up"): 1.09,
    ("deepseek_v3_ep8_short_ragged", "weight_up"): 1.18,
    ("deepseek_v3_ep8_short_ragged", "weight_down"): 1.14,
    ("deepseek_v3_ep8_shortest_ragged", "weight_up"): 1.11,
    ("deepseek_v3_ep8_shortest_ragged", "weight_down"): 1.11,
}


@of_measured
def test_the_table_is_within_six_percent_of_the_fastest_tile_measured(shape: str, operation: Operation) -> None:
    times, name = SHAPES[shape]["tiles_ms"][operation], tile_of(shape, operation)
    assert times[name] <= SLOWER_ALONE.get((shape.split("/")[1], operation), 1.06) * min(times.values()), (name, times)


@of_measured
def test_the_layer_is_within_two_percent_of_its_fastest_with_another_tile(shape: str, operation: Operation) -> None:
    times = {tile: sum(ms) for tile, ms in SHAPES[shape]["in_layer_ms"][operation].items()}
    assert times[tile_of(shape, operation)] <= 1.02 * min(times.values()), times


@given(N=st.integers(1, 4096).map(lambda eighth: 8 * eighth))
def test_rows_that_are_rounded_to_128_fill_their_tiles(N: int) -> None:
    for operation in ("up", "up_clamped", "down", "up_backward"):
        tile = tile_config(operation, N, 9, rounded=True)
        assert 128 % (tile.m * tile.cluster_m) == 0, (operation, tile)


@given(N=st.integers(1, 4096).map(lambda eighth: 8 * eighth))
def test_few_rows_want_no_kernel_that_is_not_compiled_ahead(N: int) -> None:
    """`sonic-ep compile` makes those of many ragged rows, and of rounded ones."""
    for operation in get_args(Operation):
        compiled = [tile_config(operation, N, 9, rounded=rounded) for rounded in (False, True)]
        assert tile_config(operation, N, 9, few_rows=True) in compiled


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="no tiles for compute capability 8.x; supported are 9.x"):
        tile_config("up", 512, 8)
    assert tile_config("up", 512, 10).m == 128
