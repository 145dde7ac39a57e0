"""The bound of a step, and what ranks learn of steps; test_ranks_as_programs.py has GPUs."""

import copy
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from sonic_ep.dispatch.bounded_steps import BoundedSteps, LayerTransport, Step
from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.groups import EPGroup
from sonic_ep.groups.order import Forward, Order, Ran
from sonic_ep.routing import AsyncSplitSizes, SplitSizes

K = 4


def sizes_of(tokens: int, rows: int, pairs: int) -> AsyncSplitSizes:
    """Two ranks, of which rank 1 gets most."""
    rows_SQ, pairs_SQ = (((0, value // 2), (0, value - value // 2)) for value in (rows, pairs))
    sizes = SplitSizes((tokens, tokens // 2), rows_SQ, pairs_SQ)
    return AsyncSplitSizes(torch.empty(0), 2, known=sizes)


def steps_of(group: EPGroup, *, static: bool = False, symmetric: bool = True, held: int = 10**6) -> BoundedSteps:
    """held: pairs that the present buffers hold."""
    transport: Any = SimpleNamespace(asked=[])
    transport.holds = lambda *given: transport.asked.append(given) or given[1].pairs <= held
    via = LayerTransport(transport, 16, torch.device("cuda"), static) if symmetric else None
    return BoundedSteps(group, lambda *_: None, lambda _: via)


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
    assert bound.rows <= rows * 33 / 32 + 128
    assert bound.pairs == bound.rows


def bounds_of(needs: Iterable[int]) -> list[int]:
    """The rows of the bound after each step, which needed so many."""
    steps, bounds = steps_of(EPGroup.alone()), []
    for rows in needs:
        steps.observe(sizes_of(8192, rows, rows))
        bound = begun(steps, layer()).bound
        assert bound is not None
        bounds.append(bound.rows)
    return bounds


def test_a_bound_grows_at_once_and_shrinks_after_a_window() -> None:
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
    assert step.bound == SizeBound(8192, 33792, 33792)
    assert step.via.transport.least == step.bound
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


def test_without_memory_for_a_bound_the_code_runs_and_allocates_it() -> None:
    """Before ranks have met, one of them may be in another layer or mode, and allocate otherwise."""
    steps, bound = steps_of(EPGroup.alone(), held=50), SizeBound(8, 128, 128)
    steps.observe(sizes_of(8, 100, 100))
    assert steps.begin(layer()) is None
    transport = cast(Any, steps)._transport_of(None).transport
    assert (transport.asked, transport.least) == ([(16, bound)], bound)
    steps = steps_of(EPGroup.alone(), held=128)
    steps.observe(sizes_of(8, 100, 100))
    assert begun(steps, layer()).bound == bound


def test_static_buffers_hold_every_step() -> None:
    steps = steps_of(EPGroup.alone(), static=True)
    steps.observe(sizes_of(8, 32, 32))
    step = begun(steps, layer())
    assert step.bound is None
    assert step.holds(sizes_of(8, 3200, 3200).read())
    assert not cast(Any, step.via.transport).asked


def recomputed(steps: BoundedSteps, needs: list[int], *, as_code: bool = False) -> list[tuple[Any, ...]]:
    """What is decided for a call in each of several regions, and what for their recomputations, in reverse.

    needs: rows of the step after each region, whose bound may be another then.
    """
    found: list[tuple[Any, ...]] = []

    def region(x: torch.Tensor) -> torch.Tensor:
        step = steps.begin(layer())
        steps.decided(as_code=as_code)
        found.append((step, cast(Any, steps)._transport_of(None).transport.least, steps.repeats_code))
        return x.exp().exp()

    losses = []
    for rows in needs:
        losses.append(checkpoint(region, torch.zeros(2, requires_grad=True), use_reentrant=False).sum())
        steps.observe(sizes_of(8, rows, rows))
    for loss in reversed(losses):
        loss.backward()
    return found


@pytest.mark.parametrize("static", [False, True])
def test_a_recomputation_has_the_bound_of_its_forward(static: bool) -> None:
    steps = steps_of(EPGroup.alone(), static=static)
    needs = [100, 5000, 90000]
    found = recomputed(steps, needs)
    first, second, third, *again = found
    assert again == [third, second, first]
    assert first == (None, None, False)  # no sizes were known
    assert second[1] == SizeBound(8, 128, 128)
    assert third[1] == SizeBound(8, 5248, 5248)
    assert static or third[0].bound == third[1]
    order = steps._group.order
    assert [ran.in_region for ran in order.ran()[1]] == [True] * 2 * len(needs)


def test_where_a_forward_ran_code_its_recomputation_does() -> None:
    found = recomputed(steps_of(EPGroup.alone()), [100, 100], as_code=True)
    assert [repeats for *_, repeats in found] == [False, False, True, True]


def test_a_bound_outside_of_regions_is_the_last() -> None:
    steps, group = steps_of(EPGroup.alone()), EPGroup.alone()
    recomputed(steps, [100, 5000])
    with torch.autograd.graph.save_on_cpu():
        assert begun(steps, layer()).bound == SizeBound(8, 5248, 5248)
    assert not steps.repeats_code
    assert not group.order.ran()[1]


def steps_with_statuses(*statuses: int) -> Any:
    """Steps whose programs bring these status words, one after the other. A check raises every word but 0."""

    def check(fields: list[int], sent: list[Ran]) -> None:
        if fields[1]:
            raise ValueError(fields, sent)

    steps: Any = BoundedSteps(EPGroup.alone(), check, lambda _: None)
    words = iter(statuses)
    steps._mailbox = SimpleNamespace(read=lambda: torch.tensor([5, 20, 20, 5, next(words), 0]))
    return steps


def test_an_exchange_sends_the_order_of_backwards() -> None:
    other, steps = Order(), steps_with_statuses(0, 0)
    group = steps._group
    for _ in range(3):
        begin_backward, expected = steps.start(), other.send()
        assert steps.order_of_step == expected
        for _ in range(2):
            begin_backward()
            other.add(Forward(0, other.exchange))
    assert group.order.ran() == other.ran()


STEP: Any = Step(None, SizeBound(5, 128, 128), 5)  # pyright: ignore[reportArgumentType]


def test_a_bad_status_is_raised() -> None:
    steps = steps_with_statuses(16)
    steps.start()
    with pytest.raises(ValueError, match=r"\[5, 16, 0\], \[\]"):
        steps.finish(STEP)


def test_a_bad_status_of_a_recomputation_is_raised_in_the_next_forward() -> None:
    """torch stops it ahead of `finish`. By then other layers have sent what has run since."""
    steps = steps_with_statuses(0, 16, 0)
    steps.start()()
    steps.finish(STEP)
    begin_backward = steps.start()  # of the recomputation
    begin_backward()
    steps._group.order.send()  # in another layer's
    with pytest.raises(ValueError, match=r"\[5, 16, 0\], \[Ran") as raised:
        steps.start()
    assert raised.value.args[1] == [Ran(Forward(0, 1))]
    steps.start()
    assert steps.finish(STEP) is None


@pytest.mark.parametrize(("rows", "holds"), [(128, True), (129, False)])
def test_sizes_beyond_the_bound_are_returned(rows: int, holds: bool) -> None:
    steps: Any = steps_of(EPGroup.alone())
    steps._mailbox = SimpleNamespace(read=lambda: torch.tensor([5, rows, 20, 5, 2, 0]))
    steps.start()
    sizes = steps.finish(STEP)
    assert (sizes is None) == holds
    assert begun(steps, layer()).bound.rows == 256  # learned in either case
