"""Which words of a launch are addresses, and of what: found by comparing runs, or refused."""

import struct
from collections.abc import Sequence
from typing import Any

import pytest

from sonic_ep.kernels.launch_sequence import addresses as module
from sonic_ep.kernels.launch_sequence.addresses import (
    Address,
    AmbiguousError,
    Launches,
    Run,
    UnrecordableError,
    find_addresses,
)
from sonic_ep.kernels.launch_sequence.driver import library
from tests.helpers.fake_driver import FakeGraph

KNOWN = 1 << 40  # from here on the fake driver knows all memory
TMA_SHIFT = 2**30 * 16


@pytest.fixture(autouse=True)
def _without_a_gpu(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "driver", library)


def run(
    graph: FakeGraph, starts: Sequence[int], sizes: Sequence[int], blocks: Sequence[bytes], *, struct_size: int = 8
) -> Any:
    """One run of a function: tensors that live all the time, the last of them state; and kernels."""
    graph.reset()
    for node, block in enumerate(blocks):
        number = len(block) // struct_size
        graph.kernel_with_sizes(node + 1, [struct_size] * number, block, after=[node - 1] if node else [])
    capture = Run(num_fixed=1)
    capture.starts, capture.sizes = list(starts), list(sizes)
    capture.allocated = [(0, 0)] * len(starts)
    capture.passes = [Launches(1)]
    return capture


def words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def addresses(*runs: Any) -> list[Address]:
    return find_addresses(0, runs[0], runs[1:])


# In every run: the state at the same address, and two tensors of 1000 bytes.
STARTS = [(KNOWN, KNOWN + n * 10_000, KNOWN + n * 50_000 + 3000) for n in (1, 2, 5)]
SIZES = [64, 1000, 1000]


def runs(graph: FakeGraph, *blocks: bytes, struct_size: int = 8) -> list[Any]:
    """Three runs with one kernel, by its block in each."""
    return [
        run(graph, starts, SIZES, [block], struct_size=struct_size)
        for starts, block in zip(STARTS, blocks, strict=True)
    ]


def test_addresses_within_tensors(graph: FakeGraph) -> None:
    blocks = [words(7, first + 16, KNOWN + 8, second) for _, first, second in STARTS]
    assert addresses(*runs(graph, *blocks)) == [Address(0, 1, 1, 16), Address(0, 2, 0, 8), Address(0, 3, 2, 0)]


def test_a_word_of_smaller_parameters_is_no_address(graph: FakeGraph) -> None:
    """Of two of 4 bytes, or of one and what memory held behind it: torch's kernels have empty structs there."""
    blocks = [words(first + 16, KNOWN) for _, first, _ in STARTS]
    assert addresses(*runs(graph, *blocks, struct_size=4)) == []
    assert addresses(*runs(graph, *blocks)) == [Address(0, 0, 1, 16), Address(0, 1, 0, 0)]


def test_the_end_of_one_tensor_is_the_start_of_the_next(graph: FakeGraph) -> None:
    starts = [(KNOWN, KNOWN + n * 10_000, KNOWN + n * 10_000 + 1000) for n in (1, 2, 5)]
    made = [run(graph, each, SIZES, [words(each[2])]) for each in starts]
    assert addresses(*made) == [Address(0, 0, 2, 0)]


def test_an_address_for_tma_lies_in_front_of_its_tensor(graph: FakeGraph) -> None:
    blocks = [words(first - 3 * TMA_SHIFT, 0) for _, first, _ in STARTS]
    assert addresses(*runs(graph, *blocks, struct_size=16)) == [Address(0, 0, 1, -3 * TMA_SHIFT)]


def test_such_an_address_can_be_negative(graph: FakeGraph) -> None:
    """Of a tensor that moves, and of the state, which did not move but may. TMA's descriptor holds 57 bits."""
    distance = 2**47 // TMA_SHIFT * TMA_SHIFT
    blocks = [words((first - distance) % 2**57, KNOWN - distance + 2**57) for _, first, _ in STARTS]
    assert addresses(*runs(graph, *blocks, struct_size=16)) == [
        Address(0, 0, 1, -distance),
        Address(0, 1, 0, -distance),
    ]


def test_large_numbers_are_constants(graph: FakeGraph) -> None:
    assert addresses(*runs(graph, *[words(2**39 + 1, 2**64 - 1, 2**63 + 5)] * 3)) == []


