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
from sonic_ep.routing import PairLists
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


def rounded_pairs(ids_TK: Tensor, E: int, spare: int) -> PairLists:
    """About half of the pairs of a top-K, as many others, and spare entries."""
    chosen_TE = topk_mask(ids_TK, E)
    selected_TE = torch.rand(chosen_TE.shape, device=DEVICE) < chosen_TE.float().mean()
    expert_ids_N, token_ids_N = selected_TE.T.nonzero().unbind(1)
    chosen_N = chosen_TE[token_ids_N, expert_ids_N]
    lists = token_ids_N.int(), expert_ids_N, chosen_N
    empty = torch.full((spare,), -1, dtype=torch.int32), torch.zeros(spare, dtype=torch.int64), torch.zeros(spare) > 0
    return PairLists(ids_TK, *[torch.cat([one, two.to(DEVICE)]) for one, two in zip(lists, empty, strict=True)])


@settings(max_examples=30)
@given(
    T=st.sampled_from([1, 31, 128, 300]),
    E=st.integers(2, 70),
    spare=st.sampled_from([0, 5]),
    by_expert=st.booleans(),
    divides=st.booleans(),
)
def test_rounded_pairs_have_the_weights_of_the_reference(
    T: int, E: int, spare: int, by_expert: bool, divides: bool
) -> None:
    K = min(E - 1, 4)
    torch.manual_seed(T + 7 * E)
    ids, weights = a_topk(T, E, K)
    pairs, scores = rounded_pairs(ids, E, spare), torch.rand(T, E).to(DEVICE)
    weights = torch.randn(T, E).to(DEVICE) if by_expert else weights
    options = {"by_expert": by_expert, "scale": 2.5, "divides": divides}
    with poisoned_empty():
        found, wanted = (
            module.weights_of_rounded(pairs, weights, scores, **options) for module in (KERNELS, reference)
        )
        assert torch.equal(found[1], wanted[1])
        real = pairs.token_ids_N >= 0
        assert torch.equal(found[0][real & pairs.chosen_N], wanted[0][real & pairs.chosen_N])
        torch.testing.assert_close(found[0][real], wanted[0][real], rtol=1e-6, atol=0)
        values = torch.randn(len(real), device=DEVICE)
        tables = values, wanted[1], weights.shape, torch.float32, scores.shape
        for one, other in zip(*(module.in_two_tables(*tables) for module in (KERNELS, reference)), strict=True):
            assert torch.equal(one, other)


def test_counts_of_a_topk() -> None:
    torch.manual_seed(0)
    ids, _ = a_topk(200, 40, 5)
    for one, other in zip(KERNELS.count_topk(ids, 40), reference.count_topk(ids, 40), strict=True):
        assert torch.equal(one, other)
