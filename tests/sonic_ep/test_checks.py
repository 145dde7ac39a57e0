"""What kernels cannot read, said before they are launched. CUDA tensors are stand-ins here: no GPU is needed."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sonic_ep.checks import problem_with_memory, problem_with_rows


def stand_in(index: int = 0, offset: int = 0) -> Any:
    return SimpleNamespace(
        device=torch.device("cuda", index),
        is_cuda=True,
        shape=(4, 8),
        itemsize=2,
        dim=lambda: 2,
        is_contiguous=lambda: True,
        storage_offset=lambda: offset,
    )


def test_rows_on_another_device_than_the_current_one() -> None:
    with patch.object(torch.cuda, "current_device", lambda: 0):
        assert problem_with_rows(stand_in(0), 4) is None
        raised = problem_with_rows(stand_in(1), 4)
    assert raised is not None
    assert raised.startswith("x is on cuda:1, but the current device, on which kernels are launched, is cuda:0; ")
    assert raised.endswith("call torch.cuda.set_device(1), or the layer under torch.cuda.device(1)")


@pytest.mark.parametrize("offset", [1, 4, 12])
def test_weights_that_start_in_the_middle_of_16_bytes(offset: int) -> None:
    raised = problem_with_memory("w1", stand_in(offset=offset))
    assert raised == (
        f"w1 starts at byte {2 * offset} of its storage, which is no multiple of 16; set it to w1.clone()"
    )
    assert problem_with_memory("w1", stand_in(offset=8 * offset)) is None
