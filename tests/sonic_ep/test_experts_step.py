"""When the experts of a step run as a program, and which; tracing is replaced here, test_experts_trace.py has it."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup
from sonic_ep.dispatch.bounded_steps import LayerTransport, Step
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.expert_parallel_mlp import Call
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.routing import AsyncSplitSizes, GroupCounts, Routing, SplitSizes
from sonic_ep.steps import experts_step
from sonic_ep.steps.experts_step import ExpertsPrograms, MoECall, RunsAs
from sonic_ep.steps.experts_trace import ExpertsKind, MoEWeights
from sonic_ep.steps.programs import Ranks

T, H, I, E, K = 6, 16, 8, 4, 2  # noqa: E741


@pytest.fixture
def traced() -> Iterator[list[tuple[ExpertsKind, tuple[int, ...]]]]:
    """What was traced, by kind and sizes. Every x is on the current GPU."""
    found: list[Any] = []

    def note(kind: ExpertsKind, sizes: tuple[int, ...]) -> Any:
        found.append((kind, sizes))
        return SimpleNamespace(forward=SimpleNamespace(fits=lambda *_: True))

    with (
        patch.object(experts_step, "traced", note),
        patch.object(experts_step, "_may_run", lambda *_: True),
        patch("sonic_ep.steps.programs.launcher", lambda: None),
    ):
        yield found


def call_of(*, num_tokens: int = T, sizes: SplitSizes | None = None, **changes: Any) -> MoECall:
    counts = GroupCounts(*[torch.ones(1, E, dtype=torch.int64)] * 3, *[torch.ones(1, dtype=torch.int64)] * 3)
    known = None if sizes is None else AsyncSplitSizes(torch.empty(0), 2, known=sizes)
    pairs = K * num_tokens
    routing = Routing(torch.ones(pairs), torch.zeros(pairs, dtype=torch.int32), counts, num_tokens, split_sizes=known)
    weights = MoEWeights(torch.randn(E, 2 * I, H), None, torch.randn(E, H, I), None, None)
    call = Call(LocalTransport(), EPGroup.alone(), activation_named("swiglu"), False, False)
    given = MoECall(torch.randn(num_tokens, H), routing, weights, (None, None), call, "interleaved")
    return given._replace(**changes)


def ranks_of(generation: int = 1) -> Any:
    return Ranks(EPGroup.alone(), SimpleNamespace(), SimpleNamespace(generation=generation))  # type: ignore[arg-type]


def test_one_program_for_all_lengths_of_a_kind(traced: list[Any]) -> None:
    programs = ExpertsPrograms(K)
    for number in (T, T + 1, 2 * T):
        step = programs.step(call_of(num_tokens=number))
        assert step is not None
        assert step.sizes == (number, K * number)
    assert len(traced) == programs.num_programs == 1
    into = torch.zeros(E, 2 * I, H), None
    given = call_of()
    weights = given.weights._replace(w1=given.weights.w1.requires_grad_())
    programs.step(given._replace(weights=weights))
    programs.step(given._replace(weights=weights, into=into))
    kinds = [kind for kind, _ in traced]
    assert [(kind.needs[0], kind.into, kind.has_backward) for kind in kinds] == [
        (False, (None, None), False),
        (True, (None, None), True),
        (True, (torch.float32, None), True),
    ]


def test_programs_are_forgotten_where_buffers_have_grown(traced: list[Any]) -> None:
    programs, ranks, bound = ExpertsPrograms(K), ranks_of(), SizeBound(T, 128, 128)
    for again in (ranks, replace(ranks)):
        step = programs.step(call_of(), again, bound)
        assert step is not None
        assert step.sizes == (T, K * T, *bound)
    assert len(traced) == 1
    ranks.symmetric.generation += 1
    programs.step(call_of(), replace(ranks), bound)
    assert len(traced) == 2
    assert programs.num_programs == 1


def step_of(ranks: Any, bound: SizeBound) -> Step:
    return Step(LayerTransport(ranks.symmetric, H * 4, torch.device("cuda"), False), bound, bound.tokens)


def sizes_of(rows: int) -> SplitSizes:
    return SplitSizes((T, T), ((0, rows), (0, rows)), ((0, rows), (0, rows)))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(("rows", "exceeded"), [(64, False), (65, True)])
def test_a_bounded_step_may_need_more(rows: int, exceeded: bool) -> None:
    ranks = ranks_of()
    runs = RunsAs(ExpertsPrograms(K), ranks, step_of(ranks, SizeBound(T, 128, 128)))
    given = call_of(sizes=sizes_of(rows))
    # Where they are known, too, as of a replayed routing: a recomputation saves again what its forward has saved.
    assert runs.find(given) is not None
    assert runs.exceeded(given.routing) == exceeded
    assert runs.find(call_of(num_tokens=T + 1, sizes=sizes_of(rows))) is None  # more tokens than the bound has


@pytest.mark.usefixtures("traced")
def test_without_a_bound_the_code_runs() -> None:
    transport: Any = SimpleNamespace(chosen=lambda _: None)
    runs = RunsAs.of(ExpertsPrograms(K), EPGroup.alone(), transport, None)
    assert runs is not None
    assert runs.find(call_of()) is None
    assert not runs.as_program
    assert not runs.exceeded(call_of().routing)


def test_split_weights_are_read_where_they_lie_or_copied() -> None:
    pytest.importorskip("quack")
    both: Tensor = torch.randn(2, E, I, H)
    weights = MoEWeights(both[0], both[1], torch.randn(E, H, I), None, None)
    assert weights.in_place() is not None
    assert weights.in_place().w1.data_ptr() == both.data_ptr()
    swapped = weights._replace(w1=both[1], up_eIH=both[0])
    assert swapped.with_distance((1, 2)) == (1, 2, E * I * H * 4)  # of the copy, which no program has to know yet
    swapped = swapped.in_place()
    assert swapped.up_eIH is not None
    assert torch.equal(torch.stack((swapped.w1, swapped.up_eIH)), both.flip(0))
    assert swapped.with_distance((1, 2)) == (1, 2, E * I * H * 4)
