"""The tile table: what was measured fastest on an H200 is what it gives; other architectures are refused by name."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonic_ep.kernels.experts.tile_table import Operation, reserved_clusters, tile_config

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
# Of records of the same, the last counts: it has the tiles that came since.
WHOLE, PARTIAL = (
    [json.loads((RESULTS / f"grouped_gemms_{name}_h200.json").read_text())["shapes"] for name in names]
    for names in (("tiles", "few_rows", "large"), ("partial", "partial_short", "dgated", "weights", "drawn"))
)
RECORDS = WHOLE + PARTIAL
SIZES = {name: shape for record in RECORDS for name, shape in record.items()}


def measured(kind: str) -> dict[tuple[str, Operation], dict[str, Any]]:
    """By shape and operation, what was measured of each tile."""
    return {
        (name, operation): tiles
        for record in RECORDS
        for name, shape in record.items()
        for operation, tiles in shape.get(kind, {}).items()
    }


IN_LAYER = measured("in_layer_ms")
# But for weight gradients, tiles were timed alone before they were computed only as far as they have rows. What was
# timed in the layer since has no such times.
SINCE = {(name, operation) for record in PARTIAL for name in record for operation in record[name]["in_layer_ms"]}
ALONE = {key: tiles for key, tiles in measured("tiles_ms").items() if key not in SINCE}
WIDTHS = st.integers(1, 4096).map(lambda eighth: 8 * eighth)


def tile_of(name: str, operation: Operation) -> str:
    """The table's, for the GEMM of an operation."""
    shape = SIZES[name]
    d, n = shape["d"], shape["n"]
    sizes = {
        "up": (2 * n, d),
        "down": (d, n),
        "down_backward": (n, d),
        "up_backward": (d, 2 * n),
        "weight_up": (2 * n, d),
        "weight_down": (n, d),
    }
    return str(tile_config(operation, *sizes[operation], 9, tile_aligned=not name.endswith("_ragged")))


def dealt_out(tile: str) -> str:
    """Its name in records older than the drawing of tiles ahead, without which a counter was nothing for pairs."""
    return tile if "c11" in tile else tile.removesuffix("d")


# Fastest are tiles that lose elsewhere: a cluster along M pads experts to 256 rows; dgated's 128x192.
SLOWER_ALONE = {("qwen3_30b_a3b_ep8", "up"): 1.09, ("mixtral_8x22b_ragged", "down_backward"): 1.08}


@pytest.mark.parametrize(("name", "operation"), ALONE)
def test_the_table_is_within_six_percent_of_the_fastest_tile_measured(name: str, operation: Operation) -> None:
    times, tile = ALONE[name, operation], dealt_out(tile_of(name, operation))
    assert times[tile] <= SLOWER_ALONE.get((name, operation), 1.06) * min(times.values()), (tile, times)


@pytest.mark.parametrize(("name", "operation"), IN_LAYER)
def test_the_layer_is_within_two_percent_of_its_fastest_with_another_tile(name: str, operation: Operation) -> None:
    # Forward or backward: the pass in which the operation does not run takes the same time under all tiles.
    which = 0 if operation in ("up", "down") else 1
    other = median(ms[1 - which] for ms in IN_LAYER[name, operation].values())
    times = {tile: ms[which] + other for tile, ms in IN_LAYER[name, operation].items()}
    tile = tile_of(name, operation)
    ms = times[tile] if tile in times else times[dealt_out(tile)]
    assert ms <= 1.02 * min(times.values()), times


@given(N=WIDTHS, other=WIDTHS)
def test_rows_that_are_rounded_to_128_fill_their_tiles(N: int, other: int) -> None:
    for operation in ("up", "up_heavy", "down", "down_backward", "down_backward_heavy", "up_backward"):
        tile = tile_config(operation, N, other, 9, tile_aligned=True)
        assert 128 % (tile.m * tile.cluster_m) == 0, (operation, tile)


@pytest.mark.parametrize("N", range(8, 72, 8))
def test_tiles_of_low_rank_updates_are_narrow(N: int) -> None:
    operations: tuple[Operation, ...] = ("up", "down", "up_backward", "weight_up", "weight_down")
    assert {tile_config(operation, N, 2048, 9).n for operation in operations} == {32 if N <= 32 else 64}


RESERVED = json.loads((RESULTS / "grouped_gemms_left_free_h200.json").read_text())["shapes"]


# DeepSeek-V3's share: sums are 1.5 % of its backward, less than its times scatter.
@pytest.mark.parametrize("name", sorted(RESERVED.keys() - {"deepseek_v3_ep8_ragged"}))
def test_backward_is_within_one_percent_of_its_fastest_beside_sums(name: str) -> None:
    times = {int(free): ms for free, ms in RESERVED[name]["left_free_ms"].items() if free != "before"}
    chosen = 2 * reserved_clusters("sums", 2 * RESERVED[name]["n"], 66, 9)
    below, above = (max(f for f in times if f <= chosen), min(f for f in times if f >= chosen))
    between = (times[below] + times[above]) / 2
    assert between <= 1.01 * min(times.values()), (chosen, times)


@given(st.integers(1, 2**16), st.integers(1, 74))
def test_the_gemm_keeps_half_of_any_device(J: int, clusters: int) -> None:
    assert 2 * reserved_clusters("sums", J, clusters, 9) <= clusters
    assert reserved_clusters("sums", J, clusters, 10) == 0
    assert 8 * reserved_clusters("exchange", J, clusters, 9) <= clusters
    assert reserved_clusters(None, J, clusters, 9) == 0


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="no tiles for compute capability 8.x; supported are 9.x"):
        tile_config("up", 512, 256, 8)
    assert tile_config("up", 512, 256, 10).m == 128
