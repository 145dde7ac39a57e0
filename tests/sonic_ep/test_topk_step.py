"""The routing of a framework's top-K is traced once for a kind of call; on a CPU that imitates a GPU.

tests/integrations/test_framework_experts.py compares programs with the code, on GPUs.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sonic_ep import EPGroup, RoundingConfig
from sonic_ep.config import MoEConfig
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.kernels.program.trace import Trace
from sonic_ep.routers.topk_pairs import Added, GivenTopK, RouterCall
from sonic_ep.steps import topk_step
from sonic_ep.steps.programs import Ranks, StepPrograms
from sonic_ep.steps.topk_step import Rounded, TopKKind, TopKStep, traced_topk
from tests.helpers.fake_cuda import CUDA, Memory, described, fake_cuda, mailbox, ranks_of

E, K = 16, 4


@pytest.fixture(autouse=True)
def memory() -> Iterator[Memory]:
    with fake_cuda() as memory:
        yield memory


ROUNDING = RoundingConfig(mode="apportion")


def rounded_by(mode: str, *, has_allowed: bool = False) -> Rounded:
    config = MoEConfig(d=1, n=1, E=E, K=K, rounding=replace(ROUNDING, mode=mode))
    return Rounded(config, Added(1.0, divides=mode == "nearest"), torch.float32, has_allowed, by_expert=has_allowed)


def kind_of(transport: str, *, of_map: bool = False) -> TopKKind:
    ranks: Ranks | None = None if transport == "alone" else ranks_of(2, 256, E, K)
    group = EPGroup.alone() if ranks is None else ranks.group
    exchange: Any = None if ranks is None else ranks.transport
    if transport == "all-to-all":
        assert ranks is not None
        exchange = AllToAllTransport(group)
        ranks = replace(ranks, transport=exchange, symmetric=None)
    call = RouterCall(group=group, exchange=exchange, dtype=torch.bfloat16, training=True)
    return TopKKind(call, E, K, of_map, torch.bfloat16, CUDA, ranks)


@pytest.mark.parametrize("of_map", [False, True])
@pytest.mark.parametrize("transport", ["alone", "symmetric", "all-to-all"])
def test_a_program_of_another_length_is_the_one_that_it_would_give(transport: str, of_map: bool) -> None:
    kind = kind_of(transport, of_map=of_map)
    sizes, other = ((T, 7)[: len(kind.usual_sizes)] for T in (4096, 5120))
    one, two = traced_topk(kind, sizes), traced_topk(kind, other)
    assert one.forward.fits(*other)
    assert described(one.forward, other) == described(two.forward, other)


@pytest.mark.parametrize("transport", ["alone", "symmetric", "all-to-all"])
@pytest.mark.parametrize(("mode", "has_allowed"), [("apportion", False), ("nearest", True), ("pad", False)])
def test_a_program_that_rounds_serves_other_lengths(transport: str, mode: str, has_allowed: bool) -> None:
    kind = kind_of(transport)._replace(rounded=rounded_by(mode, has_allowed=has_allowed))
    sizes, other = ((T, 7)[: len(kind.usual_sizes)] for T in (4096, 5120))
    one, two = traced_topk(kind, sizes), traced_topk(kind, other)
    assert one.forward.fits(*other)
    assert described(one.forward, other) == described(two.forward, other)


def test_only_the_exchange_over_torch_distributed_calls_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of torch cuts a program, which costs host time."""
    calls: dict[str, int] = {}
    finish = Trace.finish

    def counting(self: Trace) -> None:
        calls[transport] = sum(item[0] == "torch" for item in self.items)
        finish(self)

    monkeypatch.setattr(Trace, "finish", counting)
    for transport in ("alone", "symmetric", "all-to-all"):
        for rounded in (None, rounded_by("apportion")):
            kind = kind_of(transport)._replace(rounded=rounded)
            traced_topk(kind, (4096, 7)[: len(kind.usual_sizes)])
            assert calls.pop(transport) == (transport == "all-to-all")


def step_of(kind: TopKKind, monkeypatch: pytest.MonkeyPatch) -> TopKStep:
    """The step of such a call, whose tensors pass for those of a GPU."""
    monkeypatch.setattr(topk_step, "may_run", lambda values: values.numel() > 0)
    monkeypatch.setattr(topk_step, "runs_triton", lambda _: True)
    if kind.ranks is not None:
        kind.ranks.transport._chosen["cpu"] = kind.ranks.symmetric  # type: ignore[assignment]
    arriving = lambda on_device: SimpleNamespace(on_device=on_device)  # noqa: E731
    steps: Any = None if kind.ranks is None else SimpleNamespace(mailbox=mailbox(2), arriving=arriving)
    return TopKStep(StepPrograms(traced_topk), kind.ranks, steps)


@pytest.mark.parametrize("transport", ["alone", "symmetric"])
def test_one_program_for_all_lengths(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of(transport)
    step = step_of(kind, monkeypatch)
    S = 1 if transport == "alone" else 2
    for T in (512, 640):
        ids, weights = torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K, dtype=torch.bfloat16)
        found = step.route(ids, weights, E, K, kind.call)
        assert found is not None
        assert [each.shape for each in found[:3]] == [(T * K,)] * 3
        assert [each.dtype for each in found[:3]] == [torch.float32, torch.int32, torch.int32]
        assert [each.shape for each in found.counts] == [(S, E)] * 3 + [(S,), (S,), ()]
        assert (found.split_sizes is None) == (S == 1)
    assert step.programs.num_programs == 1
    step.route(ids, weights.float(), E, K, replace(kind.call, training=False))
    assert step.programs.num_programs == 2
    rounded = rounded_by("apportion")
    for T in (512, 640):
        ids, weights, scores = torch.zeros(T, K, dtype=torch.int64), torch.zeros(T, K), torch.zeros(T, E)
        found = step.round(GivenTopK(ids, weights, scores, None), rounded.added, rounded.config, kind.call)
        assert found is not None
        assert all(each.shape[0] >= T * K for each in found[:3])
    assert step.programs.num_programs == 3


def test_the_code_runs_where_a_program_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of("symmetric")
    step = step_of(kind, monkeypatch)
    ids, weights = torch.zeros(8, K, dtype=torch.int64), torch.zeros(8, K)
    assert step.route(ids[:0], weights[:0], E, K, kind.call) is None
    assert step.route(ids, weights, E, K, replace(kind.call, problem="wrong")) is None
    assert step.ranks is not None
    step.ranks = replace(step.ranks, symmetric=None)  # of the first step, whose sizes nobody knows
    step.ranks.transport.chosen = lambda _: None  # type: ignore[method-assign]
    assert step.route(ids, weights, E, K, kind.call) is None
    step.ranks = kind.ranks
    given, rounded = GivenTopK(ids, weights, torch.zeros(8, E), None), rounded_by("stochastic")  # draws numbers
    assert step.round(given, rounded.added, rounded.config, kind.call) is None
    assert step.programs.num_programs == 0
