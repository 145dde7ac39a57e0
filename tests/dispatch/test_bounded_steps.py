"""The bound of a step, the calls in which ranks record, and what they agree about; test_recorded_steps.py has GPUs."""

import copy
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sonic_ep.dispatch.bounded_steps import BoundedSteps, LayerTransport, Step, _rounded_up
from sonic_ep.dispatch.speculation import SizeBound
from sonic_ep.groups import EPGroup
from sonic_ep.groups.order import Forward, Order
from sonic_ep.routing import AsyncSplitSizes, SplitSizes
from tests.helpers.launch import RankPool

K = 4
Ranks = Callable[[int], RankPool]


def sizes_of(tokens: int, rows: int, pairs: int) -> AsyncSplitSizes:
    """Two ranks, of which rank 1 gets most."""
    rows_SQ, pairs_SQ = (((0, value // 2), (0, value - value // 2)) for value in (rows, pairs))
    sizes = SplitSizes((tokens, tokens // 2), rows_SQ, pairs_SQ)
    return AsyncSplitSizes(torch.empty(0), 2, known=sizes)


def steps_of(group: EPGroup, *, static: bool = False, symmetric: bool = True) -> BoundedSteps:
    transport: Any = SimpleNamespace(capacity_of_counts=7)
    via = LayerTransport(transport, 16, torch.device("cpu"), static) if symmetric else None
    return BoundedSteps(group, K, lambda _: None, lambda _: via)


def layer(*, training: bool = True) -> Any:
    return SimpleNamespace(training=training)


def begun(steps: BoundedSteps, each: Any) -> Step:
    step = steps.begin(each)
    assert step is not None
    return step


@given(tokens=st.integers(0, 40000), rows=st.integers(0, 300000), fewer=st.integers(0, 9000))
def test_a_bound_holds_the_last_step_and_little_more(tokens: int, rows: int, fewer: int) -> None:
    steps, split_sizes = steps_of(EPGroup.alone()), sizes_of(tokens, rows, max(rows - fewer, 0))
    steps.observe(split_sizes)
    bound = begun(steps, layer()).bound
    assert bound is not None
    assert bound.holds(SizeBound.needed_by(split_sizes.read()))
    assert bound.rows <= rows * 33 / 32 + max(tokens * K, rows * 33 / 32) / 8 + 129
    assert bound.pairs == bound.rows


def test_sizes_that_differ_little_share_a_bound() -> None:
    steps, bounds = steps_of(EPGroup.alone()), set()
    for rows in range(32000, 36000, 100):
        steps.observe(sizes_of(8192, rows, rows))
        bounds.add(begun(steps, layer()).bound)
    assert len(bounds) <= 3


@pytest.mark.parametrize(("size", "level"), [(5000, 5120), (8192, 8192), (8193, 8704), (17000, 17408), (33000, 34816)])
def test_levels_of_8192_rows(size: int, level: int) -> None:
    assert _rounded_up(size, 8192) == level


def test_few_levels_lie_between_a_balanced_step_and_the_most_skewed() -> None:
    steps, bounds = steps_of(EPGroup.alone()), set()
    for rows in range(32768, 8 * 32768, 500):
        steps.observe(sizes_of(8192, rows, rows))
        bounds.add(begun(steps, layer()).bound)
    assert len(bounds) <= 3 * 16 + 1


def bounds_of(needs: Iterable[int]) -> list[int]:
    """The rows of the bound after each step, which needed so many."""
    steps, bounds = steps_of(EPGroup.alone()), []
    for rows in needs:
        steps.observe(sizes_of(8192, rows, rows))
        bound = begun(steps, layer()).bound
        assert bound is not None
        bounds.append(bound.rows)
    return bounds


def test_a_bound_grows_at_once_and_shrinks_over_all_levels_at_once() -> None:
    bounds = bounds_of((32000, 48000, *[32000] * 300))
    assert bounds[1] >= 48000
    assert all(bound == bounds[1] for bound in bounds[1:65])
    assert set(bounds) == {bounds[0], bounds[1]}
    assert set(bounds[128:]) == {bounds[0]}


@given(needs=st.lists(st.integers(1, 99000), min_size=1, max_size=200))
def test_a_bound_holds_the_largest_of_this_window_of_64_steps_and_the_last(needs: list[int]) -> None:
    for number, bound in enumerate(bounds_of(needs), 1):
        length = number % 64 + (64 if number >= 64 else 0)
        assert [bound] == bounds_of([max(needs[number - length : number])])


def test_a_bound_holds_all_lengths_of_a_window() -> None:
    steps = steps_of(EPGroup.alone())
    for tokens in (6000, 8192, 1024):
        steps.observe(sizes_of(tokens, K * tokens, K * tokens))
    step = begun(steps, layer())
    assert step.bound == SizeBound(8192, 34816, 34816)
    assert step.via.transport.least_tokens == 8192
    assert step.tokens == 8192


def test_ranks_of_which_one_is_in_another_mode_begin_alike() -> None:
    """The exchange of counts finds that, so they must come to it in the same way."""
    steps = steps_of(EPGroup.alone())
    steps.observe(sizes_of(8192, 32000, 32000))
    assert begun(steps, layer(training=False)).bound == begun(steps, layer()).bound


def test_the_code_runs_before_sizes_are_known_and_without_symmetric_memory() -> None:
    steps = steps_of(EPGroup.alone())
    assert steps.begin(layer()) is None
    steps.observe(None)  # nothing was gathered
    assert steps.begin(layer()) is None
    steps.observe(sizes_of(8, 32, 32))
    assert steps.begin(layer()) is not None
    assert copy.deepcopy(steps).begin(layer()) is None
    other = steps_of(EPGroup.alone(), symmetric=False)
    other.observe(sizes_of(8, 32, 32))
    assert other.begin(layer()) is None


def test_ranks_record_in_the_first_calls_and_then_rarely() -> None:
    steps = steps_of(EPGroup.alone())
    steps.observe(sizes_of(8, 32, 32))
    times = [number for number in range(1, 70) if begun(steps, layer()).may_record]
    assert times == [1, 2, 3, 4, 8, 16, 32, 64]
    steps.observe(sizes_of(8, 3200, 3200))
    assert begun(steps, layer()).may_record  # the first call with this bound


def test_ranks_record_with_the_first_8_bounds_alone() -> None:
    steps, may_record = steps_of(EPGroup.alone()), []
    for rows in [*(2000 * number for number in range(1, 11)), 20000]:
        steps.observe(sizes_of(8, rows, rows))
        may_record.append(begun(steps, layer()).may_record)
    assert may_record == [True] * 8 + [False] * 3
    assert len(steps._recorded) == 8


def test_memory_for_a_bound_is_there_before_the_code_runs_with_it() -> None:
    steps, calls, bound = steps_of(EPGroup.alone()), [], SizeBound(8, 128, 128)
    steps._mailbox = cast(Any, object())
    transport: Any = SimpleNamespace(
        reserve=lambda *given: calls.append(given), bounded_by=lambda *given: calls.append(given)
    )
    steps.bounded(Step(LayerTransport(transport, 16, torch.device("cpu"), False), bound, 8, may_record=False))
    assert calls == [(16, bound), (bound,)]


def test_static_buffers_hold_every_step() -> None:
    steps = steps_of(EPGroup.alone(), static=True)
    steps.observe(sizes_of(8, 32, 32))
    small = begun(steps, layer())
    steps.observe(sizes_of(8, 3200, 3200))
    assert small.bound is None
    assert begun(steps, layer()).key == small.key


def agreements(rank: int) -> list[bool]:
    steps = steps_of(EPGroup())
    each = layer()
    with torch.set_grad_enabled(rank == 0):
        unlike = steps.agreed(each, None)
    return [
        steps.agreed(each, None),
        steps.agreed(each, "hooks" if rank else None),
        steps.agreed(each, None, known=rank == 0),
        steps.agreed(each, None, known=True),
        unlike,
        steps.agreed(layer(training=rank == 0), None),
    ]


def test_ranks_agree(ranks: Ranks) -> None:
    assert ranks(2).run(agreements) == [[True, False, True, False, False, False]] * 2


def test_what_prevents_repetition() -> None:
    steps = steps_of(EPGroup.alone())
    steps.observe(sizes_of(8, 32, 32))
    step = begun(steps, layer())
    assert steps.problem_with_call(step, 8) is None
    assert steps.problem_with_call(step, 9) == "there are 9 tokens, and buffers for 8"
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert steps.problem_with_call(step, 8) == "saved-tensor hooks"


def test_an_exchange_sends_the_order_of_backwards() -> None:
    """By value, in place of the address with which it was recorded."""
    group, mailbox = EPGroup.alone(), SimpleNamespace(values=torch.zeros(1), order=torch.zeros(1), empty=lambda: None)
    other, steps = Order(), steps_of(group)
    steps._mailbox = cast(Any, mailbox)
    transport: Any = SimpleNamespace(raise_if_lost=lambda: None, memory=lambda *_: [])
    step = Step(LayerTransport(transport, 16, torch.device("cpu"), False), None, 8, may_record=False)
    for _ in range(3):
        begin_backward, expected = steps.start(), other.send()
        with steps.captured():
            assert steps.state(step) == [mailbox.values, mailbox.order]
        assert [each.data_ptr() for each in steps.state(step)] == [mailbox.values.data_ptr(), expected]
        for _ in range(2):
            begin_backward()
            other.add(Forward(0, other.exchange))
    assert group.order.ran() == other.ran()


def test_a_bad_status_is_raised() -> None:
    def check(fields: list[int]) -> None:
        raise ValueError(fields)

    steps: Any = BoundedSteps(EPGroup.alone(), K, check, lambda _: None)
    steps._mailbox = SimpleNamespace(read=lambda: [5, 20, 20, 5, 16, 0])
    with pytest.raises(ValueError, match=r"\[5, 16, 0\]"):
        steps.finish(Step(None, SizeBound(5, 128, 128), 5, may_record=False))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("rows", "holds"), [(128, True), (129, False)])
def test_sizes_beyond_the_bound_are_returned(rows: int, holds: bool) -> None:
    steps: Any = steps_of(EPGroup.alone())
    steps._mailbox = SimpleNamespace(read=lambda: [5, rows, 20, 5, 2, 0])
    sizes = steps.finish(Step(None, SizeBound(5, 128, 128), 5, may_record=False))  # pyright: ignore[reportArgumentType]
    assert (sizes is None) == holds
    assert begun(steps, layer()).bound.rows == 256  # learned in either case
