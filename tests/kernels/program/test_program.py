"""A program launches what its pass launches, at any sizes; here kernels are callbacks, and memory is the CPU's."""

import ctypes
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep.kernels.program import native, program
from sonic_ep.kernels.program.c_library import UnavailableError, compiled_library
from sonic_ep.kernels.program.program import Program
from sonic_ep.kernels.program.trace import Slot, Trace, by_torch, current_trace

tvm_ffi = pytest.importorskip("tvm_ffi")
pytest.importorskip("triton")
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t, ctypes.c_void_p)
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
_STREAM = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)


class Kernel(NamedTuple):
    """What a program knows of a kernel. This one adds: out[i] = a[i] + factor * b[i] for grid[0] * 4 elements."""

    function: int = 1
    passed: tuple[int, ...] = (0, 1, 2, 3)
    threads: int = 32
    shared_bytes: int = 0
    overlaps: bool = False


class FakeLauncher:
    def variant(self, kinds: list[Any], named: dict[str, object]) -> Kernel:
        assert kinds[:3] == [torch.float32] * 3
        return Kernel()


ADD = FakeLauncher()


def floats(address: int, number: int) -> Any:
    return (ctypes.c_float * number).from_address(address)


@_LAUNCH
def add(config: int, function: int, parameters: int, _: int) -> int:
    (grid,) = struct.unpack("I", ctypes.string_at(config, 4))
    places = struct.unpack("4Q", ctypes.string_at(parameters, 32))
    a, b, out = (floats(*struct.unpack("Q", ctypes.string_at(place, 8)), 4 * grid) for place in places[:3])
    (factor,) = struct.unpack("f", ctypes.string_at(places[3], 4))
    for i in range(4 * grid):
        out[i] = a[i] + factor * b[i]
    return 0


@_SET
def zero(address: int, value: int, size: int, stream: int) -> int:
    ctypes.memset(address, value, size)
    return 0


@_CALL
def negate(function: int, arguments: int, number: int, result: int) -> int:
    """Of tvm-ffi, it negates a tensor in place: its first argument, whose number of elements is the second."""
    _, tensor, _, elements = struct.unpack("qQqQ", ctypes.string_at(arguments, 32))
    data, *_, shape, _, _ = struct.unpack("QiiiBBHQQQ", ctypes.string_at(tensor, 48))
    (size,) = struct.unpack("q", ctypes.string_at(shape, 8))
    if number != 2 or size != elements:
        return 1
    values = floats(data, size)
    for i in range(size):
        values[i] = -values[i]
    return 0


@_STREAM
def stream(*_: Any) -> int:
    return 0


@_STREAM
def unused(*_: Any) -> int:
    return 1


class Fake:
    """A function of tvm-ffi."""

    def __chandle__(self) -> int:
        return 1


@pytest.fixture
def runs() -> Any:
    try:
        library = ctypes.PyDLL(str(compiled_library()))
    except UnavailableError as error:
        pytest.skip(str(error))
    launch = native.bound(library, add, zero, *[unused] * 3, negate, stream, *native.functions_of_torch("cpu"))
    with (
        patch.object(program, "launcher", lambda: launch),
        patch.object(program, "raw_stream", lambda _: 0),
        patch.object(program, "ensure_context", lambda _: None),
    ):
        yield


