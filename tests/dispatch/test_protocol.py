"""The transport contract, on real ranks, against loops over tokens: rows, index lists, weights, and the way back.

Bitwise wherever the contract only moves data; sums over ranks are of small integers, exact in every dtype.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sonic_ep.dispatch.protocol import DispatchHandle
from tests.dispatch import oracle
from tests.dispatch.oracle import Case, Outcome, combine_rows
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]

# T0: a rank without tokens; "any": none to all experts for a token; "last": one expert gets all; t > 1: padded chunks.
CASES = [
    Case((13,), 5, 4),
    Case((13,), 5, 4, multiple=8),
    Case((0,), 5, 2),
    Case((6,), 3, 4, "none"),
    Case((13, 9), 5, 4),
    Case((13, 9), 5, 6, multiple=4),
    Case((0, 11), 7, 4),
    Case((11, 0), 1, 2, multiple=3, tile=5),
    Case((0, 0), 4, 2),
    Case((5, 6), 4, 2, "none"),
    Case((5, 6), 4, 2, "all"),
    Case((21, 18), 4, 8, "last", multiple=8, tile=8),
    Case((13, 1, 0, 22), 5, 8),
    Case((13, 1, 0, 22), 5, 8, multiple=4),
    Case((0, 0, 0, 9), 3, 4, "all", multiple=2),
    Case((7, 8, 9, 10), 4, 12, "last"),
    Case((40, 33, 27, 38), 6, 16, "top2", multiple=16, tile=16),
    Case((3, 1, 2, 4), 2, 4, "any", tile=128),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def outcomes(ranks: Ranks, case: Case, dtype: torch.dtype, pair_weights: torch.dtype = torch.float32) -> list[Outcome]:
    """What every rank sees; a rank alone is this process, without torch.distributed."""
    if case.size == 1:
        return [oracle.exchange(0, case, dtype, pair_weights)]
    return ranks(case.size).run(oracle.exchange, case, dtype, pair_weights)


def equal_bits(actual: Tensor, expected: Tensor) -> bool:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    return torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def check(
    ranks: Ranks, case: Case, dtype: torch.dtype = torch.float32, pair_weights: torch.dtype = torch.float32
) -> None:
    seen = outcomes(ranks, case, dtype, pair_weights)
    for rank, outcome in enumerate(seen):
        check_rows(case, rank, outcome, dtype)
        check_recv_lists(case, rank, outcome, pair_weights)
        check_token_lists(case, rank, outcome)
        check_splits(case, rank, outcome)
        check_way_back(case, rank, outcome, dtype, pair_weights)
    assert sum(outcome.received_dot for outcome in seen) == sum(outcome.sent_dot for outcome in seen)


def check_rows(case: Case, rank: int, outcome: Outcome, dtype: torch.dtype) -> None:
    """Each distinct token once, by source, then token."""
    x_ST = [case.bits(source, dtype) for source in range(case.size)]
    rows = [x_ST[source][token] for source, token in case.received(rank)]
    assert equal_bits(outcome.rows, torch.stack(rows) if rows else x_ST[0][:0])
    assert outcome.num_rows == len(rows)


def check_recv_lists(case: Case, rank: int, outcome: Outcome, pair_weights: torch.dtype) -> None:
    expected = oracle.recv_lists(case, rank, pair_weights)
    for name, values in {
        "row_of_pair_P": expected.row_of_pair,
        "pairs_by_row_V": expected.pairs_by_row,
        "pair_starts_R": expected.pair_starts,
        "slot_V": expected.slots,
        "expert_starts_e": expected.expert_starts,
    }.items():
        check_list(outcome, name, values)
    assert equal_bits(outcome.weights_P, torch.tensor(expected.pair_weights, dtype=torch.float64).to(pair_weights))


def check_token_lists(case: Case, rank: int, outcome: Outcome) -> None:
    if case.size == 1:
        assert outcome.transport_lists == ()
        return
    sent = [token for dst in range(case.size) for token in case.tokens_needed(rank, dst)]
    by_token = [[u for u, token in enumerate(sent) if token == t] for t in range(case.tokens[rank])]
    starts = [sum(map(len, by_token[:t])) for t in range(len(by_token) + 1)]
    expected = [sent, [u for rows in by_token for u in rows], starts]
    assert [values.tolist() for values in outcome.transport_lists] == expected
    assert {values.dtype for values in outcome.transport_lists} == {torch.int32}


def check_list(outcome: Outcome, name: str, expected: list[int]) -> None:
    values = outcome.lists[name]
    assert (values.dtype, values.tolist()) == (torch.int32, expected), name


def check_splits(case: Case, rank: int, outcome: Outcome) -> None:
    all_peers = range(case.size)

    def pairs(source: int, dst: int) -> int:
        return sum(case.dst(expert) == dst for expert, _ in case.pairs(source))

    assert outcome.splits.rows_out == tuple(len(case.tokens_needed(rank, q)) for q in all_peers)
    assert outcome.splits.rows_in == tuple(len(case.tokens_needed(s, rank)) for s in all_peers)
    assert outcome.splits.pairs_out == tuple(pairs(rank, q) for q in all_peers)
    assert outcome.splits.pairs_in == tuple(pairs(s, rank) for s in all_peers)
    assert outcome.num_tokens == case.tokens[rank]


def check_way_back(case: Case, rank: int, outcome: Outcome, dtype: torch.dtype, pair_weights: torch.dtype) -> None:
    """combine(dispatch(x)) is x times the number of ranks that need it; weights return as they were sent."""
    x_TH = case.integers(rank, case.tokens[rank], dtype, stream=3)
    needed = [token for dst in range(case.size) for token in case.tokens_needed(rank, dst)]
    times = torch.tensor([needed.count(token) for token in range(case.tokens[rank])], dtype=dtype)
    assert outcome.roundtrip.dtype == dtype
    assert torch.equal(outcome.roundtrip, x_TH * times[:, None])
    assert equal_bits(outcome.returned, case.pair_weights(rank, pair_weights))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exchange(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


@pytest.mark.parametrize("dtype", DTYPES, ids="rows-{}".format)
@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[13]], ids=str)
def test_exchange_of_any_dtype(ranks: Ranks, case: Case, dtype: torch.dtype) -> None:
    check(ranks, case, dtype)


@pytest.mark.parametrize("pair_weights", DTYPES, ids="gates-{}".format)
@pytest.mark.parametrize("case", [CASES[1], CASES[5], CASES[13]], ids=str)
def test_exchange_of_gates_of_any_dtype(ranks: Ranks, case: Case, pair_weights: torch.dtype) -> None:
    check(ranks, case, pair_weights=pair_weights)


def cases(size: int) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        tokens=st.tuples(*[st.one_of(st.just(0), st.integers(0, 24)) for _ in range(size)]),
        H=st.integers(1, 6),
        E=st.integers(1, 4).map(lambda e: e * size),
        picks=st.sampled_from(["any", "any", "all", "last", "none"]),
        multiple=st.integers(1, 9),
        tile=st.integers(1, 9),
        seed=st.integers(0, 99),
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@settings(max_examples=40)
@given(st.data())
def test_exchange_of_any_routing(ranks: Ranks, size: int, data: st.DataObject) -> None:
    check(ranks, data.draw(cases(size)), torch.float64)


def adjoint(rank: int, case: Case) -> tuple[float, float, float]:
    """Worker: <dispatch(x), g>, <x, combine(g)> and a bound on their rounding, for normal values in float64."""
    transport = oracle.transport_of(oracle.group_of(case))
    handle = transport.prepare(case.routing(rank), case.plan().of_rank(rank)).handle
    generator = torch.Generator().manual_seed(rank)
    x_TH, g_RH = (
        torch.randn(n, case.H, generator=generator, dtype=torch.float64) for n in (case.tokens[rank], handle.num_rows)
    )
    rows = transport.dispatch(x_TH, handle).result()
    return (
        oracle.dot(rows, g_RH),
        oracle.dot(x_TH, combine_rows(transport, g_RH, handle)),
        oracle.dot(rows.abs(), g_RH.abs()),
    )


@pytest.mark.parametrize("case", [case for case in CASES if case.size > 1], ids=str)
def test_combine_is_the_transpose_of_dispatch(ranks: Ranks, case: Case) -> None:
    received, sent, bound = (sum(values) for values in zip(*ranks(case.size).run(adjoint, case), strict=True))
    assert abs(received - sent) <= 1e-14 * bound


def roundtrip_of_lists(rank: int, case: Case) -> tuple[DispatchHandle, DispatchHandle]:
    """Worker: a receipt, and the same taken apart for saving and put together again."""
    transport = oracle.transport_of(oracle.group_of(case))
    handle = transport.prepare(case.routing(rank), case.plan().of_rank(rank)).handle
    return handle, handle.without_lists().with_lists(handle.lists())


@pytest.mark.parametrize("case", [CASES[1], CASES[13]], ids=str)
def test_receipt_survives_being_taken_apart(ranks: Ranks, case: Case) -> None:
    pairs = [roundtrip_of_lists(0, case)] if case.size == 1 else ranks(case.size).run(roundtrip_of_lists, case)
    for before, after in pairs:
        lists, again = oracle.handle_lists(before), oracle.handle_lists(after)
        assert lists.keys() == again.keys()
        for name, values in lists.items():
            other = again[name]
            assert values is other is None or (values is not None and other is not None and torch.equal(values, other))
        assert (before.splits, before.num_tokens, before.num_rows) == (after.splits, after.num_tokens, after.num_rows)
        held = [value for value in vars_of(before.without_lists()) if isinstance(value, Tensor)]
        assert held == []


def vars_of(slotted: object) -> list[object]:
    return [getattr(slotted, name) for name in type(slotted).__slots__]  # type: ignore[attr-defined]
