"""Comparisons refuse an absolute tolerance that hides the values compared, here and on ranks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.helpers.launch import RankPool
from tests.helpers.tolerances import SHARE, assert_near, is_near

SMALL = torch.tensor([4e-9, -1e-9])


@pytest.mark.parametrize(
    ("got", "tolerance"),
    [(SMALL / 4, {"rtol": 1e-4, "atol": 1e-7}), (SMALL / 4, {}), (SMALL * 1.06, {"rtol": 0.0, "atol": 3e-10})],
)
def test_a_tolerance_above_the_values_is_refused(got: Tensor, tolerance: dict[str, float]) -> None:
    with pytest.raises(
        AssertionError, match=f"above {SHARE:g} of the largest expected value, 4e-09, and hides"
    ) as raised:
        assert_close(got, SMALL, **tolerance)
    assert "compare larger values" in str(raised.value)


def test_it_is_refused_in_lists_and_by_allclose() -> None:
    for got, expected in (({"a": [SMALL * 2, 1.0]}, {"a": [SMALL, 1.0]}), (1e-9, 2e-9), (SMALL, torch.zeros(2))):
        with pytest.raises(AssertionError, match="and hides"):
            assert_close(got, expected, rtol=1e-5, atol=1e-7)
    for compare in (torch.allclose, Tensor.allclose):
        with pytest.raises(AssertionError, match="and hides"):
            compare(SMALL * 2, SMALL)
        assert not compare(SMALL, torch.ones(2))


def test_what_is_equal_within_a_small_tolerance_passes() -> None:
    assert_close(SMALL * (1 + 1e-6), SMALL, rtol=1e-5, atol=1e-7)
    assert_close(torch.zeros(2), torch.zeros(2))
    assert_close([torch.tensor([3, 4]), float("nan")], [torch.tensor([3, 4]), float("nan")], equal_nan=True)
    assert_close(torch.ones(2) * 1.0001, torch.ones(2), rtol=0.0, atol=1e-3)
    assert_close(torch.ones(2, dtype=torch.float64), torch.ones(2), check_dtype=False)
    assert_close(torch.zeros(0), torch.zeros(0))


def test_torchs_own_failures_stay() -> None:
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        assert_close(SMALL, torch.ones(2))
    with pytest.raises(AssertionError, match="number differs"):
        assert_close(SMALL, torch.ones(2), msg="number differs")


def test_a_scale_is_stated_or_the_largest_expected_value() -> None:
    assert_near(SMALL, torch.zeros(2), share=1e-6, scale=1.0)
    assert is_near(SMALL * (1 + 1e-6), SMALL, share=1e-5)
    assert not is_near(SMALL * 1.01, SMALL, share=1e-3)
    with pytest.raises(AssertionError, match="not close"):
        assert_near(SMALL * 1.01, SMALL, share=1e-3)
    with pytest.raises(AssertionError, match="not close"):
        assert_near(SMALL, torch.zeros(2), share=1e-3)


def compare_small_values(rank: int) -> str:
    with pytest.raises(AssertionError) as raised:
        torch.testing.assert_close(SMALL / 4, SMALL)
    return str(raised.value)


def test_ranks_refuse_too(ranks: Callable[[int], RankPool]) -> None:
    assert all("and hides what differs" in message for message in ranks(2).run(compare_small_values))
