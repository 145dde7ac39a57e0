"""A repeated recording: the addresses that its kernels get, the tensors it returns, and the memory it holds when.

On a driver without a GPU, so nothing is computed. The recording is of a function y = f(x, w) with one state tensor,
which saves a large tensor H and a small one for backward:

    forward     1(x, small) 2(small, state, H)  3(H, temporary)  4(temporary, y)
    backward    5(dy, H, dH)  [H is freed]  6(dH, w, dx)  7(dH, small, dw, workspace)
"""

import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from sonic_ep.kernels.launch_sequence import addresses, replay
from sonic_ep.kernels.launch_sequence.addresses import BACKWARD, FORWARD, Address, Launches
from sonic_ep.kernels.launch_sequence.driver import library
from sonic_ep.kernels.launch_sequence.recorder import Buffer, Place, Recording
from sonic_ep.kernels.launch_sequence.replay import Replay
from sonic_ep.kernels.launch_sequence.workspace import workspace_of_stream
from tests.helpers.fake_driver import FakeGraph

STREAM, SHIFT = 77, -(2**34)
ROWS, LARGE = 300, 2**22
X, W, DY, STATE, WORKSPACE, SMALL, H, TEMPORARY, Y, DH, DX, DW, STATS = range(13)
SIZES = [4 * ROWS, 40, 4 * ROWS, 16, 640, 100, LARGE, LARGE, 4 * ROWS, LARGE, 4 * ROWS, 40, 24]


@pytest.fixture(autouse=True)
def _without_a_gpu(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "driver", library)
    monkeypatch.setattr(replay, "driver", library)
    monkeypatch.setattr(replay, "raw_stream", lambda _: STREAM)


def launches(graph: FakeGraph, first: int, operands: list[list[int]]) -> tuple[Launches, list[Address]]:
    graph.reset()
    for node, buffers in enumerate(operands):
        graph.kernel(first + node, *[0] * len(buffers), after=[node - 1] if node else [])
    addresses = [
        Address(node, word, buffer, SHIFT if buffer == H else 4 if buffer == STATE else 0)
        for node, buffers in enumerate(operands)
        for word, buffer in enumerate(buffers)
    ]
    return Launches(1), addresses


@pytest.fixture
def repeated(graph: FakeGraph) -> Replay:
    forward, to_forward = launches(graph, 1, [[X, SMALL, STATS], [SMALL, STATE, H], [H, TEMPORARY], [TEMPORARY, Y]])
    backward, to_backward = launches(graph, 5, [[DY, H, DH], [DH, W, DX], [DH, SMALL, DW, WORKSPACE]])
    lives = {
        SMALL: ((FORWARD, 0), None),
        STATS: ((FORWARD, 0), None),
        H: ((FORWARD, 1), (BACKWARD, 1)),
        TEMPORARY: ((FORWARD, 2), (FORWARD, 4)),
        Y: ((FORWARD, 3), None),
        DH: ((BACKWARD, 0), (BACKWARD, 3)),
        DX: ((BACKWARD, 1), None),
        DW: ((BACKWARD, 2), None),
    }
    buffers = [Buffer(size, *lives.get(index, ((FORWARD, 0), None))) for index, size in enumerate(SIZES)]
    events = [
        (position, is_new, index)
        for index, life in lives.items()
        for is_new, position in zip((1, 0), life, strict=True)
    ]
    events = sorted(event for event in events if event[0] is not None)
    # At one position what is freed comes first: False sorts before True.
    recording = Recording(
        num_inputs=2,
        num_fixed=5,
        buffers=buffers,
        order=[(bool(is_new), index) for _, is_new, index in events],
        passes=[forward, backward],
        addresses=[to_forward, to_backward],
        outputs=[
            Place(Y, 0, (ROWS,), (1,), torch.float32),
            Place(STATS, 8, (2,), (1,), torch.int64),
            Place(STATS, 4, (1,), (1,), torch.int32),
        ],
        gradients=[Place(DX, 0, (ROWS,), (1,), torch.float32), Place(DW, 0, (2, 5), (1, 2), torch.float32)],
    )
    return Replay(recording, [0], torch.device("cpu"))


def parameters(line: str) -> list[int]:
    return [int(word) for word in line.split(": ")[1].split()]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(ROWS, requires_grad=True), torch.randn(2, 5, requires_grad=True), torch.zeros(4)


def test_kernels_get_the_addresses_of_this_step(repeated: Replay, graph: FakeGraph) -> None:
    scratch = set()
    for _ in range(2):
        x, w, state = inputs()
        y, stats, number = repeated((x, w), lambda state=state: [state])
        (x1, small, stats1), (small2, state2, h2), (h3, temporary3), (temporary4, y4) = map(parameters, graph.log())
        assert x1 == x.data_ptr()
        assert small == small2
        assert state2 == state.data_ptr() + 4
        assert h2 == h3
        assert temporary3 == temporary4
        assert y4 == y.data_ptr()
        assert stats.data_ptr() == stats1 + 8
        assert number.data_ptr() == stats1 + 4
        dy = torch.randn(ROWS)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        (dy5, h5, dh5), (dh6, w6, dx6), (dh7, small7, dw7, scratch7) = map(parameters, graph.log())
        assert dy5 == dy.data_ptr()
        assert h5 == h2
        assert dh5 == dh6 == dh7
        assert w6 == w.data_ptr()
        assert small7 == small
        assert (dx6, dw7) == (dx.data_ptr(), dw.data_ptr())
        assert (dw.shape, dw.stride()) == ((2, 5), (1, 2))
        scratch.add(scratch7)
    assert scratch == {workspace_of_stream(torch.device("cpu"), STREAM, 1).data_ptr()}


