"""Which implementation is chosen on this machine, and that it says so."""

from importlib.util import find_spec

import pytest
import torch

from sonic_ep.kernels.backend import _lists, gather_sum, operations_for, router_linear, router_operations
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import activation_named


def test_the_cpu_takes_the_reference() -> None:
    assert operations_for(torch.zeros(2, 8), torch.zeros(1, 8, 8), activation_named("swiglu")) is reference


def test_gather_sum_on_the_cpu_is_the_references() -> None:
    values, items = torch.randn(3, 5), torch.tensor([0, 2, 1], dtype=torch.int32)
    starts = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    assert torch.equal(gather_sum(values, items, starts), reference.gather_sum(values, items, starts))


@pytest.mark.parametrize("module", ["dispatch.recv_index", "dispatch.send_index"])
def test_index_lists_are_tritons_on_a_gpu(module: str) -> None:
    name = "reference" if find_spec("triton") is None else "triton"
    assert _lists(module, on_gpu=True).__name__ == f"sonic_ep.kernels.{module}.{name}"
    assert _lists(module, on_gpu=False).__name__ == f"sonic_ep.kernels.{module}.reference"


def test_the_router_has_no_kernels_on_the_cpu() -> None:
    assert router_operations(torch.zeros(2, 8), 2) is None
    assert router_linear(torch.zeros(2, 16, dtype=torch.bfloat16)) is None
