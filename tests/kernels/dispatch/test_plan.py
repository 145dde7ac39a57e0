"""The plan's kernel gives what dispatch/plan.py does."""

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.kernels.dispatch.plan.reference import Plan, bounded_plan
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.kernels.dispatch.split_sizes.reference import pack_split_sizes
from sonic_ep.routing import AsyncSplitSizes
from tests.helpers.poison import poisoned_empty
from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
KERNEL: Any = import_module("sonic_ep.kernels.dispatch.plan.triton")


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


def check_within(size: int, e: int, multiple: int, pairs_SE: torch.Tensor, change: tuple[int, int, int]) -> None:
    rows_SE, tokens_S = -(-pairs_SE // multiple) * multiple, torch.arange(size) + 3
    values = pack_split_sizes(tokens_S, rows_SE, pairs_SE, torch.full((size, 2), 99))
    needed = SizeBound.needed_by(AsyncSplitSizes(values, size).read())
    bound = SizeBound(*(most + more for most, more in zip(needed, change, strict=True)))
    plan = Plan.from_counts(rows_SE, pairs_SE, 4).of_rank(size - 1)
    for least in (0, bound.tokens):
        with poisoned_empty():
            got = KERNEL.bounded_plan(RankPlan(*(part.to(DEVICE) for part in plan)), values.to(DEVICE), *bound, least)
        for part, wanted in zip(got, bounded_plan(plan, values, *bound, least), strict=True):
            assert part.dtype == torch.int32
            assert part.is_contiguous()
            assert torch.equal(part.cpu(), wanted)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(size=st.integers(1, 5), e=st.integers(1, 5), multiple=st.integers(1, 9), data=st.data())
def test_a_plan_of_nothing_where_there_is_not_room(size: int, e: int, multiple: int, data: st.DataObject) -> None:
    row = st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=size * e, max_size=size * e)
    pairs = data.draw(st.lists(row, min_size=size, max_size=size))
    change = data.draw(st.tuples(*3 * [st.sampled_from([-1, 0, 0, 1])]))
    check_within(size, e, multiple, torch.tensor(pairs), change)


@pytest.mark.parametrize("change", [(0, 0, 0), (0, -1, 0)])
@pytest.mark.parametrize(("size", "E"), [(1, 4096), (8, 512), (64, 4096)])
def test_room_for_layers(size: int, E: int, change: tuple[int, int, int]) -> None:
    pairs_SE = torch.randint(0, 2000, (size, E), generator=torch.Generator().manual_seed(1))
    check_within(size, E // size, 16, pairs_SE, change)
