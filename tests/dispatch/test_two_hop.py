"""Two hops against the all-to-all and against loops over tokens: rows, lists, sums, gradients, and bytes by host.

Bits are compared with the all-to-all where sums are exact. With any values they are compared with an all-to-all that
adds by host first in combine, as two hops must.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig
from sonic_ep.config import RoundingMode
from sonic_ep.dispatch import row_exchange, two_hop
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.plan import split_sizes_async
from sonic_ep.dispatch.protocol import DispatchHandle, Pending, Transport
from sonic_ep.dispatch.two_hop import TwoHopTransport
from sonic_ep.functional import moe
from sonic_ep.kernels.combine.gather_sum.reference import gather_sum
from sonic_ep.kernels.dispatch.send_index.reference import sent_rows
from sonic_ep.routing import Routing
from tests.dispatch import oracle
from tests.dispatch.oracle import Case, Outcome
from tests.helpers.launch import RankPool
from tests.helpers.static_buffers import lists_with_spare, with_spare

Ranks = Callable[[int], RankPool]
FOUR = [
    Case((13, 9, 17, 21), 5, 8, multiple=4),
    Case((13, 1, 0, 22), 5, 8),
    Case((0, 0, 0, 9), 3, 4, "all", multiple=2),
    Case((7, 8, 9, 10), 4, 12, "last"),
    Case((5, 6, 0, 3), 4, 4, "none"),
    Case((40, 33, 27, 38), 6, 16, "top2", multiple=16, tile=16),
]
EIGHT = [Case((13, 1, 0, 22, 9, 8, 17, 5), 5, 16, multiple=4), Case((3, 0, 0, 7, 0, 1, 0, 2), 4, 8, "all")]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def ranks(ranks: Ranks) -> Iterator[Ranks]:
    """As everywhere, but eight ranks end with this module: gloo's idle threads would slow all later tests."""
    eight: list[RankPool] = []

    def pool(size: int) -> RankPool:
        if size == 8 and not eight:
            eight.append(RankPool(8))
        return eight[0] if size == 8 else ranks(size)

    yield pool
    for each in eight:
        each.close()


