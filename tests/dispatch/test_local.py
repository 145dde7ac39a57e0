"""One rank takes no collective and copies no row."""

import os
from dataclasses import replace
from importlib.util import find_spec
from types import BuiltinFunctionType, FunctionType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sonic_ep.dispatch import local
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.functional import moe
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import values_of_pairs
from sonic_ep.routing import Routing
from tests.dispatch.oracle import Case, combine_rows, handle_lists, on_device
from tests.helpers.poison import poisoned_empty
from tests.helpers.static_buffers import lists_with_spare, with_spare
from tests.helpers.waiting import assert_nothing_waits

INTERPRETS = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
CASE = Case((13,), 5, 4, multiple=8)


@pytest.fixture
def no_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function of torch.distributed raises."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("torch.distributed was called")

    functions = [name for name, value in vars(dist).items() if type(value) in (FunctionType, BuiltinFunctionType)]
    assert {"all_to_all_single", "all_gather_into_tensor", "all_gather_object", "get_rank"} <= set(functions)
    for name in functions:
        monkeypatch.setattr(dist, name, forbidden)


@pytest.mark.usefixtures("no_distributed")
def test_nothing_of_torch_distributed_is_called() -> None:
    pairs = torch.tensor(CASE.pairs(0))
    routing = Routing.from_pairs(
        pairs[:, 1], pairs[:, 0], CASE.pair_weights(0), num_tokens=CASE.tokens[0], E=CASE.E, group=EPGroup.alone()
    )
    transport = LocalTransport()
    for each, plan in ((routing, plan_for(routing.counts, 0)), (CASE.routing(0), CASE.plan().of_rank(0))):
        prepared = transport.prepare(each, plan)
        rows = transport.dispatch(CASE.bits(0, torch.float32), prepared.handle).result()
        combine_rows(transport, rows, prepared.handle)
        transport.combine_scalars(prepared.weights_P[:, None], prepared.handle).result()


def test_statuses_are_checked_before_lists_are_made() -> None:
    def check() -> None:
        raise ValueError("NaN or inf")

    routing = replace(CASE.routing(0), max_rows=None, split_sizes=cast(Any, SimpleNamespace(check=check)))
    with pytest.raises(ValueError, match="NaN or inf"):
        LocalTransport().prepare(routing, CASE.plan().of_rank(0))


def test_no_row_is_copied() -> None:
    transport = LocalTransport()
    handle = transport.prepare(CASE.routing(0), CASE.plan().of_rank(0)).handle
    x_TH = CASE.bits(0, torch.float32)
    rows = transport.dispatch(x_TH, handle).result()
    assert rows.data_ptr() == x_TH.data_ptr()
    assert rows.shape == x_TH.shape
    assert torch.equal(combine_rows(transport, rows, handle), x_TH)


def test_rows_start_where_a_gpu_can_read_them() -> None:
    transport = LocalTransport()
    handle = transport.prepare(CASE.routing(0), CASE.plan().of_rank(0)).handle
    for start in (0, 1, 4, 8):
        x_TH = torch.randn(start + CASE.tokens[0] * CASE.H).bfloat16()[start:].view(-1, CASE.H)
        for rows_RH in (
            transport.dispatch(x_TH, handle).result(),
            transport.dispatch(x_TH, handle, overlap=True).result(),
        ):
            assert torch.equal(rows_RH, x_TH)
            assert rows_RH.storage_offset() * rows_RH.itemsize % 16 == 0
            assert (rows_RH is x_TH) == (start % 8 == 0)


def test_tokens_without_an_expert_have_an_empty_list() -> None:
    """Their row is x itself like all others; that no pair reads it is what makes their output zero."""
    handle = LocalTransport().prepare(CASE.routing(0), CASE.plan().of_rank(0)).handle
    lonely = sorted(set(range(CASE.tokens[0])) - {token for _, token in CASE.pairs(0)})
    assert lonely
    assert handle.pair_starts_R.diff()[lonely].tolist() == [0] * len(lonely)
    assert not set(handle.row_of_pair_P.tolist()) & set(lonely)
    assert handle.num_rows == CASE.tokens[0]


def test_values_of_padding_do_not_return() -> None:
    transport = LocalTransport()
    prepared = transport.prepare(CASE.routing(0), CASE.plan().of_rank(0))
    values_P = torch.full_like(prepared.weights_P, torch.nan)
    slots = prepared.handle.slot_V.long()
    values_P[slots] = torch.arange(slots.shape[0], dtype=values_P.dtype)
    assert slots.shape[0] < values_P.shape[0]
    assert transport.combine_scalars(values_P[:, None], prepared.handle).result().tolist() == list(
        range(slots.shape[0])
    )


