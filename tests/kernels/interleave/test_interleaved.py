"""Gate and up rows in turns, plain and in Triton."""

import pytest
import torch

from tests.helpers.implementations import Implementation, of_all

SIZES = [(1, 1, 1), (3, 5, 24), (2, 4, 130), (1, 2, 5000), (0, 2, 8)]


@of_all
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("e", "I", "H"), SIZES)
def test_rows_alternate(e: int, I: int, H: int, dtype: torch.dtype, implementation: Implementation) -> None:  # noqa: E741
    gate, up = (torch.randn(e, I, H).to(dtype).to(implementation.device) for _ in range(2))
    out = implementation.module("interleave").interleaved(gate, up)
    assert out.is_contiguous()
    assert out.shape == (e, 2 * I, H)
    assert torch.equal(out[:, ::2], gate)
    assert torch.equal(out[:, 1::2], up)


@of_all
def test_halves_of_one_tensor(implementation: Implementation) -> None:
    both = torch.randn(3, 8, 16, device=implementation.device)
    out = implementation.module("interleave").interleaved(*both.chunk(2, 1))
    assert torch.equal(out[:, ::2], both[:, :4])
    assert torch.equal(out[:, 1::2], both[:, 4:])
