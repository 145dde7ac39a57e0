"""Ranks that write into each other's memory, against the all-to-all: the same bytes for the same plan.

Processes share files here and the kernels are interpreted; tests/dispatch/test_symmetric_gpu.py has GPUs.
"""

import random
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from sonic_ep.config import Dispatch, RoundingConfig
from sonic_ep.dispatch import symmetric
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.protocol import DispatchHandle, Transport
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.dispatch.symmetric_buffers import PeerBuffers
from sonic_ep.groups import EPGroup
from sonic_ep.groups.frames import FRAME_INTS
from sonic_ep.routers.count_exchange import RankStatus, gather_counts
from sonic_ep.routing import AsyncSplitSizes
from sonic_ep.symmetric_memory import PeerMemory
from tests.dispatch.oracle import Case, combine_rows
from tests.helpers.launch import RankPool
from tests.helpers.noting import noting
from tests.helpers.poison import poisoned_empty
from tests.helpers.shared_files import shared_files
from tests.helpers.static_buffers import lists_with_spare, with_spare
from tests.helpers.triton_device import triton_device

if triton_device() != "cpu":
    pytest.skip("interprets its kernels; see test_symmetric_gpu.py", allow_module_level=True)

peers, peer_rows, peer_pairs, acquire_release = (
    import_module(f"sonic_ep.kernels.dispatch.symmetric.{name}")
    for name in ("signals", "rows", "pairs", "acquire_release")
)
Ranks = Callable[[int], RankPool]
CASES = [
    Case((13, 9), 5, 4, multiple=8),
    Case((0, 11), 7, 4),
    Case((0, 0), 3, 4),
    Case((7, 8, 9), 3, 6),
    Case((5, 6), 4, 2, "none"),
    Case((13, 1, 0, 22), 5, 8, multiple=4),
    Case((7, 8, 9, 10), 3, 8, "all"),
    Case((7, 8, 9, 10), 4, 12, "last"),
]


