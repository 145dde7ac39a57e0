"""The kernels of reports do what kernels/route/status/reference.py does, and that is what it says."""

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
PLAIN: Any = import_module("sonic_ep.kernels.route.status.reference")
KERNEL: Any = import_module("sonic_ep.kernels.route.status.triton")


@pytest.mark.parametrize("E", [1, 60, 1024, 4096])
@pytest.mark.parametrize("draw", [None, 0, 2**31 - 1])
@pytest.mark.parametrize("bad_logits", [None, 0, 2**33])
def test_a_report_is_header_and_counts(E: int, draw: int | None, bad_logits: int | None, poison: None) -> None:
    counts_E = torch.randint(2**40, (E,))
    expected = [12345, 9 + 32 * (bad_logits or 0), draw or 0, 2**55 + 16, *counts_E.tolist()]
    for module, device in ((PLAIN, "cpu"), (KERNEL, DEVICE)):
        options = {
            name: None if value is None else torch.tensor(value, device=device)
            for name, value in (("bad_logits", bad_logits), ("seed", draw))
        }
        report = module.pack_rank_status(counts_E.to(device), 12345, 9, 2**55 + 16, **options)
        assert report.dtype == torch.int64
        assert report.tolist() == expected
        wide = module.pack_rank_status(counts_E.to(device), 12345, 9, 2**55 + 16, width=1028, **options)
        assert wide.shape == (max(1028, E + 4),)
        assert wide[: E + 4].tolist() == expected


@pytest.mark.parametrize("number", [2**31 - 1, 2**31 + 2**20 + 1, 2**32 - 1, 2**32])
def test_words_have_more_than_32_bits(number: int) -> None:
    """In many launches: if part of a word were other memory, that might be right in some of them."""
    counts_E = torch.arange(2, device=DEVICE)
    reports = [KERNEL.pack_rank_status(counts_E + turn, 5, number, number).tolist() for turn in range(200)]
    assert reports == [[5, number, 0, number, turn, turn + 1] for turn in range(200)]


def test_the_number_of_a_layer_takes_the_bits_below_the_sign() -> None:
    assert PLAIN.LAYER * PLAIN.MAX_LAYER == 2**63


def voided(module: Any, device: str, gathered: Tensor, fields: int) -> Tensor:
    """As count_exchange.py calls it: on columns of what was gathered."""
    gathered = gathered.to(device, copy=True)
    counts = module.zero_counts_on_error(gathered[:, fields:], gathered[:, :fields], 3)
    assert counts.is_contiguous()
    return counts.cpu()


@pytest.mark.parametrize("ill", [None, 0, 1, -1])
@pytest.mark.parametrize(("size", "E"), [(1, 7), (2, 8), (6, 96), (8, 512), (64, 4096)])
def test_all_or_nothing(size: int, E: int, ill: int | None) -> None:
    fields = 4
    gathered = torch.randint(1, 2**40, (size, fields + E))
    gathered[:, 1], gathered[:, 3] = 3, 2**55
    if ill is not None:
        gathered[ill % size, 1] += 2**33
    expected = gathered[:, fields:] * (ill is None)
    assert torch.equal(voided(PLAIN, "cpu", gathered, fields), expected)
    assert torch.equal(voided(KERNEL, DEVICE, gathered, fields), expected)


@pytest.mark.parametrize(
    ("layers", "is_same"),
    [((4, 4, 4), True), ((4, 5, 4), False), ((0, 4, 4), True), ((0, 0, 0), True), ((5, 0, 4), False)],
)
def test_layers_must_be_the_same_unless_a_rank_gives_none(layers: tuple[int, ...], is_same: bool) -> None:
    gathered = torch.randint(1, 2**40, (3, 4 + 8))
    gathered[:, 1], gathered[:, 3] = 3 + PLAIN.LAYER * torch.tensor(layers), 2**55
    expected = gathered[:, 4:] * is_same
    assert torch.equal(voided(PLAIN, "cpu", gathered, 4), expected)
    assert torch.equal(voided(KERNEL, DEVICE, gathered, 4), expected)


@pytest.mark.parametrize("other", [None, 0, 2])
@pytest.mark.parametrize("difference", [-16, 16, 2**54])
def test_orders_must_be_the_same(other: int | None, difference: int) -> None:
    gathered = torch.randint(1, 2**40, (3, 4 + 8))
    gathered[:, 1], gathered[:, 3] = 3, 2**55 + 2**30
    if other is not None:
        gathered[other, 3] += difference
    expected = gathered[:, 4:] * (other is None)
    assert torch.equal(voided(PLAIN, "cpu", gathered, 4), expected)
    assert torch.equal(voided(KERNEL, DEVICE, gathered, 4), expected)


def test_a_checkpoint_that_saves_maxima_recomputes_the_order() -> None:
    """torchtitan's selective checkpoints do so. A recomputation is another exchange, with an order of its own."""
    orders, found = iter((2**55, 2**56)), []

    def layer(x: Tensor) -> Tensor:
        headers = torch.tensor([[4, 3, 0, next(orders)]]).repeat(2, 1)
        found.append(PLAIN.zero_counts_on_error(torch.ones(2, 5, dtype=torch.int64), headers, 3))
        return x.sin().sin()

    def policy(_: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        saves = operation == torch.ops.aten.max.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    out: Any = checkpoint(layer, torch.ones(3, requires_grad=True), use_reentrant=False, context_fn=contexts)
    out.sum().backward()
    assert [counts.sum() for counts in found] == [10, 10]
