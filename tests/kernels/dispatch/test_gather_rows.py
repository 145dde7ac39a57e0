"""Rows that are sent, gathered in plain torch and in Triton, against loops; large ones on a GPU."""

import pytest
import torch

from tests.helpers.implementations import ON_GPU, Implementation, of_all
from tests.helpers.poison import poisoned_empty
from tests.helpers.waiting import assert_nothing_waits


@of_all
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("R", "U", "H"), [(5, 9, 8), (3, 4, 700), (4, 0, 8), (1, 2, 1024)])
def test_rows_are_copied(implementation: Implementation, R: int, U: int, H: int, dtype: torch.dtype) -> None:
    module, device = implementation.module("dispatch.gather_rows"), implementation.device
    values_RH = torch.randn(R, H).to(dtype)
    chosen = torch.randint(R, (U,)).tolist()
    with poisoned_empty():
        found = module.gather_rows(values_RH.to(device), torch.tensor(chosen, dtype=torch.int32, device=device))
    assert (found.shape, found.dtype) == ((U, H), dtype)
    assert found.tolist() == [values_RH[row].tolist() for row in chosen]


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "U", "H"), [(8192, 30001, 2048), (70000, 40000, 1536), (333, 1000, 7168)])
def test_many_rows_on_a_gpu(R: int, U: int, H: int) -> None:
    module, device = ON_GPU.module("dispatch.gather_rows"), ON_GPU.device
    values_RH = torch.randn(R, H, device=device, dtype=torch.bfloat16)
    rows_U = torch.randint(R, (U,), device=device, dtype=torch.int32)
    with poisoned_empty():
        found = module.gather_rows(values_RH, rows_U)
    assert torch.equal(found, values_RH.index_select(0, rows_U))
    assert_nothing_waits(lambda: module.gather_rows(values_RH, rows_U))