class Integer:
    """In place of a tensor of the state."""

    def data_ptr(self) -> int:
        return 2**55 + 16 * 12345


def test_an_integer_may_stand_where_an_address_was_recorded(repeated: Replay, graph: FakeGraph) -> None:
    x, w, _ = inputs()
    y, *_ = repeated((x, w), lambda: [Integer()])
    assert parameters(graph.log()[1])[1] == Integer().data_ptr() + 4
    torch.autograd.grad(y, (x, w), y)


def test_every_backward_says_that_it_begins(repeated: Replay) -> None:
    x, w, state = inputs()
    begun: list[str] = []
    outputs = [repeated((x, w), lambda: [state], lambda name=name: begun.append(name))[0] for name in "ab"]
    assert begun == []
    outputs[1].sum().backward(retain_graph=True)
    outputs[0].sum().backward()
    outputs[1].sum().backward()
    assert begun == ["b", "a", "b"]


def test_launches_are_on_the_current_stream(repeated: Replay, graph: FakeGraph) -> None:
    x, w, state = inputs()
    repeated((x, w), lambda: [state])
    assert all(f"stream {STREAM} " in line for line in graph.log())


def test_memory_is_freed_where_the_function_freed_it(
    repeated: Replay, graph: FakeGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, weakref.ref[Tensor]]] = []
    living: list[list[int]] = []
    empty = torch.empty_strided

    def noting(shape: tuple[int, ...], *arguments: Any, **options: Any) -> Tensor:
        living.append([size for size, ref in made if ref() is not None and size == LARGE])
        tensor = empty(shape, *arguments, **options)
        made.append((tensor.nbytes, weakref.ref(tensor.untyped_storage())))
        return tensor

    monkeypatch.setattr(torch, "empty_strided", noting)
    x, w, state = inputs()
    y, *_ = repeated((x, w), lambda: [state])
    assert [ref() is not None for size, ref in made if size == LARGE] == [True, False]  # H, not the temporary tensor
    y.sum().backward()
    living_at_dx, living_at_dw = living[-2:]
    assert living_at_dx == [LARGE]  # dH, not H
    assert living_at_dw == [LARGE]
    assert [ref() is not None for size, ref in made if size == LARGE] == [False] * 3


def test_a_retained_graph_is_read_again(repeated: Replay, graph: FakeGraph) -> None:
    x, w, state = inputs()
    y, *_ = repeated((x, w), lambda: [state])
    graph.log()
    y.sum().backward(retain_graph=True)
    first = graph.log()
    y.sum().backward()
    assert parameters(graph.log()[0])[1] == parameters(first[0])[1]  # H


def test_an_output_without_a_gradient_gets_zeros(repeated: Replay) -> None:
    zeros = repeated.zeros(0)
    assert (zeros.shape, zeros.dtype) == ((ROWS,), torch.float32)
    assert not zeros.any()
    assert repeated.zeros(0) is zeros


def test_an_error_of_the_driver_is_raised(graph: FakeGraph) -> None:
    forward, addresses = launches(graph, 666, [[X, Y]])
    buffers = [Buffer(16, (FORWARD, 0), None) for _ in range(2)]
    moved = [Address(a.node, a.word, (0, 1)[a.word], 0) for a in addresses]
    place = Place(1, 0, (4,), (1,), torch.float32)
    recording = Recording(1, 1, buffers, [(True, 1)], [forward], [moved], [place], [])
    with pytest.raises(RuntimeError, match="error 719 for a recorded launch"):
        Replay(recording, [], torch.device("cpu"))((torch.zeros(4),), lambda: [])


class Number:
    """Stands for a tensor, as the order of backwards does."""

    def data_ptr(self) -> int:
        return 3


def test_state_of_another_kind_is_refused(graph: FakeGraph) -> None:
    forward, addresses = launches(graph, 1, [[X, Y]])
    buffers = [Buffer(16, (FORWARD, 0), None) for _ in range(2)]
    moved = [Address(a.node, a.word, (0, 1)[a.word], 0) for a in addresses]
    place = Place(1, 0, (4,), (1,), torch.float32)
    recording = Recording(1, 1, buffers, [(True, 1)], [forward], [moved], [place], [])
    kinds = [(torch.int64, 0), (torch.float32, 0)]
    made = Replay(recording, [], torch.device("cpu"), state_kinds=kinds)
    tensor, number = torch.zeros(4), Number()
    assert made._current(lambda: [number, tensor])[:2] == [number, tensor]
    for other in (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(5)[1:]):
        with pytest.raises(RuntimeError, match="main_grad or a buffer of the layer was replaced"):
            made._current(lambda other=other: [number, other])


def test_a_step_makes_few_calls(repeated: Replay) -> None:
    """Of our own Python, forward and backward, which is where host time goes. The code of a layer makes hundreds."""
    x, w, state = inputs()
    calls: list[str] = []

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == replay.__file__:
            calls.append(frame.f_code.co_name)

    def step() -> None:
        y, *_ = repeated((x, w), lambda: [state])
        torch.autograd.grad(y, (x, w), y)

    step()
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
    assert len([name for name in calls if name != "<listcomp>"]) <= 20, calls