def arrival(size: int, per_host: int) -> list[int]:
    """Source ranks in the order in which their rows lie: by number on their host, then by host."""
    return sorted(range(size), key=lambda rank: (rank % per_host, rank // per_host))


# --- the contract --------------------------------------------------------------------------------------------------


def exchange(rank: int, case: Case, per_host: int, dtype: torch.dtype, pair_weights: torch.dtype) -> Outcome:
    return oracle.use(TwoHopTransport(EPGroup(), per_host), rank, case, dtype, pair_weights)


def check(
    ranks: Ranks,
    case: Case,
    per_host: int,
    dtype: torch.dtype,
    pair_weights: torch.dtype = torch.float32,
    by: Callable[..., Outcome] = exchange,
) -> None:
    seen = ranks(case.size).run(by, case, per_host, dtype, pair_weights)
    for rank, outcome in enumerate(seen):
        received = case.received(rank)
        new_row = {key: i for i, key in enumerate(sorted(received, key=lambda row: order_of(row, case, per_host)))}
        rows = [case.bits(source, dtype)[token] for source, token in new_row]
        wanted = torch.stack(rows) if rows else case.bits(0, dtype)[:0]
        assert torch.equal(outcome.rows.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
        check_lists(oracle.recv_lists(case, rank, pair_weights), outcome, [new_row[key] for key in received])
        check_way_back(case, rank, outcome, dtype, pair_weights)
        splits = outcome.splits
        X, Y, f = (sum(rows) for rows in (splits.crossing_out, splits.crossing_in, splits.forwarded_out))
        lists = 8 * X + 8 * f + 4 * (case.tokens[rank] + 1) + 4 * (Y + 1)  # docs/memory.md
        assert sum(values.nbytes for values in outcome.transport_lists) == lists
        assert splits.rows_out == tuple(len(case.tokens_needed(rank, q)) for q in range(case.size))
        assert splits.rows_in == tuple(len(case.tokens_needed(s, rank)) for s in range(case.size))
    assert sum(outcome.received_dot for outcome in seen) == sum(outcome.sent_dot for outcome in seen)


def order_of(row: tuple[int, int], case: Case, per_host: int) -> tuple[int, int]:
    source, token = row
    return arrival(case.size, per_host).index(source), token


def check_lists(expected: oracle.RecvLists, outcome: Outcome, new_row: list[int]) -> None:
    """expected: for rows in the order of source ranks. new_row: where each of these rows is."""
    starts = expected.pair_starts
    of_row = [expected.pairs_by_row[a:b] for a, b in zip(starts, starts[1:], strict=False)]
    moved = [of_row[new_row.index(row)] for row in range(len(new_row))]
    wanted = {
        "row_of_pair_P": [new_row[row] for row in expected.row_of_pair],
        "pairs_by_row_V": [pair for pairs in moved for pair in pairs],
        "pair_starts_R": [sum(map(len, moved[:row])) for row in range(len(moved) + 1)],
        "slot_V": expected.slots,
        "expert_starts_e": expected.expert_starts,
    }
    assert {name: outcome.lists[name].tolist() for name in wanted} == wanted
    assert {values.dtype for values in (*outcome.lists.values(), *outcome.transport_lists)} == {torch.int32}
    assert outcome.weights_P.tolist() == expected.pair_weights


def check_way_back(case: Case, rank: int, outcome: Outcome, dtype: torch.dtype, pair_weights: torch.dtype) -> None:
    x_TH = case.integers(rank, case.tokens[rank], dtype, stream=3)
    needed = [token for dst in range(case.size) for token in case.tokens_needed(rank, dst)]
    times = torch.tensor([needed.count(token) for token in range(case.tokens[rank])], dtype=dtype)
    assert torch.equal(outcome.roundtrip, x_TH * times[:, None])
    assert torch.equal(outcome.returned, case.pair_weights(rank, pair_weights))


@pytest.mark.parametrize("per_host", [1, 2, 4])
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_the_contract(ranks: Ranks, case: Case, per_host: int) -> None:
    check(ranks, case, per_host, torch.float32)


@pytest.mark.parametrize("per_host", [2, 4])
@pytest.mark.parametrize("case", EIGHT, ids=str)
def test_the_contract_on_eight_ranks(ranks: Ranks, case: Case, per_host: int) -> None:
    check(ranks, case, per_host, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_weights_of_any_dtype(ranks: Ranks, dtype: torch.dtype) -> None:
    check(ranks, FOUR[0], 2, dtype, dtype)


def exchange_by_kernels(rank: int, case: Case, per_host: int, dtype: torch.dtype, pair_weights: torch.dtype) -> Outcome:
    with lists_with_spare():
        return exchange(rank, case, per_host, dtype, pair_weights)


@pytest.mark.parametrize("case", [FOUR[0], FOUR[1], FOUR[2]], ids=str)
def test_the_contract_with_lists_by_kernels(ranks: Ranks, case: Case) -> None:
    """Interpreted where there is no GPU."""
    check(ranks, case, 2, torch.float32, by=exchange_by_kernels)


def with_spare_entries(rank: int, case: Case) -> None:
    """A routing with a capacity has entries behind its pairs: they change nothing, and get zeros back."""
    transport, routing, plan = TwoHopTransport(EPGroup(), 2), case.routing(rank), case.plan().of_rank(rank)
    exact, spare = (transport.prepare(each, plan) for each in (routing, with_spare(routing, 5)))
    for one, other in zip(exact.handle.lists(), spare.handle.lists(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(exact.weights_P, spare.weights_P)
    returned = transport.combine_scalars(spare.weights_P[:, None], spare.handle).result()
    assert returned.tolist() == [*routing.weights_N.tolist(), *[0] * 5]


@pytest.mark.parametrize("case", [FOUR[0], FOUR[2], FOUR[4]], ids=str)
def test_entries_behind_the_pairs_count_for_nothing(ranks: Ranks, case: Case) -> None:
    ranks(4).run(with_spare_entries, case)


@settings(max_examples=30)
@given(st.data())
def test_any_routing(ranks: Ranks, data: st.DataObject) -> None:
    case = data.draw(
        st.builds(
            Case,
            tokens=st.tuples(*[st.one_of(st.just(0), st.integers(0, 24)) for _ in range(4)]),
            H=st.integers(1, 6),
            E=st.sampled_from([4, 8, 12]),
            picks=st.sampled_from(["any", "any", "all", "last", "none"]),
            multiple=st.integers(1, 9),
            tile=st.integers(1, 9),
            seed=st.integers(0, 99),
        )
    )
    check(ranks, case, data.draw(st.sampled_from([1, 2, 4])), torch.float64)


# --- results -------------------------------------------------------------------------------------------------------


class SumsByHost:
    """An all-to-all. In combine it adds the ranks of a host first, rounds, and then adds the hosts."""

    def __init__(self, group: EPGroup, per_host: int) -> None:
        self.group, self.per_host, self.plain = group, per_host, AllToAllTransport(group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def combine(
        self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle, *, overlap: bool = False
    ) -> Pending:
        splits = handle.splits
        sums_RH = gather_sum(values_PH, handle.pairs_by_row_V, handle.pair_starts_R, weights_P)
        back_UH = self.group.all_to_all(sums_RH, splits.rows_in, splits.rows_out)
        dst_U = torch.repeat_interleave(torch.arange(self.group.size), torch.tensor(splits.rows_out))
        token_of_sent_U = handle.transport_lists[0].long()
        cells = token_of_sent_U * self.group.size + torch.div(dst_U, self.per_host, rounding_mode="floor")
        order = cells.argsort(stable=True)
        found, counts = cells.unique(return_counts=True)
        host_sums = gather_sum(back_UH, order.int(), _starts(counts))
        per_token = torch.bincount(found // self.group.size, minlength=handle.num_tokens)
        return Pending.done(gather_sum(host_sums, torch.arange(len(found)).int(), _starts(per_token)))


def _starts(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def step(
    transport: Transport, group: EPGroup, routing: Routing, leaves: dict[str, Tensor], dout: Tensor, **how: Any
) -> dict[str, Tensor]:
    """Output and every gradient."""
    own = {name: values.clone().requires_grad_() for name, values in leaves.items()}
    x, weights_N, w1, w2, b1, b2 = own.values()
    y = moe(x, replace(routing, weights_N=weights_N), w1, w2, b1, b2, transport=transport, group=group, **how)
    grads = torch.autograd.grad(y, [*own.values()], dout)
    return {"y": y.detach(), **{f"d{name}": grad for name, grad in zip(own, grads, strict=True)}}


def leaves_of(
    rank: int, T: int, H: int, e: int, weights_N: Tensor, dtype: torch.dtype, *, exact: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """x, weights and dout: normal values, or integers so small that every sum and product is exact in float64."""
    generator = torch.Generator().manual_seed(7 + rank)

    def values(*size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator, dtype=torch.float64)
        return (drawn.round() if exact else drawn).to(dtype)

    I = 3  # noqa: E741
    experts = {"w1": values(e, I, H), "w2": values(e, H, I), "b1": values(e, I), "b2": values(e, H)}
    weights_N = values(weights_N.shape[0]) if exact else weights_N
    return {"x": values(T, H), "weights": weights_N, **experts}, values(T, H)


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [name for name, values in left.items() if not torch.equal(values, right[name])]


def against_sums_by_host(rank: int, case: Case, per_host: int, dtype: torch.dtype, saves: bool) -> list[str]:
    group, routing = EPGroup(), case.routing(rank, dtype)
    leaves, dout = leaves_of(
        rank, case.tokens[rank], case.H, case.E // case.size, routing.weights_N, dtype, exact=False
    )
    transports: list[Any] = [TwoHopTransport(group, per_host), SumsByHost(group, per_host)]
    return differing(
        *(step(t, group, routing, leaves, dout, activation="silu", save_dispatched=saves) for t in transports)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_the_bits_of_an_all_to_all_that_adds_by_host(ranks: Ranks, case: Case, dtype: torch.dtype) -> None:
    for per_host in (1, 2, 4):
        assert ranks(4).run(against_sums_by_host, case, per_host, dtype, per_host == 2) == [[]] * 4


@pytest.mark.parametrize("per_host", [2, 4])
def test_the_bits_of_an_all_to_all_that_adds_by_host_on_eight_ranks(ranks: Ranks, per_host: int) -> None:
    for case in EIGHT:
        assert ranks(8).run(against_sums_by_host, case, per_host, torch.float32, False) == [[]] * 8


def against_all_to_all(
    rank: int, mode: RoundingMode, per_host: int, tokens: tuple[int, ...], exact: bool, K: int
) -> list[str]:
    """Which results differ from the all-to-all's for one routing of a layer's router in training."""
    group, E, H = EPGroup(), 2 * len(tokens), 6
    rounding = RoundingConfig(mode=mode, t=4, G=16) if mode != "off" else RoundingConfig(mode="off")
    layer = MoE(MoEConfig(d=H, n=4, E=E, K=K, rounding=rounding), group, seed=0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens[rank], H, generator=generator, dtype=torch.float64)
    routing = layer.router(x, group=group, sequence_length=max(len(x), 1), exchange=layer.transport).routing
    leaves, dout = leaves_of(rank, len(x), H, E // group.size, routing.weights_N.detach(), torch.float64, exact=exact)
    transports: list[Any] = [TwoHopTransport(group, per_host), AllToAllTransport(group)]
    results = [step(t, group, routing, leaves, dout, activation="relu2") for t in transports]
    assert not len(x) or results[0]["y"].any()
    return differing(*results)


@pytest.mark.parametrize("mode", get_args(RoundingMode))
@pytest.mark.parametrize("tokens", [(37, 20, 51, 46), (0, 33, 8, 21)], ids=str)
def test_the_bits_of_all_to_all_where_sums_are_exact(ranks: Ranks, mode: RoundingMode, tokens: tuple[int, ...]) -> None:
    assert ranks(4).run(against_all_to_all, mode, 2, tokens, True, 3) == [[]] * 4


@pytest.mark.parametrize("per_host", [2, 4])
def test_the_bits_of_all_to_all_on_eight_ranks(ranks: Ranks, per_host: int) -> None:
    tokens = (37, 0, 20, 5, 51, 46, 9, 30)
    for mode in ("apportion", "pad", "off"):
        assert ranks(8).run(against_all_to_all, mode, per_host, tokens, True, 3) == [[]] * 8


@pytest.mark.parametrize("mode", ["off", "pad", "down"])
def test_the_bits_of_all_to_all_for_any_values_if_no_token_has_three_destinations(
    ranks: Ranks, mode: RoundingMode
) -> None:
    assert ranks(4).run(against_all_to_all, mode, 2, (37, 0, 51, 46), False, 2) == [[]] * 4


def test_the_values_can_tell_one_order_of_additions_from_another(ranks: Ranks) -> None:
    """Without this the tests of exact sums might compare nothing."""
    results = ranks(4).run(against_all_to_all, "off", 2, (37, 20, 51, 46), False, 4)
    assert all({"y", "dx"} <= set(names) for names in results)


# --- bytes ---------------------------------------------------------------------------------------------------------


def bytes_of_one_call(rank: int, case: Case, per_host: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """(all, across hosts) for lists, dispatch, combine and combine_scalars, each called once."""
    transport = TwoHopTransport(EPGroup(), per_host)
    prepared = transport.prepare(case.routing(rank), case.plan().of_rank(rank))
    rows = transport.dispatch(case.integers(rank, case.tokens[rank], dtype, 3), prepared.handle).result()
    oracle.combine_rows(transport, rows, prepared.handle)
    transport.combine_scalars(prepared.weights_P[:, None], prepared.handle).result()
    kinds = ("lists", "dispatch", "combine", "combine_scalars")
    return [(transport.wire_bytes[kind], transport.bytes_across_hosts[kind]) for kind in kinds]


def wanted_bytes(case: Case, rank: int, per_host: int, item: int) -> list[tuple[int, int]]:
    host, ranks, hosts = rank // per_host, range(case.size), range(case.size // per_host)

    def tokens(source: int, dst_host: int) -> set[int]:
        return {t for k, t in case.pairs(source) if case.dst(k) // per_host == dst_host}

    def pairs(source: int, dst: int) -> int:
        return sum(case.dst(k) == dst for k, _ in case.pairs(source))

    peers = [a * per_host + rank % per_host for a in hosts]
    row = case.H * item
    crossing = sum(len(tokens(rank, a)) for a in hosts if a != host) * row
    back = sum(len(tokens(s, host)) for s in peers if s != rank) * row
    others_here = [q for q in ranks if q // per_host == host and q != rank]
    forwarded = sum(len(case.tokens_needed(s, q)) for s in peers for q in others_here) * row
    returned = sum(len(case.tokens_needed(s, rank)) for s in ranks if s % per_host != rank % per_host) * row
    away, remote = (
        [sum(count(q) for q in ranks if elsewhere(q)) for count in (lambda q: pairs(rank, q), lambda q: pairs(q, rank))]
        for elsewhere in (lambda q: q != rank, lambda q: q // per_host != host)
    )
    flags = (len(hosts) - 1) * per_host * case.tokens[rank]
    return [
        (8 * away[0] + flags, 8 * remote[0] + flags),
        (crossing + forwarded, crossing),
        (back + returned, back),
        (4 * away[1], 4 * remote[1]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "per_host"), [(4, 1), (4, 2), (4, 4), (8, 2), (8, 4)])
def test_bytes_within_and_across_hosts(ranks: Ranks, size: int, per_host: int, dtype: torch.dtype) -> None:
    """What crosses in a dispatch is the distinct (token, remote host) rows, to the byte."""
    for case in (EIGHT if size == 8 else FOUR)[:2]:
        for rank, found in enumerate(ranks(size).run(bytes_of_one_call, case, per_host, dtype)):
            assert found == wanted_bytes(case, rank, per_host, dtype.itemsize), rank


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8)), unique=True), st.integers(9, 12))
def test_marked_cells_are_numbered_as_those_of_pairs(pairs: list[tuple[int, int]], T: int) -> None:
    """Kernels make their lists from either."""
    pairs = sorted(pairs)
    starts_Q = torch.tensor([sum(dst < q for dst, _ in pairs) for q in range(5)], dtype=torch.int32)
    sent = sent_rows(torch.tensor([token for _, token in pairs], dtype=torch.int32), starts_Q, T)
    marked = two_hop._marked(sent.sent_before.diff().view(4, T).to(torch.uint8))
    for name in ("sent_before", "copies_T", "row_starts_Q"):
        wanted, got = getattr(sent, name), getattr(marked, name)
        assert (got.dtype, got.tolist()) == (wanted.dtype, wanted.tolist())


# --- host ----------------------------------------------------------------------------------------------------------


class HostCalls(TorchDispatchMode):
    """Meanwhile notes in `seen` what the host does: "torch" for its operations that make a tensor, the kernels, "rows"
    for exchanges, "wait" for reads of what the device computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self._inside = list[str](), False

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside and not func.is_view and func is not torch.ops.aten.detach.default:
            self.seen.append("torch")
        return func(*args, **(kwargs or {}))

    def noting(self, dst: Any, name: str, note: str) -> AbstractContextManager[object]:
        call = getattr(dst, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            self.seen.append(note)
            self._inside = True
            try:
                return call(*arguments, **options)
            finally:
                self._inside = False

        return patch.object(dst, name, noted)


def host_calls(rank: int, case: Case, per_host: int) -> list[Counter[str]]:
    """What the host of a rank does in `prepare`, in a dispatch and in a combine."""
    transport, seen = TwoHopTransport(EPGroup(), per_host), list[Counter[str]]()
    routing, plan = case.routing(rank), case.plan().of_rank(rank)
    routing = replace(routing, split_sizes=split_sizes_async(routing))
    x_TH = case.integers(rank, case.tokens[rank], torch.float32, 3)
    with ExitStack() as stack, HostCalls() as calls:
        for name in ("gather_rows", "gather_sum", "pair_lists", "row_starts", "sent_rows", "token_lists"):
            stack.enter_context(calls.noting(two_hop, name, "kernels"))
        for name, note in (("all_to_all", "rows"), ("all_gather", "rows"), ("wait_until", "wait")):
            stack.enter_context(calls.noting(EPGroup, name, note))

        def noted(call: Callable[[], Any]) -> Any:
            calls.seen.clear()
            result = call()
            seen.append(Counter(calls.seen))
            return result

        handle = noted(lambda: transport.prepare(routing, plan)).handle
        rows_RH = noted(lambda: transport.dispatch(x_TH, handle).result())
        values_PH = rows_RH.index_select(0, handle.row_of_pair_P)
        noted(lambda: transport.combine(values_PH, None, handle).result())
    return seen


def test_how_often_the_host_exchanges_waits_and_calls_torch(ranks: Ranks) -> None:
    """Views are not counted. One wait is for the counts, one for the rows; the device works during the second."""
    for prepare, dispatch, combine in ranks(4).run(host_calls, FOUR[0], 2):
        assert prepare == {"torch": 27, "kernels": 5, "rows": 1, "wait": 2}
        assert dispatch == {"kernels": 2, "rows": 2}
        assert combine == {"kernels": 3, "rows": 2}


# --- refusals ------------------------------------------------------------------------------------------------------


def while_a_graph_is_captured(rank: int, case: Case) -> str:
    transport = TwoHopTransport(EPGroup(), 1)
    with patch.object(row_exchange, "host_may_wait", lambda values: False), pytest.raises(RuntimeError) as caught:
        transport.prepare(case.routing(rank), case.plan().of_rank(rank))
    return str(caught.value)


def test_a_cuda_graph_is_refused(ranks: Ranks) -> None:
    for text in ranks(2).run(while_a_graph_is_captured, Case((3, 4), 2, 2)):
        assert text.startswith("the two-hop transport of ep_size=2 needs its sizes on the host")
