"""The tile table: what was measured fastest on an H200 is what it gives; other architectures are refused by name."""

import json
from pathlib import Path

import pytest

from sonic_ep.kernels.cuda.tiles import Operation, tile_config

RECORDS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("grouped_gemms*_h200.json"))
TIMED = {
    (shape, operation): (record, times)
    for path in RECORDS
    for shape, record in json.loads(path.read_text())["shapes"].items()
    for operation, times in record["tiles_ms"].items()
}


def columns(operation: Operation, d: int, n: int) -> int:
    """N of an operation's GEMM."""
    return {"up": 2 * n, "down": d, "down_backward": n, "up_backward": d, "weight_up": 2 * n, "weight_down": n}[
        operation
    ]


@pytest.mark.parametrize(("shape", "operation"), TIMED)
def test_the_table_is_within_six_percent_of_the_fastest_tile_measured(shape: str, operation: Operation) -> None:
    record, times = TIMED[shape, operation]
    name = str(tile_config(operation, columns(operation, record["d"], record["n"]), 9))
    assert times[name] <= 1.06 * min(times.values()), (name, times)


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match="no tiles for compute capability 8.x; supported are 9.x"):
        tile_config("up", 512, 8)
    assert tile_config("up", 512, 10).m == 128
