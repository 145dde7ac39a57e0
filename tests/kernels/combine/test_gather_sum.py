"""gather_sum, the reference and the kernel, against a python loop, with NaN in its output before it is written.

The kernel runs on the GPU where there is one, else interpreted on the CPU.
"""

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep.kernels.combine.gather_sum import reference
from tests.kernels.oracle import SPLIT_GATE_UP, assert_rounded_once

GatherSum = Callable[..., Tensor]

pytestmark = pytest.mark.usefixtures("poison")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
of_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def kernel(values: Tensor, items: Tensor, starts: Tensor, weights: Tensor | None = None, **options: Any) -> Tensor:
    if DEVICE == "cpu" and values.dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16, where a GPU rounds")
    weights = None if weights is None else weights.to(DEVICE)
    return of_triton().gather_sum(values.to(DEVICE), items.to(DEVICE), starts.to(DEVICE), weights, **options).cpu()


def overlap_previous(values: Tensor, items: Tensor, starts: Tensor, weights: Tensor | None = None) -> Tensor:
    """Into memory that is there, as beside a GEMM, which only a GPU can; elsewhere as many items ahead."""
    module, into = of_triton(), torch.full((len(starts) - 1, values.shape[1]), float("nan")).to(DEVICE, values.dtype)
    early = nullcontext() if DEVICE == "cuda" else patch.object(module, "UNROLL", module._UNROLL_OVERLAPPED)
    with early:
        return kernel(values, items, starts, weights, into=into, overlap_previous=True)


def of_triton() -> Any:
    return import_module("sonic_ep.kernels.combine.gather_sum.triton")


@pytest.fixture(params=["reference", "kernel", "beside"])
def gather_sum(request: pytest.FixtureRequest) -> GatherSum:
    if request.param == "reference":
        return reference.gather_sum
    pytest.importorskip("triton")
    return kernel if request.param == "kernel" else overlap_previous


def csr(lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    items = [item for each in lists for item in each]
    starts = [sum(map(len, lists[:i])) for i in range(len(lists) + 1)]
    return torch.tensor(items, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)


def sum_by_hand(values: Tensor, lists: list[list[int]], weights: Tensor | None) -> Tensor:
    out = torch.zeros(len(lists), values.shape[1], dtype=torch.float64)
    for i, items in enumerate(lists):
        for item in items:
            out[i] += values[item].double() * (1.0 if weights is None else weights[item].double())
    return out


LISTS = {
    "ragged": [[3, 0], [], [1, 2, 4, 5], [6], []],
    "repeats": [[2, 2, 2], [0, 2, 0], [], [5]],
    "backwards": [[6, 5, 4, 3, 2, 1, 0]],
    "all-empty": [[], [], []],
    "no-lists": [],
}


@of_every_dtype
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("lists", [*LISTS.values()], ids=[*LISTS])
def test_sums_and_weighted_sums(
    lists: list[list[int]], weighted: bool, dtype: torch.dtype, gather_sum: GatherSum
) -> None:
    values, weights = torch.randn(7, 5).to(dtype), torch.randn(7).to(dtype) if weighted else None
    out = gather_sum(values, *csr(lists), weights)
    assert out.dtype == dtype
    assert_rounded_once(out, sum_by_hand(values, lists, weights))


@of_every_dtype
@pytest.mark.parametrize("H", [1, 256, 2049, 2880, 7168])
def test_rows_of_any_width(H: int, dtype: torch.dtype, gather_sum: GatherSum) -> None:
    values, weights = torch.randn(7, H).to(dtype), torch.rand(7)
    out = gather_sum(values, *csr(LISTS["ragged"]), weights)
    assert_rounded_once(out, sum_by_hand(values, LISTS["ragged"], weights), computed=torch.float32)


def test_a_long_list(gather_sum: GatherSum) -> None:
    values = torch.randint(-9, 10, (1000, 3)).float()
    out = gather_sum(values, *csr([[0, 1], [*range(1000), *range(1000)], [2]]))
    assert torch.equal(out, torch.stack([values[0] + values[1], 2 * values.sum(0), values[2]]))


def test_no_values(gather_sum: GatherSum) -> None:
    assert torch.equal(gather_sum(torch.empty(0, 3), *csr([[], []])), torch.zeros(2, 3))


def test_example_of_the_docstring(gather_sum: GatherSum) -> None:
    values = torch.randn(3, 4)
    starts = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    out = gather_sum(values, torch.tensor([0, 2, 1], dtype=torch.int32), starts)
    assert torch.equal(out, torch.stack([values[0] + values[2], torch.zeros(4), values[1]]))


def test_adds_in_the_order_of_the_list(gather_sum: GatherSum) -> None:
    values = torch.tensor([[2.0**24], [1.0], [-(2.0**24)]])
    assert gather_sum(values, *csr([[0, 1, 2], [0, 2, 1], [2, 1, 0], [1, 2, 0]])).flatten().tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("dtype", SPLIT_GATE_UP, ids=str)
def test_rounds_once_at_the_end(dtype: torch.dtype, gather_sum: GatherSum) -> None:
    """1 + eight eighths of the last place: all of it is lost if every sum is rounded."""
    eps = torch.finfo(dtype).eps
    values = torch.tensor([[1.0], [eps / 8]]).to(dtype)
    assert gather_sum(values, *csr([[0] + [1] * 8])).item() == 1 + eps


def test_reads_only_what_is_listed(gather_sum: GatherSum) -> None:
    """Rows of padding are in no list; neither they nor their weights may matter."""
    values = torch.tensor([[1.0], [torch.nan], [2.0]])
    weights = torch.tensor([3.0, torch.nan, 5.0])
    assert gather_sum(values, *csr([[0, 2], []]), weights).tolist() == [[13.0], [0.0]]


@of_every_dtype
@pytest.mark.parametrize("weights", DTYPES, ids="weights-{}".format)
def test_weights_may_have_a_dtype_of_their_own(weights: torch.dtype, dtype: torch.dtype, gather_sum: GatherSum) -> None:
    """The result has that of the values: bf16 rows are summed with the fp32 weights that routers give."""
    values, weights_P = torch.randn(7, 5).to(dtype), torch.randn(7).to(weights)
    out = gather_sum(values, *csr(LISTS["ragged"]), weights_P)
    assert out.dtype == dtype
    assert_rounded_once(out, sum_by_hand(values, LISTS["ragged"], weights_P), computed=torch.float32)
