"""Finds which words in the parameters of launches are addresses, by comparing runs of a function on moved tensors.

A word is an address if one tensor explains its value in every run. Everything else is a constant, or is refused.
"""

import ctypes
import struct
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sonic_ep.kernels.launch_sequence.driver import driver

FORWARD, BACKWARD = 0, 1
# quack gives TMA the address 2^30 rows in front of a tensor (create_ragged_tensor_for_tma), and rows for TMA have a
# multiple of 16 bytes. TMA's descriptor holds 57 bits of an address.
_TMA_SHIFT, _TMA_BITS = 2**30 * 16, 57
_NO_ADDRESS = 2**31  # the driver gives none below
_WORD, _LOW_HALF = 8, 2**32 - 1  # bytes of an address, and the mask of its lower four


class UnrecordableError(RuntimeError):
    """Raised with the reason why the launches of a function cannot be repeated at other addresses."""


class AmbiguousError(UnrecordableError):
    """Raised if several tensors explain a value. Another run may decide."""


@dataclass(frozen=True, slots=True)
class Address:
    """8 bytes of a launch's parameters that are an address: `node` of a pass, `word` in its block."""

    node: int
    word: int
    buffer: int
    offset: int


class Launches:
    """Owns a sequence of driver.c."""

    def __init__(self, graph: int) -> None:
        self._library = driver()
        handle = ctypes.c_void_p()
        problem = self._library.sequence_read(graph, ctypes.byref(handle))
        if problem is not None:
            raise UnrecordableError(problem.decode())
        self.handle = handle
        self.num_nodes: int = self._library.sequence_num_nodes(handle)
        self.num_lanes: int = self._library.sequence_num_lanes(handle)
        weakref.finalize(self, self._library.sequence_free, handle)

    def block(self, node: int) -> bytes:
        """Returns the parameters of a node as they were captured."""
        length = ctypes.c_uint32()
        start = self._library.sequence_block(self.handle, node, ctypes.byref(length))
        return ctypes.string_at(start, length.value)

    def differs_from(self, other: "Launches") -> bool:
        """Returns True if anything but the blocks differs."""
        return not self._library.sequence_equal_but_for_blocks(self.handle, other.handle)

    def is_known_memory(self, values: Iterable[int]) -> bool:
        """Returns True if every value is an address of memory that the CUDA driver knows."""
        return all(self._library.sequence_is_known_memory(value) for value in values)

    def may_be_padding(self, node: int, word: int) -> bool:
        """Returns True if a word is part of a struct.

        Launchers of CuTe-DSL and torch leave what the host's stack held between the members of a struct.
        """
        return bool(self._library.sequence_may_be_padding(self.handle, node, word * _WORD))

    def may_be_address(self, node: int, word: int) -> bool:
        """Returns False if no parameter has all bytes of a word, so that smaller values are there."""
        return bool(self._library.sequence_may_be_address(self.handle, node, word * _WORD))

    def name(self, node: int) -> str:
        """Returns the name of a node's kernel."""
        return self._library.sequence_name(self.handle, node).decode()

    def relocate(self, node: int, word: int, base: int, offset: int) -> None:
        """Declares a word of a node's block to be an address."""
        if not self._library.sequence_relocate(self.handle, node, word * _WORD, base, offset):
            raise UnrecordableError(f"word {word} of launch {node} cannot be relocated")


@dataclass
class Run:
    """The launches of one run of a function, and the memory that they refer to.

    num_fixed: the first buffers, which exist before the run. starts, sizes, allocated, freed: of each buffer. Positions
    are (pass, number of launches before).
    """

    num_fixed: int = 0
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    allocated: list[tuple[int, int]] = field(default_factory=list)
    freed: dict[int, tuple[int, int]] = field(default_factory=dict)
    passes: list[Launches] = field(default_factory=list)

    def living_at(self, position: tuple[int, int]) -> "_Buffers":
        """Returns the buffers that a launch at this position can refer to."""
        never = (BACKWARD + 1, 0)
        living = [
            index
            for index, allocated in enumerate(self.allocated)
            if index < self.num_fixed or allocated <= position < self.freed.get(index, never)
        ]
        return _Buffers(self, living)

    def allocates_at(self, value: int) -> bool:
        """Returns True if the run allocates memory around this value, sooner or later."""
        buffers = zip(self.starts[self.num_fixed :], self.sizes[self.num_fixed :], strict=True)
        return any(start <= value < start + size for start, size in buffers)

    def freed_at(self, position: tuple[int, int]) -> "_Buffers":
        """Returns the buffers that a launch at this position cannot refer to any more."""
        return _Buffers(self, [index for index, freed in self.freed.items() if freed <= position])


