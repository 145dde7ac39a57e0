"""What the all-to-all transport says it sent, how it sums, and whom it may talk to."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.groups import EPGroup
from tests.dispatch import oracle
from tests.dispatch.oracle import Case, Outcome, combine_rows
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]
CASES = [
    Case((13, 9), 5, 4, multiple=8),
    Case((0, 11), 7, 4),
    Case((5, 6), 4, 2, "none"),
    Case((13, 1, 0, 22), 5, 8, multiple=4),
    Case((7, 8, 9, 10), 3, 8, "all"),
    Case((7, 8, 9, 10), 4, 12, "last"),
]
FOUR = CASES[3]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def bytes_sent(case: Case, rank: int, dtype: torch.dtype, pair_weights: torch.dtype) -> dict[str, int]:
    """One open, dispatch, combine and combine_scalars: to other ranks only, padding never."""
    others = [q for q in range(case.size) if q != rank]
    out = sum(len({t for k, t in case.pairs(rank) if case.dst(k) == q}) for q in others)
    back = sum(len({t for k, t in case.pairs(s) if case.dst(k) == rank}) for s in others)
    pairs_out = sum(case.dst(k) != rank for k, _ in case.pairs(rank))
    pairs_back = sum(case.dst(k) == rank for s in others for k, _ in case.pairs(s))
    return {
        "lists": pairs_out * (4 + pair_weights.itemsize),
        "dispatch": out * case.H * dtype.itemsize,
        "combine": back * case.H * dtype.itemsize,
        "combine_scalars": pairs_back * pair_weights.itemsize,
    }


def check_wire_bytes(ranks: Ranks, case: Case, dtype: torch.dtype, pair_weights: torch.dtype) -> None:
    for rank, outcome in enumerate(ranks(case.size).run(oracle.exchange, case, dtype, pair_weights)):
        expected = bytes_sent(case, rank, dtype, pair_weights)
        # `exchange` dispatches and combines twice.
        assert outcome.wire_bytes == {
            **expected,
            "dispatch": 2 * expected["dispatch"],
            "combine": 2 * expected["combine"],
        }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wire_bytes(ranks: Ranks, case: Case) -> None:
    check_wire_bytes(ranks, case, torch.float32, torch.float32)


@pytest.mark.parametrize("pair_weights", DTYPES, ids="gates-{}".format)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids="rows-{}".format)
def test_wire_bytes_of_any_dtype(ranks: Ranks, dtype: torch.dtype, pair_weights: torch.dtype) -> None:
    check_wire_bytes(ranks, FOUR, dtype, pair_weights)


def test_wire_bytes_by_hand(ranks: Ranks) -> None:
    """3 tokens a rank, every token to both experts: 3 rows of 4 floats and 3 pairs cross in each direction."""
    case = Case((3, 3), 4, 2, "all")
    for outcome in ranks(2).run(oracle.exchange, case, torch.float32, torch.float32):
        assert outcome.wire_bytes == {"lists": 24, "dispatch": 2 * 48, "combine": 2 * 48, "combine_scalars": 12}


def one_row_to_many_experts(rank: int, case: Case) -> tuple[int, int]:
    """Worker: rows and pairs that this rank sent."""
    transport = AllToAllTransport(EPGroup())
    splits = transport.prepare(case.routing(rank), case.plan().of_rank(rank)).handle.splits
    return sum(splits.rows_out), sum(splits.pairs_out)


def test_a_row_travels_once_to_a_rank_however_many_experts_need_it(ranks: Ranks) -> None:
    case = Case((5, 5), 2, 16, "all")
    assert ranks(2).run(one_row_to_many_experts, case) == [(10, 80), (10, 80)]


def dispatch_of_any_kind(rank: int, case: Case) -> list[bool]:
    """Worker: rows of integers, of no stride, of one column, and columns of a wider matrix arrive as they were."""
    transport = AllToAllTransport(EPGroup())
    handle = transport.prepare(case.routing(rank), case.plan().of_rank(rank)).handle
    T = max(case.tokens)
    ids = torch.arange(T)[:, None]
    kinds: list[Callable[[int], Tensor]] = [
        lambda s: (ids * 10 + s).expand(T, 3),
        lambda s: (ids + s).to(torch.uint8),
        lambda s: torch.arange(6.0 * T).view(6, T).T[:, ::2] + s,
    ]
    equal = []
    for kind in kinds:
        rows = transport.dispatch(kind(rank)[: case.tokens[rank]], handle).result()
        equal.append(torch.equal(rows, torch.stack([kind(s)[t] for s, t in case.received(rank)])))
    return equal


def test_rows_of_any_kind(ranks: Ranks) -> None:
    assert ranks(4).run(dispatch_of_any_kind, Case((13, 1, 0, 22), 5, 8, "all")) == [[True] * 3] * 4


def sum_of_unequal_parts(rank: int, case: Case, dtype: torch.dtype) -> Tensor:
    """Worker: rank 0 answers every row with 1, each other rank with half of the last place of 1."""
    transport = AllToAllTransport(EPGroup())
    handle = transport.prepare(case.routing(rank), case.plan().of_rank(rank)).handle
    value = 1.0 if rank == 0 else torch.finfo(dtype).eps / 2
    return combine_rows(transport, torch.full((handle.num_rows, case.H), value, dtype=dtype), handle)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_combine_sums_in_fp32_and_rounds_once(ranks: Ranks, dtype: torch.dtype) -> None:
    """1 + 3/2 of its last place rounds to 1 + 2 (ties to even); summed in the dtype itself it would stay 1."""
    case = Case((3, 2, 0, 4), 2, 4, "all")
    for T, out in zip(case.tokens, ranks(4).run(sum_of_unequal_parts, case, dtype), strict=True):
        assert torch.equal(out, torch.full((T, 2), 1 + 2 * torch.finfo(dtype).eps, dtype=dtype))


def two_layers_at_once(rank: int, first: Case, second: Case) -> list[bool]:
    """Worker: one transport, two receipts, used in turn as two layers of a model use them."""
    transport = AllToAllTransport(EPGroup())
    cases = (first, second)
    handles = [transport.prepare(case.routing(rank), case.plan().of_rank(rank)).handle for case in cases]
    x = [case.integers(rank, case.tokens[rank], torch.float32, stream=3) for case in cases]
    rows = [transport.dispatch(*each).result() for each in zip(x, handles, strict=True)]
    alone = [oracle.exchange(rank, case, torch.float32, torch.float32).roundtrip for case in cases]
    back = [combine_rows(transport, rows[i], handles[i]) for i in (1, 0)]
    return [torch.equal(back[0], alone[1]), torch.equal(back[1], alone[0])]


def test_transport_keeps_no_state_between_receipts(ranks: Ranks) -> None:
    second = replace(FOUR, tokens=(2, 9, 17, 0), seed=5)
    assert ranks(4).run(two_layers_at_once, FOUR, second) == [[True, True]] * 4


def exchange_in_pairs(rank: int, cases: list[Case]) -> Outcome:
    """Worker: two EP groups of two ranks, {0, 2} and {1, 3}, each with its own case."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = EPGroup(groups[rank % 2])
    return oracle.use(AllToAllTransport(group), group.rank, cases[rank % 2], torch.float32, torch.float32)


def test_groups_do_not_mix(ranks: Ranks) -> None:
    cases = [Case((13, 9), 5, 4), Case((4, 17), 5, 6, seed=3)]
    for rank, outcome in enumerate(ranks(4).run(exchange_in_pairs, cases)):
        case, member = cases[rank % 2], rank // 2
        expected = [case.bits(s, torch.float32)[t] for s, t in case.received(member)]
        assert torch.equal(outcome.rows.view(torch.int32), torch.stack(expected).view(torch.int32))
        assert torch.equal(outcome.returned, case.pair_weights(member))


def test_a_rank_alone_needs_no_torch_distributed() -> None:
    """EPGroup promises: with one rank no collective is ever called."""
    case = Case((13,), 5, 4, multiple=8)
    assert not dist.is_initialized()
    outcome = oracle.use(AllToAllTransport(EPGroup.alone()), 0, case, torch.float32, torch.float32)
    needed = sorted({token for _, token in case.pairs(0)})
    assert torch.equal(outcome.rows.view(torch.int32), case.bits(0, torch.float32)[needed].view(torch.int32))
    assert torch.equal(outcome.returned, case.pair_weights(0))
    assert sum(outcome.wire_bytes.values()) == 0
