"""Which implementation is chosen on this machine, and that it says so."""

from importlib.util import find_spec

import pytest
import torch

from sonic_ep.kernels import reference
from sonic_ep.kernels.activations import activation_named
from sonic_ep.kernels.operations import _lists, gather_sum, operations_for, router_linear, router_operations


def test_the_cpu_takes_the_reference() -> None:
    assert operations_for(torch.zeros(2, 8), torch.zeros(1, 8, 8), activation_named("swiglu")) is reference


def test_gather_sum_on_the_cpu_is_the_references() -> None:
    values, items = torch.randn(3, 5), torch.tensor([0, 2, 1], dtype=torch.int32)
    starts = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    assert torch.equal(gather_sum(values, items, starts), reference.gather_sum(values, items, starts))


@pytest.mark.parametrize("module", ["pair_lists", "sent_rows"])
def test_index_lists_are_tritons_on_a_gpu(module: str) -> None:
    folder = "kernels" if find_spec("triton") is None else "kernels.cuda"
    assert _lists(module, on_gpu=True).__name__ == f"sonic_ep.{folder}.{module}"
    assert _lists(module, on_gpu=False).__name__ == f"sonic_ep.kernels.{module}"


def test_the_router_has_no_kernels_on_the_cpu() -> None:
    assert router_operations(torch.zeros(2, 8), 2) is None
    assert router_linear(torch.zeros(2, 16, dtype=torch.bfloat16)) is None
