"""The owner's index lists, plain and in Triton, against loops over tokens; large ones on a GPU against plain ones."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sonic_ep.kernels.dispatch.plan.reference import Plan
from sonic_ep.kernels.dispatch.recv_index.reference import PairBuffer
from tests.dispatch import oracle
from tests.dispatch.oracle import Case
from tests.helpers.implementations import ON_GPU, PLAIN, Implementation, of_all, of_kernels
from tests.helpers.poison import poisoned_empty
from tests.helpers.waiting import assert_nothing_waits
from tests.kernels.received import Draw, Received, received_by

# More than 32 experts: their bits fill several words.
CASES = [
    Case((13,), 5, 4),
    Case((13,), 5, 4, multiple=8),
    Case((0,), 5, 2),
    Case((6,), 3, 4, "none"),
    Case((9,), 3, 33, "all"),
    Case((7,), 3, 100, "any", multiple=3),
    Case((600,), 3, 2, "all", multiple=7, tile=128),
    Case((300,), 3, 40, "last", tile=16),
    Case((0, 0), 4, 2),
    Case((5, 6), 4, 2, "none"),
    Case((11, 0), 1, 2, multiple=3, tile=5),
    Case((13, 1, 0, 22), 5, 8, multiple=4),
    Case((9, 7, 5), 5, 3 * 33, multiple=3),
]
of_cases = pytest.mark.parametrize("case", CASES, ids=str)


def lists_of(implementation: Implementation, received: Received) -> tuple[PairBuffer, Tensor]:
    """What both functions give, from poisoned memory."""
    module, device = implementation.module("dispatch.recv_index"), implementation.device
    chunks = received.chunks(device)
    rows_V, weights_V = received.row_in_source_V.to(device), received.weights_V.to(device)
    with poisoned_empty():
        row_starts_S = module.row_starts(chunks, rows_V)
        starts = None if received.one_source else row_starts_S
        return module.pair_lists(chunks, rows_V, weights_V, starts, received.num_rows), row_starts_S


def check(implementation: Implementation, case: Case, pair_weights: torch.dtype = torch.float32) -> None:
    for dst in range(case.size):
        received = received_by(case, dst, pair_weights)
        buffer, row_starts_S = lists_of(implementation, received)
        expected = oracle.recv_lists(case, dst, pair_weights)
        for name, values in {
            "row_of_pair_P": expected.row_of_pair,
            "slot_V": expected.slots,
            "pairs_by_row_V": expected.pairs_by_row,
            "pair_starts_R": expected.pair_starts,
        }.items():
            got: Tensor = getattr(buffer, name)
            assert (got.dtype, got.tolist()) == (torch.int32, values), (dst, name)
        assert buffer.weights_P.dtype == pair_weights
        assert (
            buffer.weights_P.tolist()
            == torch.tensor(expected.pair_weights, dtype=torch.float64).to(pair_weights).tolist()
        )
        if case.size > 1:
            sent = [len(case.tokens_needed(source, dst)) for source in range(case.size)]
            assert row_starts_S.dtype == torch.int32
            assert row_starts_S.tolist() == [sum(sent[:source]) for source in range(case.size + 1)]


@of_all
@of_cases
def test_lists_match_loops(case: Case, implementation: Implementation) -> None:
    check(implementation, case)


@of_all
@pytest.mark.parametrize("pair_weights", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_gates_of_any_dtype(pair_weights: torch.dtype, implementation: Implementation) -> None:
    check(implementation, CASES[1], pair_weights)
    check(implementation, CASES[11], pair_weights)


@of_all
@pytest.mark.parametrize("case", [CASES[8], CASES[9], CASES[11], CASES[12]], ids=str)
def test_rows_lie_in_the_order_of_the_sources_of_chunks(case: Case, implementation: Implementation) -> None:
    """Pairs arrive in rank order all the same."""
    module, S = implementation.module("dispatch.recv_index"), case.size
    order = [*range(1, S), 0]
    for dst in range(S):
        received = received_by(case, dst, torch.float32)
        chunks, device = received.chunks(implementation.device), implementation.device
        table_FC = chunks.table_FC.view(6, S, -1)[:, order].reshape(6, -1)
        rows_V, weights_V = received.row_in_source_V.to(device), received.weights_V.to(device)
        with poisoned_empty():
            moved = replace(chunks, table_FC=table_FC)
            row_starts_S = module.row_starts(moved, rows_V)
            got = module.pair_lists(moved, rows_V, weights_V, row_starts_S, received.num_rows)
        wanted, _ = lists_of(implementation, received)
        sent = [len(case.tokens_needed(source, dst)) for source in range(S)]
        by_source = torch.arange(sum(sent)).split(sent)
        old_row = torch.cat([by_source[source] for source in order])  # of each row in its new place
        assert row_starts_S.tolist() == [sum(sent[source] for source in order[:count]) for count in range(S + 1)]
        for name in ("weights_P", "slot_V"):
            assert torch.equal(getattr(got, name), getattr(wanted, name)), name
        assert torch.equal(old_row[got.row_of_pair_P.cpu().long()], wanted.row_of_pair_P.cpu().long())
        starts, pairs = wanted.pair_starts_R.tolist(), wanted.pairs_by_row_V.tolist()
        of_row = [pairs[starts[row] : starts[row + 1]] for row in old_row.tolist()]
        assert got.pairs_by_row_V.tolist() == [pair for each in of_row for pair in each]
        assert got.pair_starts_R.tolist() == [sum(map(len, of_row[:row])) for row in range(len(of_row) + 1)]


@of_kernels
@pytest.mark.parametrize("late", range(3))
def test_what_a_lost_rank_has_left_stays_in_its_region(late: int, implementation: Implementation) -> None:
    """Rows of an earlier step, when there were more of them: nobody may write behind the lists."""
    received, module = received_by(Case((9, 7, 5), 5, 9, "all"), 1), implementation.module("dispatch.recv_index")
    chunks, device = received.chunks(implementation.device), implementation.device
    starts_S = module.row_starts(chunks, received.row_in_source_V.to(device))
    first, stop = (int(starts_S[source]) for source in (late, late + 1))
    pairs_S = chunks.table_FC[1].view(3, -1).sum(1).tolist()
    rows_V = received.row_in_source_V.clone()
    rows_V[sum(pairs_S[:late]) : sum(pairs_S[: late + 1])] += 10**6
    lists = module.pair_lists(chunks, rows_V.to(device), received.weights_V.to(device), starts_S, received.num_rows)
    assert int(lists.row_of_pair_P.max()) < received.num_rows
    assert int(((lists.row_of_pair_P >= first) & (lists.row_of_pair_P < stop)).sum()) == pairs_S[late]


@of_kernels
@pytest.mark.parametrize("spare", [0, 1, 3000])
@pytest.mark.parametrize("case", [CASES[1], CASES[11], CASES[-1]], ids=str)
def test_room_behind_the_lists_is_zero_if_so_wanted(case: Case, spare: int, implementation: Implementation) -> None:
    for dst in range(case.size):
        received = received_by(case, dst, torch.float32)
        wanted, _ = lists_of(implementation, received)
        device, P, V = implementation.device, wanted.row_of_pair_P.shape[0], wanted.slot_V.shape[0]
        chunks = replace(received.chunks(device), num_rows=P + spare, num_pairs=V + 2 * spare, zeroed=True)
        rows_V, weights_V = received.row_in_source_V.to(device), received.weights_V.to(device)
        module = implementation.module("dispatch.recv_index")
        with poisoned_empty():
            starts = None if received.one_source else module.row_starts(chunks, rows_V)
            lists = module.pair_lists(chunks, rows_V, weights_V, starts, received.num_rows)
        for name, capacity in (("row_of_pair_P", spare), ("weights_P", spare), ("slot_V", 2 * spare)):
            assert getattr(lists, name).tolist() == [*getattr(wanted, name).tolist(), *[0] * capacity], name
        assert torch.equal(lists.pairs_by_row_V[:V], wanted.pairs_by_row_V)
        assert torch.equal(lists.pair_starts_R, wanted.pair_starts_R)


def cases() -> st.SearchStrategy[Case]:
    def of_size(size: int) -> st.SearchStrategy[Case]:
        return st.builds(
            Case,
            tokens=st.tuples(*[st.one_of(st.just(0), st.integers(0, 24)) for _ in range(size)]),
            H=st.just(1),
            E=st.sampled_from([1, 2, 3, 4, 33]).map(lambda e: e * size),
            picks=st.sampled_from(["any", "any", "all", "last", "none"]),
            multiple=st.integers(1, 9),
            tile=st.integers(1, 9),
            seed=st.integers(0, 99),
        )

    return st.integers(1, 3).flatmap(of_size)


@of_all
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_lists_of_any_case_match_loops(implementation: Implementation, case: Case) -> None:
    check(implementation, case)


@of_all
def test_example_of_the_docstring(implementation: Implementation) -> None:
    counts_SE = torch.tensor([[5, 1]])
    plan = Plan.from_counts(counts_SE, counts_SE, tile_rows=4)
    rows_V = torch.tensor([0, 2, 3, 5, 6, 2], dtype=torch.int32)
    buffer, _ = lists_of(implementation, Received(plan, 0, rows_V, torch.arange(1.0, 7.0), 7))
    assert buffer.slot_V.tolist() == [0, 1, 2, 3, 4, 5]
    assert buffer.row_of_pair_P.tolist() == [0, 2, 3, 5, 6, 2]
    assert buffer.pairs_by_row_V.tolist() == [0, 1, 5, 2, 3, 4]
    assert buffer.pair_starts_R.tolist() == [0, 1, 1, 3, 4, 4, 5, 6]
    assert buffer.weights_P.tolist() == [1, 2, 3, 4, 5, 6]


LARGE = [
    Draw((24576,), 128, 8 / 128),
    Draw((24576,), 128, 8 / 128, multiple=128, pair_weights=torch.float64),
    Draw((16384,), 512, 10 / 512, hot=511),
    Draw((1001,), 512, 0.5, multiple=16),
    Draw((5003,), 1, 0.7, multiple=64),
    Draw((777,), 31, (0.0, 0.9, 0.0, *(0.1,) * 27, 0.0)),
    Draw((4096,), 8, 0.0, hot=3),
    Draw((333,), 64, 0.0),
    Draw((0,), 64, 0.1),
    Draw((8191,) * 8, 16, 8 / 128, multiple=32),
    Draw((1000, 0, 37, 4001), 33, 0.05, hot=0),
    Draw((97,) * 64, 2, 0.3, multiple=16, pair_weights=torch.float64),
    Draw((50, 60), 512, 0.2),
    Draw((0, 0, 0), 16, 0.5),
]
of_large = pytest.mark.parametrize("draw", LARGE, ids=str)


@pytest.mark.gpu
@of_large
def test_large_lists_match_the_plain_ones_on_a_gpu(draw: Draw) -> None:
    received = draw.receive()
    expected, expected_starts_S = lists_of(PLAIN, received)
    for _ in range(2):
        buffer, row_starts_S = lists_of(ON_GPU, received)
        for field in fields(PairBuffer):
            got, wanted = getattr(buffer, field.name).cpu(), getattr(expected, field.name)
            assert got.dtype == wanted.dtype, field.name
            assert torch.equal(got, wanted), field.name
        assert torch.equal(row_starts_S.cpu(), expected_starts_S)


@pytest.mark.gpu
@pytest.mark.parametrize("draw", [LARGE[0], LARGE[9]], ids=str)
def test_nothing_waits_for_the_device(draw: Draw) -> None:
    received = draw.receive()
    module, device = ON_GPU.module("dispatch.recv_index"), ON_GPU.device
    rows_V, weights_V = received.row_in_source_V.to(device), received.weights_V.to(device)

    chunks = received.chunks(device)

    def lists() -> None:
        module.pair_lists(chunks, rows_V, weights_V, module.row_starts(chunks, rows_V), received.num_rows)

    assert_nothing_waits(lists)
