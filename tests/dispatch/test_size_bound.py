"""The bound of a step's sizes, and the plan that is empty where the bound does not hold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.kernels.dispatch.plan.reference import Plan, bounded_plan
from sonic_ep.kernels.dispatch.split_sizes.reference import pack_split_sizes
from sonic_ep.routing import AsyncSplitSizes


@pytest.mark.parametrize(
    ("rows", "pairs"),
    [([[3, 6], [10, 1]], [[3, 4], [9, 1]]), ([[3, 10], [6, 3]], [[3, 9], [4, 1]])],
    ids=["received", "sent"],
)
def test_bound_by_hand(rows: list[list[int]], pairs: list[list[int]]) -> None:
    """Rank 0 sends 3 + 4 pairs and receives 3 + 9, rank 1 sends 9 + 1 and receives 4 + 1. Then the other way round."""
    rows_SE, pairs_SE = torch.tensor(rows), torch.tensor(pairs)
    values = pack_split_sizes(torch.tensor([5, 8]), rows_SE, pairs_SE, None)
    needed, plan = (
        SizeBound.needed_by(AsyncSplitSizes(values, 2).read()),
        Plan.from_counts(rows_SE, pairs_SE).of_rank(0),
    )
    assert needed == (8, 13, 12)
    for bound in ((8, 13, 12), (8, 14, 13), (7, 13, 12), (9, 13, 12), (8, 12, 12), (8, 13, 11)):
        holds = bound in ((8, 13, 12), (8, 14, 13), (9, 13, 12))
        assert SizeBound(*bound).holds(needed) == holds
        assert bool(bounded_plan(plan, values, *bound, bound[0]).table_FC.any()) == holds
    assert not bounded_plan(plan, values, 9, 13, 12).table_FC.any()
    assert not bounded_plan(plan, values, 8, 13, 12, 9).table_FC.any()
    assert bounded_plan(plan, values, 8, 13, 12, 7).table_FC.any()


def test_joined_bounds_have_the_larger_of_each_size() -> None:
    one, other = SizeBound(8, 13, 12), SizeBound(8, 11, 14)
    assert one.joined(other) == other.joined(one) == (8, 13, 14)
    assert one.joined(None) == one
    assert one.joined(SizeBound(9, 2, 20)) == (9, 13, 20)


@given(size=st.integers(1, 4), e=st.integers(1, 4), multiple=st.integers(1, 9), data=st.data())
def test_the_device_says_what_the_host_does(size: int, e: int, multiple: int, data: st.DataObject) -> None:
    row = st.lists(st.one_of(st.just(0), st.integers(0, 40)), min_size=size * e, max_size=size * e)
    pairs_SE = torch.tensor(data.draw(st.lists(row, min_size=size, max_size=size)))
    rows_SE, tokens_S = -(-pairs_SE // multiple) * multiple, torch.arange(size) + 3
    values = pack_split_sizes(tokens_S, rows_SE, pairs_SE, torch.full((size, 2), 99))  # status fields follow
    needed = SizeBound.needed_by(AsyncSplitSizes(values, size).read())
    bound = SizeBound(*(most + data.draw(st.sampled_from([-1, 0, 0, 1])) for most in needed))
    plan = Plan.from_counts(rows_SE, pairs_SE, 4).of_rank(size - 1)
    got = bounded_plan(plan, values, *bound, bound.tokens)
    assert got.table_FC.dtype == got.pairs_SQ.dtype == torch.int32
    if bound.holds(needed):
        assert all(map(torch.equal, got, plan))
    else:
        assert not got.table_FC.any()
        assert not got.expert_starts_e.any()
        assert not got.pairs_SQ.any()