class _Buffers:
    """Finds the buffer that holds an address."""

    def __init__(self, run: Run, indices: Iterable[int]) -> None:
        self._run, self._by_address = run, sorted(indices, key=run.starts.__getitem__)
        self._starts = [run.starts[index] for index in self._by_address]

    def holding(self, address: int) -> set[tuple[int, int]]:
        """Returns (buffer, offset) of each buffer that holds the address, or ends at it."""
        last = bisect_right(self._starts, address)
        found = set()
        for index in self._by_address[max(last - 3, 0) : last]:
            offset = address - self._run.starts[index]
            if offset <= self._run.sizes[index]:
                found.add((index, offset))
        return found

    def in_front_of(self, address: int) -> set[tuple[int, int]]:
        """Returns (buffer, offset) of all buffers that may be meant by an address of quack's for TMA.

        The distance can be larger than the tensor's address. Then the address is a negative number of 57 bits.
        """
        if address >> _TMA_BITS:
            return set()
        number = _signed(address, _TMA_BITS)
        offsets = ((index, number - start) for index, start in zip(self._by_address, self._starts, strict=True))
        return {(index, offset) for index, offset in offsets if offset < 0 and offset % _TMA_SHIFT == 0}

    def distances_to(self, value: int) -> set[tuple[int, int]]:
        """Returns (buffer, value - start of the buffer in 57 bits) of all buffers."""
        return {
            (index, (value - start) % 2**_TMA_BITS) for index, start in zip(self._by_address, self._starts, strict=True)
        }


def find_addresses(number: int, one: Run, others: Sequence[Run]) -> list[Address]:
    """Compares one pass of all runs. Returns the words of its launches that are addresses."""
    launches = one.passes[number]
    if any(launches.differs_from(other.passes[number]) for other in others):
        raise UnrecordableError("two runs launch different kernels")
    found = []
    for node in range(launches.num_nodes):
        blocks = [run.passes[number].block(node) for run in (one, *others)]
        living = [run.living_at((number, node)) for run in (one, *others)]
        freed = [run.freed_at((number, node)) for run in (one, *others)]
        for word, values in enumerate(zip(*map(_words, blocks), strict=True)):
            place = _place_of(values, living, freed, (one, *others), launches, node, word)
            if place is not None:
                found.append(Address(node, word, *place))
    return found


def _signed(value: int, bits: int = 64) -> int:
    return value - 2**bits if value >> (bits - 1) else value


def _words(block: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(block) // _WORD}Q", block)


def _place_of(
    values: Sequence[int],
    living: Sequence[_Buffers],
    freed: Sequence[_Buffers],
    runs: Sequence[Run],
    launches: Launches,
    node: int,
    word: int,
) -> tuple[int, int] | None:
    """Returns the only (buffer, offset) that explains a word's values in all runs, or None if it is a constant."""
    one, is_equal = runs[0], len(set(values)) == 1
    if (is_equal and abs(_signed(values[0])) < _NO_ADDRESS) or not launches.may_be_address(node, word):
        return None
    is_known = launches.is_known_memory(set(values))
    # What a run allocates is elsewhere in the other runs, but a number may happen to lie there.
    is_number = is_equal and (not is_known or any(run.allocates_at(values[0]) for run in runs))
    in_struct = launches.may_be_padding(node, word)
    if is_number and abs(_signed(values[0])) < _TMA_SHIFT:
        return None
    places = _held_in_all_runs(values, living)
    if len(places) > 1:  # the end of one tensor can be the start of the next
        places = {(index, offset) for index, offset in places if offset < one.sizes[index]}
        # What lies at an input's address in every run is the input.
        inputs = {(index, offset) for index, offset in places if index < one.num_fixed}
        places = inputs if len(inputs) == 1 and len({offset for _, offset in places}) == 1 else places
    if not places and in_struct and (is_number or not is_equal):  # TMA's descriptors are structs
        places = set.intersection(*(buffers.in_front_of(value) for buffers, value in zip(living, values, strict=True)))
    if len(places) == 1:
        return places.pop()
    if not places and (is_number or (in_struct and _is_padding(values, living, freed, is_known=is_known))):
        return None
    shown = f"word {word} of launch {node} ({launches.name(node)}) is {', '.join(f'{value:#x}' for value in values)}"
    if places:
        several = ", ".join(f"{one.sizes[index]} bytes at {offset:+}" for index, offset in sorted(places)[:4])
        raise AmbiguousError(f"{shown}, which are addresses of several tensors: {several}")
    raise UnrecordableError(f"{shown}, which is no address of a tensor of the function")


def _held_in_all_runs(values: Sequence[int], buffers: Sequence[_Buffers]) -> set[tuple[int, int]]:
    """Returns each (buffer, offset) that a word's values are in all runs."""
    return set.intersection(*(of_run.holding(value) for of_run, value in zip(buffers, values, strict=True)))


def _is_padding(
    values: Sequence[int], living: Sequence[_Buffers], freed: Sequence[_Buffers], *, is_known: bool
) -> bool:
    """Returns True if a word of a struct, which is no address of a tensor, is what the host's stack held there."""
    # An earlier launch may have left the address of a tensor that was freed since.
    if len(set(values)) == 1 or _held_in_all_runs(values, freed):
        return True
    # What moves with a tensor is an address, though of a kind that this file does not understand.
    if set.intersection(*(buffers.distances_to(value) for buffers, value in zip(living, values, strict=True))):
        return False
    is_half = len({value & _LOW_HALF for value in values}) == 1  # 4 bytes of padding behind a member of 4 bytes
    # The first run's memory is alive during the others, so that a tensor of theirs is elsewhere.
    repeats = values[0] in values[1:]
    return is_half or repeats or not is_known
