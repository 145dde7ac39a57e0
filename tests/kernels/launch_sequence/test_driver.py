"""driver.c on a driver without a GPU: what it launches, in which order, on which stream, with what."""

import ctypes
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sonic_ep.kernels.launch_sequence import driver
from tests.helpers.fake_driver import FakeGraph

PROGRAMMATIC = 1
MAIN, SIDE = 101, 202  # streams


def read() -> Any:
    handle = ctypes.c_void_p()
    problem = driver.library().sequence_read(None, ctypes.byref(handle))
    return handle if problem is None else problem.decode()


def launch(sequence: Any, bases: Sequence[int] = (), first: int = 0, end: int | None = None) -> int:
    number = driver.library().sequence_num_nodes(sequence)
    streams = (ctypes.c_void_p * 2)(MAIN, SIDE)
    return driver.library().sequence_launch(
        sequence, first, number if end is None else end, (ctypes.c_uint64 * len(bases))(*bases), streams
    )


def relocate(sequence: Any, node: int, word: int, base: int, addend: int) -> int:
    return driver.library().sequence_relocate(sequence, node, 8 * word, base, addend)


def test_kernels_get_their_parameters_and_the_addresses_of_this_step(graph: FakeGraph) -> None:
    graph.kernel(11, 4096, 5)
    graph.kernel(12, 6, 8192, after=[0], cluster=2)
    sequence = read()
    assert relocate(sequence, 0, 0, 1, 64)
    assert relocate(sequence, 1, 1, 0, -8)
    for bases in ((1000, 2000), (30, 40)):
        assert launch(sequence, bases) == 0
        assert graph.log() == [
            f"kernel 11 stream {MAIN} grid 7 cluster 0 programmatic 0: {bases[1] + 64} 5",
            f"kernel 12 stream {MAIN} grid 7 cluster 2 programmatic 0: 6 {bases[0] - 8}",
        ]


def test_a_negative_address_has_57_bits_and_the_bits_above_stay(graph: FakeGraph) -> None:
    graph.kernel(11, 0, 5 << 57)
    sequence = read()
    assert relocate(sequence, 0, 0, 0, -(2**40))
    assert relocate(sequence, 0, 1, 0, -(2**40))
    assert launch(sequence, [64]) == 0
    negative = 2**57 - 2**40 + 64
    assert graph.log()[0].endswith(f": {negative} {(5 << 57) + negative}")


