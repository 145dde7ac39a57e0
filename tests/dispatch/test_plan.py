"""The plan against loops: chunks tile each pair buffer, heads are full tiles, chunks arrive where they should."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sonic_ep.dispatch.plan import split_sizes_async
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.dispatch.plan.reference import Plan
from sonic_ep.kernels.dispatch.split_sizes.reference import pack_split_sizes
from sonic_ep.kernels.experts.tile_table import TILE_ROWS
from sonic_ep.routing import AsyncSplitSizes, GroupCounts, Routing, SplitSizes
from tests.dispatch.oracle import pair_buffer
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]


@dataclass(frozen=True)
class Load:
    """Rows and real pairs of each (source, expert), and the tile."""

    rows: list[list[int]]
    pairs: list[list[int]]
    tile: int

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def E(self) -> int:
        return len(self.rows[0])

    def plan(self) -> Plan:
        return Plan.from_counts(torch.tensor(self.rows), torch.tensor(self.pairs), self.tile)

    def own(self, dst: int) -> range:
        e = self.E // self.size
        return range(dst * e, dst * e + e)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Empty, sparse, dense and padded chunks, smaller and larger than a tile. No chunk without a pair is padded."""
    size, e, tile = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    count = st.one_of(st.just(0), st.integers(0, 4 * tile), st.integers(0, 3).map(lambda tiles: tiles * tile))
    row = st.lists(count, min_size=size * e, max_size=size * e)
    pairs = draw(st.lists(row, min_size=size, max_size=size))
    padding = draw(st.one_of(st.just(1), st.integers(1, 2 * tile)))
    rows = [[-(-n // padding) * padding for n in counts] for counts in pairs]
    return Load(rows, pairs, tile)


EXAMPLES = [
    Load([[0]], [[0]], 4),
    Load([[9, 4]], [[9, 4]], 4),
    Load([[0, 0], [0, 0]], [[0, 0], [0, 0]], 4),
    Load([[0, 13], [0, 8]], [[0, 13], [0, 5]], 4),
    Load([[8, 8], [8, 8]], [[1, 8], [7, 2]], 8),
]


def with_examples(test: Callable[[Load], None]) -> Callable[[Load], None]:
    for load in EXAMPLES:
        test = example(load)(test)
    return test


@with_examples
@given(loads())
def test_chunks_tile_every_pair_buffer(load: Load) -> None:
    """Expert by expert, the heads and tails of all sources cover its rows without overlap or hole."""
    plan = load.plan()
    for dst in range(load.size):
        starts = plan.expert_starts_Qe[dst].tolist()
        assert starts[0] == 0
        assert starts[-1] == sum(load.rows[s][expert] for s in range(load.size) for expert in load.own(dst))
        for start, end, expert in zip(starts[:-1], starts[1:], load.own(dst), strict=True):
            covered = sorted(row for s in range(load.size) for row in [*head(plan, s, expert), *tail(plan, s, expert)])
            assert covered == list(range(start, end))


def head(plan: Plan, source: int, expert: int) -> range:
    start = int(plan.head_starts_SE[source, expert])
    return range(start, start + int(plan.head_rows_SE[source, expert]))


def tail(plan: Plan, source: int, expert: int) -> range:
    start = int(plan.tail_starts_SE[source, expert])
    return range(start, start + int(plan.rows_SE[source, expert] - plan.head_rows_SE[source, expert]))


@with_examples
@given(loads())
def test_heads_are_full_tiles_before_one_partial_piece_of_each_source(load: Load) -> None:
    plan = load.plan()
    for dst in range(load.size):
        for start, expert in zip(plan.expert_starts_Qe[dst].tolist(), load.own(dst), strict=False):
            heads = [head(plan, s, expert) for s in range(load.size)]
            tails = [tail(plan, s, expert) for s in range(load.size)]
            assert all(len(rows) % load.tile == 0 for rows in heads)
            assert all(len(rows) < load.tile for rows in tails)
            # So that each of these tiles holds rows of one source.
            assert all((rows.start - start) % load.tile == 0 for rows in heads if rows)
            in_order = [row for rows in [*heads, *tails] for row in rows]
            assert in_order == sorted(in_order)


def host_sizes_of(load: Load) -> SplitSizes:
    """With the sizes sent ahead, and without: the same."""
    rows_SE, pairs_SE = torch.tensor(load.rows), torch.tensor(load.pairs)
    tokens_S = torch.arange(load.size) + 3
    counts = GroupCounts(pairs_SE, rows_SE, pairs_SE, tokens_S, torch.zeros_like(tokens_S), torch.ones(()))
    routing = Routing(torch.zeros(0), torch.zeros(0, dtype=torch.int32), counts, 3)
    status_SF = torch.arange(2 * load.size).view(load.size, 2)
    raised: list[list[int]] = []
    speculative = AsyncSplitSizes(pack_split_sizes(tokens_S, rows_SE, pairs_SE, status_SF), load.size, raised.append)
    sizes = split_sizes_async(routing).read()
    assert split_sizes_async(replace(routing, split_sizes=speculative)).read() == sizes
    assert raised == [list(range(2 * load.size))]
    assert sizes.tokens_S == tuple(range(3, 3 + load.size))
    return sizes


@with_examples
@given(loads())
def test_chunks_as_they_arrive(load: Load) -> None:
    """Against a loop over the pair buffer: by source, then expert, each row of a chunk in its slot."""
    plan, sizes = load.plan(), host_sizes_of(load)
    for dst in range(load.size):
        slot_of = {row: slot for slot, row in enumerate(pair_buffer(load.rows, dst, load.tile))}
        rank_plan = plan.of_rank(dst)
        chunks = rank_plan.chunks(sizes.num_rows(dst), sum(sizes.pairs_in(dst)))
        arriving = [(s, expert) for s in range(load.size) for expert in load.own(dst)]
        before = 0
        for (s, expert), fields_F in zip(arriving, chunks.table_FC.T.tolist(), strict=True):
            rows, pairs, head_rows, head_start, tail_start, first_pair = fields_F
            slots = [i + (head_start if i < head_rows else tail_start - head_rows) for i in range(rows)]
            assert slots == [slot_of[s, expert, i] for i in range(load.rows[s][expert])]
            assert (pairs, first_pair) == (load.pairs[s][expert], before)
            before += pairs
        assert (chunks.num_sources, chunks.num_experts) == (load.size, len(load.own(dst)))
        assert (chunks.num_rows, chunks.num_pairs) == (len(slot_of), before)
        assert chunks.expert_starts_e.tolist() == plan.expert_starts_Qe[dst].tolist()
        assert chunks.table_FC.dtype == chunks.expert_starts_e.dtype == torch.int32


@with_examples
@given(loads())
def test_pairs_between_ranks(load: Load) -> None:
    expected = [[sum(load.pairs[s][k] for k in load.own(q)) for q in range(load.size)] for s in range(load.size)]
    plan = load.plan()
    assert plan.pairs_SQ.tolist() == expected
    for source, pairs in enumerate(expected):
        rank_plan = plan.of_rank(source)
        starts = rank_plan.pair_starts_Q
        assert (starts.dtype, starts.tolist()) == (torch.int32, [sum(pairs[:q]) for q in range(load.size + 1)])
        assert rank_plan.pairs_SQ.view(load.size, load.size).tolist() == expected
    sizes = host_sizes_of(load)
    assert sizes.pairs_SQ == tuple(map(tuple, expected))
    for dst in range(load.size):
        assert sizes.pairs_in(dst) == tuple(row[dst] for row in expected)


def test_example_of_the_docstring() -> None:
    """2 ranks; the expert with n = [300, 130] is the first rank's, the second rank's has nothing."""
    rows = torch.tensor([[300, 0], [130, 0]])
    plan = Plan.from_counts(rows, rows)
    assert plan.head_rows_SE[:, 0].tolist() == [256, 128]
    assert plan.head_starts_SE[:, 0].tolist() == [0, 256]
    assert plan.tail_starts_SE[:, 0].tolist() == [384, 428]
    assert (plan.rows_SE - plan.head_rows_SE)[:, 0].tolist() == [44, 2]
    assert plan.expert_starts_Qe.tolist() == [[0, 430], [0, 0]]
    assert plan.pairs_SQ.tolist() == [[300, 0], [130, 0]]
    assert plan.of_rank(0).table_FC.T.tolist() == [[300, 300, 256, 0, 384, 0], [130, 130, 128, 256, 428, 300]]
    assert plan.of_rank(1).pairs_SQ.tolist() == [300, 0, 130, 0]


def test_example_with_padding_by_hand() -> None:
    """Tile 4: rank 1 sends 5 pairs padded to 8 for expert 1 and rank 0 sends 3 unpadded ones."""
    plan = Plan.from_counts(torch.tensor([[0, 3], [0, 8]]), torch.tensor([[0, 3], [0, 5]]), tile_rows=4)
    assert plan.of_rank(1).table_FC.T.tolist() == [[3, 3, 0, 0, 8, 0], [8, 5, 8, 0, 11, 3]]


def test_tile_is_that_of_the_kernels_by_default() -> None:
    rows = torch.tensor([[3 * TILE_ROWS - 1]])
    assert Plan.from_counts(rows, rows).head_rows_SE.item() == 2 * TILE_ROWS


def test_offsets_pass_32_bits() -> None:
    rows = torch.tensor([[2**32 + 5, 7], [2**33, 0]])
    plan = Plan.from_counts(rows, rows, tile_rows=128)
    assert plan.expert_starts_Qe[0].tolist() == [0, 3 * 2**32 + 5]
    assert plan.tail_starts_SE[0, 0].item() == 3 * 2**32
    assert {getattr(plan, f.name).dtype for f in fields(plan)} == {torch.int64}


def plan_from_own_counts(rank: int, load: Load) -> dict[str, torch.Tensor]:
    """Worker: knows its own counts, gathers the rest."""
    group = EPGroup()
    rows_SE, pairs_SE = (group.all_gather(torch.tensor(counts[rank])) for counts in (load.rows, load.pairs))
    plan = Plan.from_counts(rows_SE, pairs_SE, load.tile)
    return {f.name: getattr(plan, f.name) for f in fields(plan)}


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_has_the_same_plan(ranks: Ranks, size: int) -> None:
    pairs = torch.randint(20, (size, 3 * size)) * torch.randint(2, (size, 3 * size))
    load = Load((-(-pairs // 4) * 4).tolist(), pairs.tolist(), tile=8)
    expected = load.plan()
    for plan in ranks(size).run(plan_from_own_counts, load):
        for name, values in plan.items():
            assert torch.equal(values, getattr(expected, name)), name
