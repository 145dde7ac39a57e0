"""The kernels of a given top-K give bit for bit what the reference gives, into memory that held garbage.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sonic_ep.kernels.route.topk.reference import topk_mask
from sonic_ep.kernels.route.topk_pairs import reference
from tests.helpers.poison import poisoned_empty
from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
KERNELS: Any = import_module("sonic_ep.kernels.route.topk_pairs.triton")
DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


def a_topk(T: int, E: int, K: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.rand(T, E).argsort(1)[:, :K].contiguous().to(DEVICE), torch.randn(T, K).to(DEVICE, dtype)


@settings(max_examples=40)
@given(data=st.data(), T=st.sampled_from([0, 1, 31, 33, 128, 300]), E=st.integers(1, 70), dtype=st.sampled_from(DTYPES))
def test_kernels_give_what_the_reference_gives(data: st.DataObject, T: int, E: int, dtype: torch.dtype) -> None:
    K, of_map = data.draw(st.integers(1, min(E, 9))), data.draw(st.booleans())
    torch.manual_seed(T + 7 * E + K)
    chosen, weights = a_topk(T, E, K, dtype)
    if of_map:
        chosen, weights = topk_mask(chosen, E), torch.randn(T, E).to(DEVICE, dtype)
    with poisoned_empty():
        found, wanted = (module.pairs_with_weights(chosen, weights, E, K) for module in (KERNELS, reference))
        for name, one, other in zip(wanted._fields, found, wanted, strict=True):
            assert (one.dtype, one.device.type) == (other.dtype, DEVICE), name
            assert torch.equal(one, other), name
        values = torch.randn(T * K, dtype=wanted.weights_N.dtype, device=DEVICE)
        values = values.to(dtype).to(values.dtype) if DEVICE == "cpu" else values  # the interpreter rounds to zero
        back = [module.in_slots(values, wanted.slots_N, weights.shape, dtype) for module in (KERNELS, reference)]
    assert back[0].shape == weights.shape
    assert torch.equal(back[0], back[1])


def test_reference_on_a_case_by_hand() -> None:
    ids, weights = torch.tensor([[2, 0], [0, 1]]), torch.tensor([[0.5, 0.25], [1.0, 2.0]], dtype=torch.bfloat16)
    found = reference.pairs_with_weights(ids, weights, 4, 2)
    assert found.counts_E.tolist() == [2, 1, 1, 0]
    assert found.tokens_1.tolist() == [2]
    assert found.token_ids_N.tolist() == [0, 1, 1, 0]
    assert found.slots_N.tolist() == [1, 2, 3, 0]
    assert found.weights_N.dtype == torch.float32
    assert found.weights_N.tolist() == [0.25, 1.0, 2.0, 0.5]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_return_to_the_slots_that_they_came_from(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ids, weights = (each.cpu() for each in a_topk(50, 12, 3, dtype))
    pairs = reference.pairs_with_weights(ids, weights, 12, 3)
    assert torch.equal(reference.in_slots(pairs.weights_N, pairs.slots_N, (50, 3), dtype), weights)


def test_a_map_gives_the_pairs_of_its_ids() -> None:
    torch.manual_seed(0)
    ids, weights = (each.cpu() for each in a_topk(50, 12, 3))
    mask = topk_mask(ids, 12)
    table = torch.zeros(50, 12).scatter(1, ids, weights)
    of_ids, of_map = reference.pairs_with_weights(ids, weights, 12, 3), reference.pairs_with_weights(mask, table, 12, 3)
    for name in ("counts_E", "tokens_1", "token_ids_N", "weights_N"):
        assert torch.equal(getattr(of_ids, name), getattr(of_map, name)), name
    assert torch.equal(reference.in_slots(of_map.weights_N, of_map.slots_N, (50, 12), torch.float32), table)
