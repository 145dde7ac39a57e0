"""Which calls of a layer on one rank record; tests/sonic_ep/test_recorded_launches.py has GPUs."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sonic_ep.groups.lost_ranks import in_backward
from sonic_ep.kernels.launch_sequence import recorded_calls, recorded_layer
from sonic_ep.kernels.launch_sequence.recorded_calls import Code, RecordedCalls, Steps
from sonic_ep.kernels.launch_sequence.recorded_layer import RecordedLayer


def test_the_second_call_with_a_signature_records() -> None:
    steps = Steps()
    step = steps.begin(None)
    times = [steps.may_record(step, signature, known=False) for signature in ("a", "b", "a", "b")]
    assert times == [False, False, True, True]
    assert not steps.may_record(step, "a", known=True)
    assert not steps.may_record(step, None, known=False)
    assert not copy.deepcopy(steps).may_record(step, "a", known=False)  # a copy starts anew


def test_the_first_call_under_saved_tensor_hooks_records() -> None:
    steps = Steps()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert steps.may_record(steps.begin(None), "a", known=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_is_within_a_backward(reentrant: bool) -> None:
    calls: list[bool] = []

    def function(x: Tensor) -> Tensor:
        calls.append(in_backward())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(function, x, use_reentrant=reentrant).sum().backward()
    assert calls == [False, True]
    assert not in_backward()


def test_nothing_is_recorded_within_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[bool] = []
    for module in (recorded_calls, recorded_layer):
        monkeypatch.setattr(module, "problem_with_x", lambda x: None)
    monkeypatch.setattr(recorded_calls, "_signature", lambda *_: "a")
    monkeypatch.setattr(RecordedCalls, "_record", lambda *_: recorded.append(in_backward()))
    unused: Any = None
    code = Code(unused, unused, unused, unused, unused)
    layer, recordings = nn.Linear(2, 2), RecordedLayer(code, Steps())

    def function(x: Tensor) -> Tensor:
        assert recordings.outputs(layer, x) is None
        return layer(x)

    x = torch.ones(2, 2, requires_grad=True)
    for _ in range(3):
        checkpoint(function, x, use_reentrant=True).sum().backward()
    assert recorded == [False, False]  # the second and third forward
