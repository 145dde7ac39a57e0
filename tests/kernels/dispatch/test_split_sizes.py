"""The kernel that gathers sizes for the host gives what kernels/dispatch/split_sizes/reference.py does, and that is
what it says."""

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sonic_ep.kernels.dispatch.split_sizes.reference import pack_split_sizes
from tests.helpers.poison import poisoned_empty
from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
KERNEL: Any = import_module("sonic_ep.kernels.dispatch.split_sizes.triton")


def check(size: int, e: int, fields: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows_SE, pairs_SE = torch.randint(0, 2**40, (2, size, size * e), generator=generator)
    gathered = torch.randint(0, 2**40, (size, 9), generator=generator)

    def arguments(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        there = gathered.to(device)  # of which agreement gives columns
        status_SF = None if fields is None else there[:, :fields]
        return there[:, 0], rows_SE.to(device), pairs_SE.to(device), status_SF

    with poisoned_empty():
        got = KERNEL.pack_split_sizes(*arguments(DEVICE))
    assert torch.equal(got.cpu(), pack_split_sizes(*arguments("cpu")))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(size=st.integers(1, 5), e=st.integers(1, 5), fields=st.sampled_from([None, 1, 5, 8]), seed=st.integers(0, 99))
def test_any_counts(size: int, e: int, fields: int | None, seed: int) -> None:
    check(size, e, fields, seed)


@pytest.mark.parametrize(("size", "E"), [(1, 512), (1, 4096), (8, 128), (6, 96), (64, 4096)])
def test_layers(size: int, E: int) -> None:
    check(size, E // size, 5, 0)


def test_an_example_by_hand() -> None:
    rows = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    got = pack_split_sizes(torch.tensor([9, 8]), rows, rows - 1, torch.tensor([[70, 71], [72, 73]]))
    assert got.tolist() == [9, 8, *(3, 7), *(11, 15), *(1, 5), *(9, 13), 70, 71, 72, 73]
