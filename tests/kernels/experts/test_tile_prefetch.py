"""The number of K tiles that quack's kernel hands to our loops counts as an Int32 and has its tile's fields."""

from importlib import import_module

from tests.helpers.machine_code import needs_compilers


@needs_compilers
def test_k_tiles_count_as_an_int32() -> None:
    Int32 = import_module("cutlass").Int32
    count = import_module("sonic_ep.kernels.experts.sm90.tile_prefetch").KTiles(Int32(7), "scheduler", "rows")
    assert (count.scheduler, count.rows) == ("scheduler", "rows")
    for result, value in ((count - 1, 6), (1 + count, 8), (count * Int32(2), 14), (Int32(9) - count, 2)):
        assert type(result) is Int32
        assert result.value == value
    assert type(Int32(count)) is Int32