def everything(transport: Transport, rank: int, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """What a rank sees of one exchange; received rows by source and token, without gaps."""
    x_TH = torch.randn(case.tokens[rank], case.H, generator=torch.Generator().manual_seed(rank)).to(dtype)
    prepared = transport.prepare(case.routing(rank), case.plan().of_rank(rank), x_TH)
    handle, P = prepared.handle, prepared.weights_P.shape[0]
    early = prepared.rows_RH
    early = None if early is None else early[used(handle)]
    values_PH = torch.randn(P, case.H, generator=torch.Generator().manual_seed(rank + 9)).to(dtype)
    rows = transport.dispatch(x_TH, handle).result().clone()
    later = transport.dispatch(x_TH, handle, overlap=True)
    plain = transport.combine(values_PH, None, handle).result()
    pending = transport.combine(values_PH, prepared.weights_P, handle, overlap=True)
    returned = transport.combine_scalars(prepared.weights_P[:, None], handle).result()
    for other in (early, later.result()[used(handle)]):
        assert other is None or torch.equal(other, rows[used(handle)])
    return {
        "rows": rows[used(handle)],
        "rows of pairs": rows[handle.row_of_pair_P.long()],
        "gates": prepared.weights_P,
        "slots": handle.slot_V,
        "starts": handle.expert_starts_e,
        "weighted": transport.combine(values_PH, prepared.weights_P, handle).result(),
        "plain": plain,
        "overlapped": pending.result(),
        "back": combine_rows(transport, rows, handle),
        "returned": returned,
    }


def counts_of(rank: int, step: int, F: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (F,), generator=torch.Generator().manual_seed(100 * step + rank))


def gathered(rank: int, folder: str, lengths: list[int], seed: int) -> None:
    """Ranks come early and late, and do something else between telling and listening."""
    rng = random.Random(f"{seed} {rank}")
    group = EPGroup()
    transport = SymmetricTransport(group, shared_files(group, folder), timeout=60)
    for step, F in enumerate(lengths):
        time.sleep(rng.choice([0, 0, 0.01]))
        done: list[float] = []

        def meanwhile(done: list[float] = done) -> None:
            done.append(rng.choice([0, 0, 0.01]))
            time.sleep(done[0])

        values_SF = transport.all_gather(counts_of(rank, step, F), meanwhile)
        assert len(done) == 1
        assert torch.equal(values_SF, torch.stack([counts_of(source, step, F) for source in range(group.size)]))


@pytest.mark.parametrize(("size", "seed"), [(2, 0), (4, 1), (4, 2)])
def test_all_gather_of_any_length_by_ranks_in_any_order(ranks: Ranks, size: int, seed: int, tmp_path: Path) -> None:
    ranks(size).run(gathered, str(tmp_path), [5, 5, 5, 1, 130, 130, 7, 5, 5, 513], seed)


def used(handle: DispatchHandle) -> Tensor:
    return handle.pair_starts_R.diff() > 0


def same_as_all_to_all(rank: int, cases: list[Case], folder: str, dispatch: Dispatch = "auto") -> None:
    group = EPGroup()
    transport = SymmetricTransport(group, shared_files(group, folder), timeout=60, dispatch=dispatch)
    for case in cases:
        expected = everything(AllToAllTransport(group), rank, case, torch.float32)
        assert_equal(everything(transport, rank, case, torch.float32), expected)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, values in expected.items():
        assert torch.equal(actual[name], values), f"{name}: {actual[name]} {values}"


@pytest.mark.parametrize("dispatch", ["push", "copy", "auto"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_as_all_to_all(ranks: Ranks, case: Case, dispatch: Dispatch, tmp_path: Path) -> None:
    ranks(case.size).run(same_as_all_to_all, [case, case], str(tmp_path), dispatch)


def changing_sizes(rank: int, cases: list[Case], folder: str) -> list[str]:
    """Steps of changing sizes; how each of them was opened."""
    group, how = EPGroup(), []
    transport = SymmetricTransport(group, shared_files(group, folder), timeout=60)
    for case in cases:
        expected = everything(AllToAllTransport(group), rank, case, torch.float32)
        how.append("")
        with (
            lists_with_spare(),
            poisoned_empty(),
            noting(how, "o", SymmetricTransport, "_launch"),
            noting(how, "r", AsyncSplitSizes, "read"),
        ):
            assert_equal(everything(transport, rank, case, torch.float32), expected)
        assert transport._row_buffer == 3 % 2  # every step begins with the same row buffer
    return how


CHANGING = [
    Case((13, 9), 5, 4, multiple=8),
    Case((13, 9), 5, 4, multiple=8, seed=1),
    Case((13, 14), 5, 4),  # another rank has a token more
    Case((14, 2), 5, 4),
    Case((14, 14), 5, 4, "all"),  # many more pairs
    Case((14, 14), 6, 4),  # rows of another width
    Case((14, 12), 6, 12, "last", multiple=4),  # other experts
    Case((0, 0), 5, 4),
    Case((0, 3), 5, 4),
]


def test_sizes_are_read_once_and_before_anything_is_sent(ranks: Ranks, tmp_path: Path) -> None:
    for how in ranks(2).run(changing_sizes, CHANGING, str(tmp_path)):
        assert how == ["ro"] * len(CHANGING)


@pytest.mark.parametrize("size", [2, 4])
def test_buffers_grow_and_are_shared_by_rows_of_any_width(ranks: Ranks, size: int, tmp_path: Path) -> None:
    """Tokens, experts and widths change from step to step, on each rank in its own way."""
    rng = random.Random(size)
    cases = [
        Case(tuple(rng.randint(0, 30) for _ in range(size)), rng.randint(1, 6), size * rng.randint(1, 3), seed=seed)
        for seed in range(5)
    ]
    ranks(size).run(same_as_all_to_all, cases, str(tmp_path))


def bytes_asked_for(rank: int, case: Case, folder: str) -> list[int]:
    group, asked = EPGroup(), []
    files = shared_files(group, folder)

    def allocate(num_bytes: int) -> PeerMemory:
        asked.append(num_bytes)
        return files(num_bytes)

    everything(SymmetricTransport(group, allocate, timeout=60), rank, case, torch.float32)
    return asked


def test_memory_is_what_the_module_says(ranks: Ranks, tmp_path: Path) -> None:
    """Flags, lists with a quarter of room, three buffers of rows; each part of them rounded up to 256 bytes."""
    case = Case((13, 9), 5, 4, "all")
    max_pairs = max(len(case.pairs(0)), 2 * sum(case.tokens))
    capacity, row_bytes = round(max_pairs * 5 / 4), 5 * 4

    def rounded(size: int) -> int:
        return -(-size // 256) * 256

    lists = [rounded(size * capacity) for size in (4, 8, 8)]
    expected = [256, *lists, *[rounded(2 * 13 * row_bytes)] * 3]
    assert ranks(2).run(bytes_asked_for, case, str(tmp_path)) == [expected] * 2


def tell(rank: int, group: EPGroup, transport: SymmetricTransport) -> None:
    report = RankStatus(counts_E=torch.full((6,), rank), num_tokens=9, dtype=torch.float32, training=True)
    _, split_sizes, _ = gather_counts(report, RoundingConfig(mode="off"), group, transport)
    assert split_sizes is not None
    split_sizes.check()


def tells_nothing(rank: int, folder: str) -> str:
    """The last rank leaves before the second agreement; what the others are told, instead of what it said before."""
    group = EPGroup()
    transport = SymmetricTransport(group, shared_files(group, folder), timeout=1)
    tell(rank, group, transport)
    try:
        if rank < group.size - 1:
            tell(rank, group, transport)
    except RuntimeError as error:
        return str(error)
    finally:
        group.all_gather_object(None)
    return ""


def test_an_agreement_without_a_rank_is_none(ranks: Ranks, tmp_path: Path) -> None:
    *raised, _ = ranks(3).run(tells_nothing, str(tmp_path))
    for message in raised:
        assert message.startswith("rank 2 of the EP group did not come to counts within 1 s")


def tells_nothing_of_peers(rank: int, folder: str) -> list[list[int]]:
    """What an all-gather gives without its last rank, where both of the places have been used."""
    group = EPGroup()
    transport = SymmetricTransport(group, shared_files(group, folder), timeout=1)
    values_SF = torch.empty(0, 1)
    for step in range(4):
        if step < 3 or rank < group.size - 1:
            values_SF = transport.all_gather(counts_of(rank, step, 3))
    group.all_gather_object(None)
    return values_SF.tolist()


def test_a_lost_rank_has_told_zeros(ranks: Ranks, tmp_path: Path) -> None:
    *raised, _ = ranks(3).run(tells_nothing_of_peers, str(tmp_path))
    for *_, last in raised:
        assert last == [0, 0, 0]


def grown_after_capture(rank: int, folder: str) -> list[int]:
    """How many buffers are given back as they grow: before a graph has captured them, then those that it has captured,
    and then those that have replaced these."""
    group, given, mappings = EPGroup(), [], []
    files = shared_files(group, folder)

    def allocate(num_bytes: int) -> PeerMemory:
        memory = files(num_bytes)
        mappings.append(weakref.ref(memory.addresses_S, lambda _: given.append(num_bytes)))
        return memory

    transport, counts = SymmetricTransport(group, allocate, timeout=60), []
    for factor in (1, 3, 9, 27):
        case = Case((5 * factor, 4 * factor), 3, 4, "all")
        everything(transport, rank, case, torch.float32)
        transport.all_gather(counts_of(rank, 0, FRAME_INTS * factor))
        if factor == 3:
            can_read, symmetric.host_may_wait = symmetric.host_may_wait, lambda _: False
            transport.all_gather(counts_of(rank, 0, FRAME_INTS * factor))
            symmetric.host_may_wait = can_read
        if factor > 1:
            counts.append(len(given))
            given.clear()
    return counts


def test_what_a_graph_has_captured_is_kept(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(grown_after_capture, str(tmp_path)) == [[7, 0, 7]] * 2


def test_the_regions_of_a_stride_stay() -> None:
    transport = SymmetricTransport(EPGroup.alone(), lambda _: pytest.fail("no memory is needed"), timeout=1)
    captured = transport.starts_of_regions(4, torch.device("cpu"))
    assert captured.tolist() == [0, 4]
    assert transport.starts_of_regions(7, torch.device("cpu")).tolist() == [0, 7]
    assert transport.starts_of_regions(4, torch.device("cpu")) is captured


def static_with_spare(rank: int, case: Case, folder: str, dispatch: Dispatch) -> None:
    """Static buffers: lists with room to spare, whose entries read row 0 with weight 0; no sizes are read."""
    group = EPGroup()
    expected = everything(AllToAllTransport(group), rank, case, torch.float32)
    transport = SymmetricTransport(group, shared_files(group, folder), timeout=60, static=True, dispatch=dispatch)
    routing, plan = case.routing(rank), case.plan().of_rank(rank)
    spare, most = 7, max(sum(rows) for rows in zip(*case.rows_SE(), strict=True)) * case.E + 9
    roomy = with_spare(routing, spare, max_received=most)
    with lists_with_spare():
        prepared = transport.prepare(roomy, plan)
    handle, P, V = prepared.handle, expected["gates"].shape[0], expected["slots"].shape[0]
    assert prepared.weights_P.shape[0] == most
    for values, size in ((prepared.weights_P, P), (handle.row_of_pair_P, P), (handle.slot_V, V)):
        assert not values[size:].any()
    assert torch.equal(prepared.weights_P[:P], expected["gates"])
    assert torch.equal(handle.slot_V[:V], expected["slots"])
    x_TH = torch.randn(case.tokens[rank], case.H, generator=torch.Generator().manual_seed(rank))
    rows = transport.dispatch(x_TH, handle).result()
    assert torch.equal(rows[handle.row_of_pair_P[:P].long()], expected["rows of pairs"])
    values_PH = torch.randn(P, case.H, generator=torch.Generator().manual_seed(rank + 9))
    values_PH = pad(values_PH, (0, 0, 0, most - P), value=float("nan"))
    assert torch.equal(transport.combine(values_PH, prepared.weights_P, handle).result(), expected["weighted"])
    with lists_with_spare():
        pending = transport.combine(values_PH, prepared.weights_P, handle, overlap=True)
    assert torch.equal(pending.result(), expected["weighted"])
    returned = transport.combine_scalars(prepared.weights_P[:, None], handle).result()
    assert torch.equal(returned[:-spare], expected["returned"])
    assert not returned[-spare:].any()
    problem = transport.problem_with(case.tokens[rank] + 1)
    assert problem is not None
    assert f"T={case.tokens[rank] + 1} tokens, but transport.buffers='static' keeps to" in problem


@pytest.mark.parametrize("dispatch", ["push", "copy"])
@pytest.mark.parametrize("case", [Case((9, 9), 5, 4, multiple=8), Case((5, 5, 5, 5), 3, 8)], ids=str)
def test_static_buffers(ranks: Ranks, case: Case, dispatch: Dispatch, tmp_path: Path) -> None:
    ranks(case.size).run(static_with_spare, case, str(tmp_path), dispatch)


def different_tokens(rank: int, folder: str) -> None:
    group, case = EPGroup(), Case((3, 4), 2, 2)
    transport = SymmetricTransport(group, shared_files(group, folder), timeout=60, static=True)
    routing = replace(case.routing(rank), max_received=99)
    with pytest.raises(ValueError, match=r"wants as many tokens on every rank, not \[3, 4\]; use 'exact'"):
        transport.prepare(routing, case.plan().of_rank(rank))


def test_static_buffers_want_as_many_tokens_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(different_tokens, str(tmp_path))


def in_any_order(rank: int, case: Case, folder: str, seed: int, dispatch: Dispatch) -> None:
    """Every rank dawdles before each kernel, between meeting and writing, and before it tells that it is done."""
    rng = random.Random(f"{seed} {rank}")
    group = EPGroup()
    expected = everything(AllToAllTransport(group), rank, case, torch.float32)
    transport = SymmetricTransport(group, shared_files(group, folder), timeout=60, dispatch=dispatch)
    for module in (peer_rows, peer_pairs, acquire_release):
        for name in ("wait_peers_ready", "signal_done_and_wait"):
            original = getattr(module, name)

            def late(*args: Any, original: Any = original) -> Any:
                time.sleep(rng.choice([0, 0, 0, 0.01]))
                return original(*args)

            setattr(module, name, late)
    try:
        for _ in range(3):
            assert_equal(everything(transport, rank, case, torch.float32), expected)
    finally:
        for module in (peer_rows, peer_pairs, acquire_release):
            for name in ("wait_peers_ready", "signal_done_and_wait"):
                setattr(module, name, getattr(peers, name))


@pytest.mark.parametrize(("seed", "dispatch"), [(0, "push"), (1, "auto"), (2, "auto"), (3, "copy")])
def test_late_ranks_in_any_order(ranks: Ranks, seed: int, dispatch: Dispatch, tmp_path: Path) -> None:
    ranks(4).run(in_any_order, Case((5, 1, 0, 7), 3, 4, seed=seed), str(tmp_path), seed, dispatch)


def stays_away(rank: int, case: Case, folder: str, stage: str) -> str:
    """The last rank leaves before `stage`; what the others are told."""
    group = EPGroup()
    transport, counts_F = SymmetricTransport(group, shared_files(group, folder), timeout=1), counts_of(rank, 0, 3)
    transport.all_gather(counts_F)
    everything(transport, rank, case, torch.float32)
    prepared = (
        None
        if stage == "lists" and rank == group.size - 1
        else transport.prepare(case.routing(rank), case.plan().of_rank(rank))
    )
    if rank == group.size - 1:
        group.all_gather_object(None)
        return ""
    start = time.monotonic()
    assert prepared is not None
    x_TH = torch.ones(case.tokens[rank], case.H)
    try:
        for _ in range(2):
            if stage == "counts":
                transport.all_gather(counts_F)
            rows = transport.dispatch(x_TH, prepared.handle).result()
            out_TH = combine_rows(transport, rows, prepared.handle)
            assert bool(out_TH.isnan().all())
    except RuntimeError as error:
        assert time.monotonic() - start < 20
        return str(error)
    finally:
        group.all_gather_object(None)
    return "no error"


@pytest.mark.parametrize("stage", ["lists", "dispatch", "counts"])
def test_a_rank_that_stays_away_is_named(ranks: Ranks, stage: str, tmp_path: Path) -> None:
    *raised, _ = ranks(3).run(stays_away, Case((5, 4, 3), 3, 3, "all"), str(tmp_path), stage)
    for message in raised:
        assert message.startswith(f"rank 2 of the EP group did not come to {stage} within 1 s")


def comes_late(rank: int, case: Case, folder: str) -> str:
    """The last rank is late, not dead. The others' hosts have launched the whole step before they are told."""
    group, is_late = EPGroup(), rank == case.size - 1
    transport = SymmetricTransport(group, shared_files(group, folder), timeout=6.0 if is_late else 3.0)
    everything(transport, rank, case, torch.float32)  # in time on a busy host, too
    group.all_gather_object(None)
    if is_late:
        time.sleep(5)
    x_TH = torch.ones(case.tokens[rank], case.H)
    with patch.object(SymmetricTransport, "raise_if_lost", lambda _: None):
        prepared = transport.prepare(case.routing(rank), case.plan().of_rank(rank))
        rows_RH = transport.dispatch(x_TH, prepared.handle).result()
        assert bool(combine_rows(transport, rows_RH, prepared.handle).isnan().all())
    with pytest.raises(RuntimeError) as raised:
        transport.raise_if_lost()
    group.all_gather_object(None)
    return str(raised.value)


def test_a_late_rank_is_told_too(ranks: Ranks, tmp_path: Path) -> None:
    """Instead of computing on what ranks have sent that had given it up."""
    *others, late = ranks(3).run(comes_late, Case((5, 4, 3), 3, 3, "all"), str(tmp_path))
    assert all(raised.startswith("rank 2 of the EP group did not come to lists within 3 s") for raised in others)
    assert late.startswith("rank 0 of the EP group did not come to lists within 6 s")


def test_ranks_meet_before_memory_is_replaced() -> None:
    meetings: list[None] = []
    group: Any = SimpleNamespace(size=2, all_gather_object=meetings.append)
    buffers = PeerBuffers(group, cast(Any, torch.empty))
    for needed, met in ((10, 0), (10, 0), (1000, 1)):
        buffers.lists(needed)
        assert len(meetings) == met
