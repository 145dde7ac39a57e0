"""Which calls of a layer on one rank record; tests/sonic_ep/test_recorded_launches.py has GPUs."""

import copy

import torch

from sonic_ep.kernels.launch_sequence.recorded_layer import Steps


def test_the_second_call_with_a_signature_records() -> None:
    steps = Steps()
    step = steps.begin(None)
    times = [steps.is_time(step, signature, known=False) for signature in ("a", "b", "a", "b")]
    assert times == [False, False, True, True]
    assert not steps.is_time(step, "a", known=True)
    assert not steps.is_time(step, None, known=False)
    assert not copy.deepcopy(steps).is_time(step, "a", known=False)  # a copy starts anew


def test_the_first_call_under_saved_tensor_hooks_records() -> None:
    steps = Steps()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert steps.is_time(steps.begin(None), "a", known=False)