@pytest.mark.skipif(not INTERPRETS, reason="interprets Triton kernels, with TRITON_INTERPRET=1")
def test_lists_with_spare_capacity_ask_for_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have room to spare, whose entries read row 0 with weight 0."""
    routing, plan, spare = CASE.routing(0), CASE.plan().of_rank(0), 7
    expected = LocalTransport().prepare(routing, plan)
    P, V = expected.weights_P.shape[0], expected.handle.slot_V.shape[0]
    roomy = with_spare(routing, spare, max_rows=P + 11)
    monkeypatch.setattr(local, "allows_spare_capacity", lambda _: True)
    monkeypatch.setattr(local, "split_sizes_async", None)
    with lists_with_spare():
        prepared = LocalTransport().prepare(roomy, plan)
    assert prepared.weights_P.shape[0] == P + 11
    for name, values in handle_lists(expected.handle).items():
        got, size = getattr(prepared.handle, name), values.shape[0]
        assert torch.equal(got[:size], values), name
        assert name == "pairs_by_row_V" or not got[size:].any(), name  # nobody reads that one behind its rows
    assert torch.equal(prepared.weights_P[:P], expected.weights_P)
    assert not prepared.weights_P[P:].any()
    returned = LocalTransport().combine_scalars(prepared.weights_P[:, None] + 1, prepared.handle).result()
    assert torch.equal(returned[:V], routing.weights_N + 1)
    assert not returned[V:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASE, Case((0,), 5, 4), Case((700,), 5, 40, multiple=16, tile=128)], ids=str)
def test_lists_on_a_gpu_are_those_of_the_cpu_and_nothing_waits(case: Case) -> None:
    transport, routing, plan = LocalTransport(), case.routing(0), case.plan().of_rank(0)
    on_gpu, plan_on_gpu = on_device("cuda", routing, plan)
    expected, prepared = transport.prepare(routing, plan), transport.prepare(on_gpu, plan_on_gpu)
    for name, values in handle_lists(expected.handle).items():  # on the GPU with spare capacity, if counts are rounded
        got = getattr(prepared.handle, name)
        assert got is values is None or torch.equal(got.cpu()[: values.shape[0]], values), name
    P = expected.weights_P.shape[0]
    assert torch.equal(prepared.weights_P.cpu()[:P], expected.weights_P)
    assert not prepared.weights_P[P:].any()
    assert torch.equal(
        transport.combine_scalars(prepared.weights_P[:, None], prepared.handle).result(), on_gpu.weights_N
    )
    assert_nothing_waits(lambda: transport.prepare(on_gpu, plan_on_gpu))
    assert_nothing_waits(lambda: transport.combine_scalars(prepared.weights_P[:, None], prepared.handle).result())


@pytest.mark.gpu
@pytest.mark.parametrize("n", [256, 768])
def test_sums_beside_the_gradient_of_the_weights_have_the_same_bits(n: int) -> None:
    """In passes that the host launches without a pause: the sums begin while the GEMM before them runs."""
    T, d, e, K = 8192, 1024, 16, 4
    torch.manual_seed(n)
    tokens = torch.arange(T, device="cuda").repeat_interleave(K)
    experts, pair_weights = torch.rand(T, e, device="cuda").topk(K).indices.flatten(), torch.rand(T * K, device="cuda")
    routing = Routing.from_pairs(
        tokens, experts, pair_weights.requires_grad_(), num_tokens=T, E=e, group=EPGroup.alone()
    )
    sizes = (T, d), (e, 2 * n, d), (e, d, n)
    leaves = [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    dout = torch.randn(T, d, device="cuda", dtype=torch.bfloat16)

    def gradients() -> tuple[Tensor, ...]:
        with poisoned_empty():
            out = moe(leaves[0], routing, *leaves[1:], transport=LocalTransport(), group=EPGroup.alone())
            return torch.autograd.grad(out, [routing.weights_N, *leaves], dout)

    def not_overlapped(*arguments: Any, **named: Any) -> Tensor:
        return values_of_pairs(*arguments, **named | {"overlap_previous": False})

    combine = LocalTransport.combine
    with (
        patch.object(LocalTransport, "combine", lambda *args, overlap=False, **named: combine(*args, **named)),
        patch.object(local, "values_of_pairs", not_overlapped),
    ):
        expected = gradients()
    for got in [gradients() for _ in range(20)]:
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