def test_copies_and_fills(graph: FakeGraph) -> None:
    graph.operation(100, 200, 48, 1, copy=True)
    for size in (1, 2, 4):
        graph.operation(300, 7, size, 9, copy=False, after=[size // 2])
    sequence, library = read(), driver.library()
    assert [library.sequence_name(sequence, node) for node in range(2)] == [b"copy", b"fill"]
    assert relocate(sequence, 0, 1, 0, 1)
    assert launch(sequence, [5000]) == 0
    assert graph.log() == [
        f"copy stream {MAIN}: 100 5001 48",
        *[f"fill{8 * size} stream {MAIN}: 300 7 9" for size in (1, 2, 4)],
    ]


def test_a_segment_of_launches(graph: FakeGraph) -> None:
    for node in range(4):
        graph.kernel(node + 1, node, after=[node - 1] if node else [])
    sequence = read()
    assert launch(sequence, first=1, end=3) == 0
    assert [line.split()[1] for line in graph.log()] == ["2", "3"]


def test_programmatic_launches_are_those_with_a_programmatic_edge_from_the_launch_before(graph: FakeGraph) -> None:
    graph.kernel(1, 0)
    graph.kernel(2, 0, after=[0], edge=PROGRAMMATIC)
    graph.kernel(3, 0, after=[1])
    assert launch(read()) == 0
    assert [line.split("programmatic ")[1][0] for line in graph.log()] == ["0", "1", "0"]


def test_the_first_launch_of_a_lane_overlaps_none(graph: FakeGraph) -> None:
    for _ in range(2):  # the second time, the stack holds what the first has left
        graph.reset()
        graph.kernel(1, 0)
        graph.kernel(2, 0, after=[0], edge=PROGRAMMATIC)
        graph.kernel(3, 0, after=[0], edge=PROGRAMMATIC)
        graph.kernel(4, 0, after=[1], edge=PROGRAMMATIC)
        assert launch(read()) == 0
        kernels = [line for line in graph.log() if line.startswith("kernel")]
        assert [line.split("programmatic ")[1][0] for line in kernels] == ["0", "0", "1", "1"]


def test_a_fork_runs_on_a_second_stream_and_is_joined(graph: FakeGraph) -> None:
    graph.kernel(1, 0)
    graph.kernel(2, 0, after=[0])  # the other branch is launched first
    graph.kernel(3, 0, after=[0])
    graph.kernel(4, 0, after=[1, 2])
    sequence = read()
    assert driver.library().sequence_num_lanes(sequence) == 2
    assert launch(sequence) == 0
    assert [line.split(" grid")[0].split(": ")[0] for line in graph.log()] == [
        f"record stream {MAIN}",
        f"wait stream {SIDE}",  # for what the caller has launched before
        f"kernel 1 stream {MAIN}",
        f"record stream {MAIN}",
        f"wait stream {SIDE}",
        f"kernel 2 stream {SIDE}",
        f"record stream {SIDE}",
        f"kernel 3 stream {MAIN}",
        f"wait stream {MAIN}",
        f"kernel 4 stream {MAIN}",
    ]


def test_a_stream_that_forks_twice_stays_on_its_lane(graph: FakeGraph) -> None:
    """As where two copies of rows overlap GEMMs, and each is waited for later."""
    graph.kernel(1, 0)
    graph.kernel(2, 0, after=[0])  # the first copy
    graph.kernel(3, 0, after=[0])
    graph.kernel(4, 0, after=[2, 1])  # the second copy
    graph.kernel(5, 0, after=[2])
    graph.kernel(6, 0, after=[4, 1])  # waits for the first
    graph.kernel(7, 0, after=[5, 3])  # waits for the second
    sequence = read()
    assert driver.library().sequence_num_lanes(sequence) == 2
    assert launch(sequence) == 0
    kernels = [line.split(" grid")[0].split(": ")[0] for line in graph.log() if line.startswith("kernel")]
    lanes = {1: MAIN, 2: SIDE, 3: MAIN, 4: SIDE, 5: MAIN, 6: MAIN, 7: MAIN}
    assert kernels == [f"kernel {number} stream {lane}" for number, lane in lanes.items()]


def test_a_fork_that_no_launch_joins_is_joined_in_the_end(graph: FakeGraph) -> None:
    graph.kernel(1, 0)
    graph.kernel(2, 0, after=[0])
    graph.kernel(3, 0, after=[0])
    assert launch(read()) == 0
    log = [line.split(":")[0] for line in graph.log()]
    assert log[-1] == f"wait stream {MAIN}"
    assert log[-3] == f"record stream {SIDE}"


def test_sequences_differ_in_more_than_blocks(graph: FakeGraph) -> None:
    def captured(function: int, cluster: int, value: int) -> Any:
        graph.reset()
        graph.kernel(function, value, cluster=cluster)
        return read()

    one, equal = captured(1, 2, 3), driver.library().sequence_equal_but_for_blocks
    assert equal(one, captured(1, 2, 4))
    assert not equal(one, captured(2, 2, 3))
    assert not equal(one, captured(1, 1, 3))


def test_what_cannot_be_launched_is_refused(graph: FakeGraph) -> None:
    graph.operation(100, 200, 48, 3, copy=True)
    assert read() == "a copy of several rows"


def test_a_word_beyond_the_parameters_is_no_address(graph: FakeGraph) -> None:
    graph.kernel(1, 0, 0)
    sequence = read()
    assert relocate(sequence, 0, 1, 0, 0)
    assert not relocate(sequence, 0, 2, 0, 0)
    assert not relocate(sequence, 1, 0, 0, 0)


def test_the_drivers_error_stops_the_sequence(graph: FakeGraph) -> None:
    graph.kernel(666, 0)
    graph.kernel(2, 0, after=[0])
    assert launch(read()) == 719  # CUDA_ERROR_LAUNCH_FAILED
    assert len(graph.log()) == 1


def test_captured_nodes_are_counted(graph: FakeGraph) -> None:
    graph.kernel(1, 0)
    graph.kernel(2, 0, after=[0])
    assert driver.library().sequence_captured_nodes(MAIN) == 2
    assert driver.library().sequence_captured_nodes(None) == -1


def test_a_capture_begins_and_ends(graph: FakeGraph) -> None:
    library = driver.library()
    assert library.sequence_begin_capture(MAIN) == 0
    captured = library.sequence_end_capture(MAIN)
    assert captured is not None
    library.sequence_destroy_graph(captured)
    assert graph.log() == [f"begin stream {MAIN}: 1 0 0", "destroy stream 0: 1 0 0"]  # 1: of this thread alone
    assert library.sequence_end_capture(None) is None


def test_a_driver_that_lacks_a_function_is_named(fake: Any) -> None:
    assert driver.library().sequence_initialize(b"/nowhere/libcuda.so.1") == b"/nowhere/libcuda.so.1"


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SONIC_EP_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    driver.compiled.cache_clear()
    try:
        with pytest.raises(driver.UnavailableError, match="install one, or set CC"):
            driver.compiled_library()
        monkeypatch.setenv("CC", "false")
        with pytest.raises(driver.UnavailableError, match="false .* failed"):
            driver.compiled_library()
        assert list(tmp_path.iterdir()) == []
    finally:
        driver.compiled.cache_clear()


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The path of the library in a folder of its own, built anew."""
    monkeypatch.setenv("SONIC_EP_CACHE_DIR", str(tmp_path / "cache"))
    driver.compiled.cache_clear()
    yield driver.compiled_library()
    driver.compiled.cache_clear()


def test_a_library_that_all_may_write_is_built_anew(cached: Path) -> None:
    cached.write_bytes(b"not a library")
    driver.compiled.cache_clear()
    assert driver.compiled_library().read_bytes() == b"not a library"
    cached.chmod(0o777)
    driver.compiled.cache_clear()
    assert driver.compiled_library() == cached
    assert cached.stat().st_mode & 0o777 == 0o755
    assert cached.read_bytes().startswith(b"\x7fELF")


def test_a_folder_that_all_may_write_is_refused(cached: Path) -> None:
    cached.parent.chmod(0o777)
    driver.compiled.cache_clear()
    with pytest.raises(driver.UnavailableError, match=r"cache with compiled code has mode 777: all may write"):
        driver.compiled_library()


PIECE, START = 1 << 23, 1 << 40  # bytes behind all addresses of captures; where the fake driver reserves them


@pytest.fixture
def allocate(graph: FakeGraph) -> Any:
    """The functions that torch gets, with their types."""
    library = ctypes.CDLL(str(driver.compiled_library()))
    allocate, free = library.sequence_allocate_for_capture, library.sequence_free_of_capture
    allocate.restype, allocate.argtypes = ctypes.c_void_p, [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    free(allocate(1, 0, None), 1, 0, None)  # the first call also creates the memory
    graph.log()
    return allocate, free


def test_addresses_of_captures_have_the_same_memory_behind_them(allocate: Any, graph: FakeGraph) -> None:
    take, free = allocate
    assert take(2 * PIECE + 1, 0, None) == START
    lines = [line.replace(" stream 0", "") for line in graph.log()]
    assert lines[0] == f"reserve: {1 << 25} 0 {3 * PIECE}"
    assert lines[1:4] == [f"map: {START + k * PIECE} 7 {PIECE}" for k in range(3)]
    assert lines[4] == f"access: {START} 0 {3 * PIECE}"
    free(START, 2 * PIECE + 1, 0, None)
    lines = [line.replace(" stream 0", "") for line in graph.log()]
    assert lines[:3] == [f"unmap: {START + k * PIECE} 0 {PIECE}" for k in range(3)]
    assert lines[3] == f"unreserve: {START} 0 {3 * PIECE}"


def test_addresses_of_captures_that_cannot_be_mapped_are_given_back(allocate: Any, graph: FakeGraph, fake: Any) -> None:
    fake.fake_mappable(ctypes.c_size_t(PIECE))
    try:
        assert allocate[0](2 * PIECE, 0, None) is None
        assert allocate[0](1, 64, None) is None
    finally:
        fake.fake_mappable(ctypes.c_size_t(START))
    assert [line.split()[0] for line in graph.log()] == ["reserve", "map", "unmap", "unreserve"]