def launch(a: Slot, b: Slot, out: Slot, factor: Any) -> None:
    a.trace.launch(ADD.variant, (-(-out.numel() // 4),), (a, b, out, factor), {})


def two_passes(T_: int, width: int) -> tuple[Program, Callable[..., Program]]:
    """x -> y = x + 2 * (x + 0), count = 0 * x[:4] + 3 * x[:4], later = -(x + y)."""
    trace = Trace(torch.device("cpu"), {"T": T_}, {"T": 8192})
    (T,) = trace.sizes
    with trace:
        x = trace.input((width * T,), torch.float32)
        zeros = trace.empty((width * T,), torch.float32).zero_()
        same = x.new_empty(width * T)
        launch(x, zeros, same, 1.0)
        y, counts = x.new_empty(width * T), x.new_empty(4)
        launch(x, same, y, 2.0)
        launch(zeros, x, counts, 3.0)
        del zeros, same
        later = x.new_empty(width * T)
        launch(x, y, later, 1.0)
        trace.foreign(Fake(), (later, width * T))
        trace.finish()
    forward = Program(trace, [0], [y], [later], [counts])

    def backward() -> Program:
        other = Trace.like(trace)
        with other:
            (start,) = forward.in_block
            whole = other.input((width * T,), torch.float32 if start is None else torch.uint8)
            part = whole if start is None else other.part(whole, start, (width * T,), torch.float32)
            out = part.trace.empty((width * T,), torch.float32)
            launch(part, part, out, 1 / T)
            other.finish()
        return Program(other, [0], [out])

    return forward, backward


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("width", [4, 64])  # the second has a tensor of its own for what backward needs
@pytest.mark.parametrize("traced", [3, 70_000])
def test_any_size(traced: int, width: int) -> None:
    forward, backward = two_passes(traced, width)
    assert (forward.in_block == [None]) == (width == 64)
    second = backward()
    for T in (3, 5, 5, 1, 2):
        assert forward.fits(T)
        x = torch.randn(width * T)
        y, counts, later = forward.run((T,), [x])
        torch.testing.assert_close(y, 3 * x)
        torch.testing.assert_close(counts, 3 * x[:4])
        (out,) = second.run((T,), [later])
        torch.testing.assert_close(out, -4 * x * (1 + 1 / T))


@pytest.mark.usefixtures("runs")
def test_an_unaligned_input_is_copied() -> None:
    forward, _ = two_passes(3, 4)
    x: Tensor = torch.randn(13)[1:]
    assert x.data_ptr() % 16
    torch.testing.assert_close(forward.run((3,), [x])[0], 3 * x)


@pytest.mark.usefixtures("runs")
def test_a_call_that_fails_is_named() -> None:
    trace = Trace(torch.device("cpu"), {"T": 2}, {"T": 8192})
    with trace:
        x = trace.input((8,), torch.float32)
        y = x.new_empty(8)
        launch(x, x, y, 1.0)
        trace.foreign(Fake(), (y, 7))
        trace.finish()
    with pytest.raises(RuntimeError, match="item 2"):
        Program(trace, [0], [y]).run((2,), [torch.zeros(8)])


@pytest.mark.usefixtures("runs")
def test_products_are_added() -> None:
    trace = Trace(torch.device("cpu"), {"T": 2}, {"T": 8192})
    (T,) = trace.sizes
    with trace:
        x, weight = trace.input((T, 8), torch.float32), trace.input((6, 5), torch.float32)
        y = x.new_empty(T, 5).zero_()
        y.addmm_(x.as_strided((T, 6), (8, 1)), weight)
        trace.finish()
    program = Program(trace, [0, 1], [y])
    for T in (2, 7):
        x, weight = torch.randn(T, 8), torch.randn(6, 5)
        torch.testing.assert_close(program.run((T,), [x, weight])[0], x[:, :6] @ weight)


def scaled(values: Tensor, numbers: list[int]) -> Tensor:
    return values[: numbers[0]] * numbers[1]


def joined(one: Tensor, two: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.cat((one, two), out=out)


@pytest.mark.usefixtures("runs")
def test_functions_of_torch_get_tensors_and_numbers() -> None:
    trace = Trace(torch.device("cpu"), {"T": 2}, {"T": 8192})
    (T,) = trace.sizes
    with trace:
        x: Any = trace.input((2 * T,), torch.float32)
        twice: Any = by_torch(scaled, (T,), torch.float32, x, (T, 3))
        y: Any = by_torch(joined, (3 * T,), torch.float32, twice, x, into=True)
        launch(y, y, y, 1.0)
        trace.finish()
    program = Program(trace, [0], [y])
    for T in (4, 8):
        x = torch.randn(2 * T)
        (found,) = program.run((T,), [x])
        torch.testing.assert_close(found, 2 * torch.cat((3 * x[:T], x)))


@pytest.mark.usefixtures("runs")
def test_a_function_of_torch_writes_to_a_part_of_a_tensor() -> None:
    trace = Trace(torch.device("cpu"), {"T": 2}, {"T": 8192})
    (T,) = trace.sizes
    with trace:
        x: Any = trace.input((T,), torch.float32)
        y = trace.empty((2 * T + 3,), torch.float32).zero_()
        part: Any = y[: 2 * T]
        assert by_torch(joined, part.shape, torch.float32, x, x, into=True, out=part) is part
        trace.finish()
    program = Program(trace, [0], [y])
    for T in (2, 5):
        x = torch.randn(T)
        torch.testing.assert_close(program.run((T,), [x])[0], torch.cat((x, x, torch.zeros(3))))


@pytest.mark.usefixtures("runs")
def test_a_function_that_fails_leaves_no_memory() -> None:
    trace = Trace(torch.device("cpu"), {"T": 2}, {"T": 8192})
    with trace:
        x: Any = trace.input((2,), torch.float32)
        y: Any = by_torch(joined, (5,), torch.float32, x)
        trace.finish()
    program, freed = Program(trace, [0], [y]), list[object]()
    with (
        patch.object(Program, "_free", lambda _, values: freed.append(values)),
        pytest.raises(TypeError, match="missing 1 required"),
    ):
        program.run((2,), [torch.zeros(2)])
    assert len(freed) == 1


def test_what_another_lane_drops_is_freed_when_the_first_has_waited() -> None:
    trace = Trace(torch.device("cpu"), {}, {})
    with trace:
        x = trace.input((4,), torch.float32)
        with trace.on_lane(1):
            one = x.new_empty(4)
            index = one.buffer.index
            del one
            first = trace.event()
            two = x.new_empty(4)
            del two
            trace.event()
        assert not any(item[0] == "free" for item in trace.items)
        trace.wait(first)
        assert [item for item in trace.items if item[0] == "free"] == [("free", index)]
        trace.finish()


@pytest.mark.usefixtures("runs")
def test_memory_is_freed_where_the_pass_frees_it() -> None:
    trace = Trace(torch.device("cpu"), {"T": 2}, {"T": 8192})
    (T,) = trace.sizes
    with trace:
        x, other = trace.input((T,), torch.float32), trace.input((T,), torch.float32)
        y = x.new_empty(T)
        launch(x, x, y, 1.0)
        inputs = [x.buffer.index, other.buffer.index]
        del x, other
        z = y.new_empty(T)
        launch(y, y, z, 1.0)
        del y
        trace.finish()
    program, freed = Program(trace, inputs, [z]), list[int]()
    given = [torch.ones(1_000), torch.ones(1_000)]
    weakref.finalize(given[0], freed.append, 0)
    weakref.finalize(given[1], freed.append, 1)
    with patch.object(torch, "empty", side_effect=AssertionError):
        (z,) = program.run((1_000,), given)
    assert freed == [0, 1]
    assert given == []
    torch.testing.assert_close(z, torch.full((1_000,), 4.0))


@pytest.mark.usefixtures("runs")
def test_without_memory() -> None:
    forward, _ = two_passes(3, 64)
    with pytest.raises((RuntimeError, torch.OutOfMemoryError), match="memory|storage"):
        forward.run((2**50,), [torch.zeros(4)])


def test_other_threads_launch_while_one_traces() -> None:
    found = list[object]()
    with Trace(torch.device("cpu"), {}, {}) as trace:
        thread = threading.Thread(target=lambda: found.append(current_trace()))
        thread.start()
        thread.join()
        assert current_trace() is trace
    assert found == [None]
    assert current_trace() is None


def test_a_sample_is_like_its_slot() -> None:
    trace = Trace(torch.device("cpu"), {"T": 2**20}, {"T": 8192})
    (T,) = trace.sizes
    sample = trace.input((8, T, 64), torch.bfloat16).mT.sample()
    assert (sample.shape, sample.stride()) == ((8, 64, 2**20), (2**26, 1, 64))
    assert (sample.dtype, sample.device.type) == (torch.bfloat16, "cpu")


VIEWS: dict[str, Callable[[Any], Any]] = {
    "mT": lambda t: t.mT,
    "row": lambda t: t[1],
    "last": lambda t: t[-1],
    "rest": lambda t: t[1:],
    "as_strided": lambda t: t.as_strided((2, 3), (5, 1), 4),
    "view": lambda t: t.view(torch.int32),
    "row of the rest": lambda t: t[1:][1],
    "second half": lambda t: t.chunk(2, 0)[1],
    "last part": lambda t: t.split([1, 3])[1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_those_of_tensors(name: str) -> None:
    trace = Trace(torch.device("cpu"), {}, {})
    slot, tensor = trace.input((4, 3, 5), torch.float32), torch.zeros(4, 3, 5)
    found, wanted = VIEWS[name](slot), VIEWS[name](tensor)
    assert (*found.shape,) == (*wanted.shape,)
    assert (*found.strides,) == wanted.stride()
    assert found.offset == wanted.storage_offset()
    assert found.dtype == wanted.dtype
    assert found.is_contiguous() == wanted.is_contiguous()