def test_what_the_stack_held_in_two_runs_is_no_address_of_a_tensor_that_moves(graph: FakeGraph) -> None:
    blocks = [words(1, value) for value in (KNOWN + 901, KNOWN + 70_002, KNOWN + 901)]
    assert addresses(*runs(graph, *blocks, struct_size=16)) == []


def test_a_distance_that_is_no_multiple_of_tmas_is_no_address(graph: FakeGraph) -> None:
    blocks = [words(first - 5000, 0) for _, first, _ in STARTS]
    with pytest.raises(UnrecordableError, match="no address of a tensor"):
        addresses(*runs(graph, *blocks, struct_size=16))


def test_a_number_that_changes_is_refused(graph: FakeGraph) -> None:
    with pytest.raises(UnrecordableError, match=r"word 1 of launch 0 \(function\) is 0x5, 0x6, 0x7"):
        addresses(*runs(graph, *(words(1, value) for value in (5, 6, 7))))


@pytest.mark.parametrize("distance", [-5000, 2**40 + 8, 8 - 2**50], ids=hex)
def test_what_moves_with_a_tensor_is_refused_even_within_a_struct(graph: FakeGraph, distance: int) -> None:
    blocks = [words(1, (first + distance) % 2**57) for _, first, _ in STARTS]
    with pytest.raises(UnrecordableError, match="no address of a tensor"):
        addresses(*runs(graph, *blocks, struct_size=16))


@pytest.mark.parametrize(
    "values", [(5, 6, 7), (KNOWN + 900, 0, 1), (KNOWN + 1, KNOWN + 2**33 + 1, KNOWN + 2**34 + 1), (KNOWN + 900,) * 3]
)
def test_what_lies_between_members_of_a_struct_is_constant(graph: FakeGraph, values: Sequence[int]) -> None:
    assert addresses(*runs(graph, *(words(1, value) for value in values), struct_size=16)) == []


def test_unknown_memory_is_refused(graph: FakeGraph) -> None:
    with pytest.raises(UnrecordableError, match="no address of a tensor of the function"):
        addresses(*runs(graph, *[words(KNOWN + 900)] * 3))


@pytest.mark.parametrize("number", range(3))
def test_a_number_among_the_addresses_of_a_run_is_constant(graph: FakeGraph, number: int) -> None:
    """cuBLAS passes 4 and 2^31 in one word, which is an address where captures get theirs."""
    value = STARTS[number][1] + 900
    assert addresses(*runs(graph, *[words(value)] * 3)) == []


def test_two_explanations_are_refused(graph: FakeGraph) -> None:
    starts = [(KNOWN, KNOWN + n * 10_000, KNOWN + n * 10_000 + 16) for n in (1, 2, 5)]
    made = [run(graph, each, SIZES, [words(each[2])]) for each in starts]
    with pytest.raises(AmbiguousError, match=r"1000 bytes at \+16, 1000 bytes at \+0"):
        addresses(*made)


def test_other_kernels_are_refused(graph: FakeGraph) -> None:
    one, two, _ = runs(graph, *[words(1)] * 3)
    two.passes = run(graph, STARTS[1], SIZES, [words(1), words(2)]).passes
    with pytest.raises(UnrecordableError, match="different kernels"):
        addresses(one, two)


def test_a_tensor_is_meant_while_it_lives(graph: FakeGraph) -> None:
    """The second tensor gets the memory of the first, which was freed after one launch."""
    made = []
    for _, first, _ in STARTS:
        capture = run(graph, (KNOWN, first, first), SIZES, [words(first), words(first)])
        capture.freed, capture.allocated[2] = {1: (0, 1)}, (0, 1)
        made.append(capture)
    assert addresses(*made) == [Address(0, 0, 1, 0), Address(1, 0, 2, 0)]


def freed_after_one_launch(graph: FakeGraph, *, struct_size: int) -> list[Any]:
    """Two launches that hold the address of a tensor, which was freed between them."""
    made = []
    for starts in STARTS:
        capture = run(graph, starts, SIZES, [words(1, starts[1] + 8)] * 2, struct_size=struct_size)
        capture.freed = {1: (0, 1)}
        made.append(capture)
    return made


def test_an_address_of_a_freed_tensor_in_a_struct_is_what_an_earlier_launch_left(graph: FakeGraph) -> None:
    assert addresses(*freed_after_one_launch(graph, struct_size=16)) == [Address(0, 1, 1, 8)]


def test_an_address_of_a_freed_tensor_as_a_parameter_is_refused(graph: FakeGraph) -> None:
    with pytest.raises(UnrecordableError, match="word 1 of launch 1"):
        addresses(*freed_after_one_launch(graph, struct_size=8))
