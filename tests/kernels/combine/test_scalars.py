"""Scalars of pairs, plain and in Triton: sums of parts in the routing's order, zeros behind them."""

import pytest
import torch

from tests.helpers.implementations import Implementation, of_all
from tests.helpers.poison import poisoned_empty


@of_all
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("V", "num_pairs", "capacity"),
    [(0, 0, 0), (3, 3, 3), (700, 700, 900), (700, 300, 500), (5, 0, 300), (900, 600, 600)],
)
@pytest.mark.parametrize("parts", [1, 3, 64])
def test_values_of_pairs(
    V: int, num_pairs: int, capacity: int, parts: int, dtype: torch.dtype, implementation: Implementation
) -> None:
    values_P = torch.arange(1, V + 51) % 200
    parts_PZ = torch.zeros(V + 50, parts, dtype=dtype)
    parts_PZ[:, 0], parts_PZ[:, -1] = 7, values_P - 7 * (parts > 1)
    slot_V = torch.randperm(V + 50)[:V].to(torch.int32)
    expected = [float(values_P[slot]) for slot in slot_V[:num_pairs]] + [0.0] * (capacity - num_pairs)
    arguments = [values.to(implementation.device) for values in (parts_PZ, slot_V, torch.tensor([num_pairs]))]
    module, into = implementation.module("combine.scalars"), torch.full((capacity,), torch.nan, dtype=dtype)
    with poisoned_empty():
        got = module.values_of_pairs(*arguments, capacity)
        given = module.values_of_pairs(*arguments, capacity, into=into.to(implementation.device))
    assert got.dtype == dtype
    assert got.tolist() == given.tolist() == expected
