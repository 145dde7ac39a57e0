"""The plan's kernel gives what dispatch/plan.py does."""

from importlib import import_module

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sonic_ep.dispatch.plan import Plan
from sonic_ep.kernels.operations import PlanKernel
from tests.helpers.poison import poisoned_empty
from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
KERNEL: PlanKernel = import_module("sonic_ep.kernels.cuda.plan")  # type: ignore[assignment]


def check(pairs_SE: torch.Tensor, multiple: int, tile: int, ranks: list[int]) -> None:
    rows_SE = -(-pairs_SE // multiple) * multiple
    plan = Plan.from_counts(rows_SE, pairs_SE, tile)
    for rank in ranks:
        with poisoned_empty():
            got = KERNEL.rank_plan(rows_SE.to(DEVICE), pairs_SE.to(DEVICE), rank, tile)
        for name, values, expected in zip(got._fields, got, plan.of_rank(rank), strict=True):
            assert values.dtype == torch.int32
            assert torch.equal(values.cpu(), expected), name


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(size=st.integers(1, 5), e=st.integers(1, 5), multiple=st.integers(1, 9), tile=st.integers(1, 9), data=st.data())
def test_any_counts(size: int, e: int, multiple: int, tile: int, data: st.DataObject) -> None:
    row = st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=size * e, max_size=size * e)
    pairs = data.draw(st.lists(row, min_size=size, max_size=size))
    check(torch.tensor(pairs), multiple, tile, list(range(size)))


@pytest.mark.parametrize(("size", "E"), [(1, 512), (1, 4096), (8, 128), (6, 96), (64, 4096)])
def test_layers(size: int, E: int) -> None:
    pairs_SE = torch.randint(0, 2000, (size, E), generator=torch.Generator().manual_seed(1))
    check(pairs_SE, 16, 128, [0, size - 1])
