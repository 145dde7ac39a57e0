"""Token rounding's integer decision: what holds for every count matrix, and each mode against a formula of its own.

Legend: S ranks of the EP group, E experts.
"""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sonic_ep.config import RoundingConfig
from sonic_ep.kernels.route.rounding.reference import deal_units
from sonic_ep.routers.rounding import is_plain_topk, leaves_sizes_open, max_received, max_rows, round_counts
from tests.routers.rounding_cases import MODES, Case, assert_same, cases

PER_RANK_MODES = ("nearest", "up", "down", "stochastic")


def nearest_multiple(count: int, unit: int) -> int:
    """Half to even, exactly: what torch.round(count / unit) * unit means in SonicMoE's router."""
    return unit * round(Fraction(count, unit))


def ceil_multiple(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def rows_by_dst(rows_SE: Tensor) -> list[int]:
    ep_size, E = rows_SE.shape
    return rows_SE.sum(0).view(ep_size, E // ep_size).sum(1).tolist()


# What holds in every mode.


@settings(max_examples=150)
@given(
    case=cases(), mode=st.sampled_from(MODES), factor=st.sampled_from([None, 1.0, 1.3]), seed=st.integers(0, 2**31 - 2)
)
def test_chunks_are_multiples_of_t_and_hold_only_tokens_that_exist(
    case: Case, mode: str, factor: float | None, seed: int
) -> None:
    rounded = case.round_counts(mode, capacity_factor=factor, seed=seed)
    t = 1 if mode == "off" else case.t
    assert int(rounded.t) == t
    for rank, T in enumerate(case.tokens):
        for count, rows, pairs in zip(
            case.chosen[rank], rounded.rows_SE[rank].tolist(), rounded.pairs_SE[rank].tolist(), strict=True
        ):
            assert rows % t == 0
            assert 0 <= pairs <= min(rows, T)
            # Padding is for `pad`, and for a rank that has fewer tokens than its chunk has rows.
            assert pairs == (min(rows, count) if mode in ("pad", "off") else min(rows, T))


@given(
    case=cases(), mode=st.sampled_from(MODES), factor=st.sampled_from([None, 1.0, 1.3]), seed=st.integers(0, 2**31 - 2)
)
def test_the_decision_depends_on_the_values_alone(case: Case, mode: str, factor: float | None, seed: int) -> None:
    rounding = RoundingConfig(mode=mode, t=case.t, G=case.G, capacity_factor=factor)  # type: ignore[arg-type]
    chosen_SE, tokens_S = torch.tensor(case.chosen), torch.tensor(case.tokens)
    # As the all-gather leaves them: a slice of a wider tensor.
    gathered = torch.cat([tokens_S[:, None], chosen_SE], dim=1)
    before = gathered.clone()
    sliced = round_counts(gathered[:, 1:], gathered[:, 0], rounding, seed=seed)
    assert_same(round_counts(chosen_SE, tokens_S, rounding, seed=seed), sliced)
    assert torch.equal(gathered, before), "the counts were written to"


@given(case=cases(), mode=st.sampled_from(MODES), factor=st.sampled_from([None, 1.0, 1.3]))
def test_without_training_it_is_off(case: Case, mode: str, factor: float | None) -> None:
    rounded = case.round_counts(mode, capacity_factor=factor, training=False)
    assert rounded.rows_SE.tolist() == rounded.pairs_SE.tolist() == case.chosen
    assert rounded.cut_S.tolist() == [0] * len(case.tokens)
    assert int(rounded.t) == 1
    assert_same(rounded, case.round_counts("off"))


@pytest.mark.parametrize(
    ("mode", "factor", "training", "is_plain", "is_open"),
    [
        ("off", None, True, True, False),
        ("off", 1.0, True, False, True),
        ("pad", None, True, True, True),
        ("pad", 1.0, True, False, True),
        ("apportion", None, True, False, True),
        ("apportion", 1.0, False, True, False),
    ],
)
def test_which_settings_leave_the_pairs_of_plain_topk_and_which_the_number_of_rows_open(
    mode: Any, factor: float | None, training: bool, is_plain: bool, is_open: bool
) -> None:
    rounding = RoundingConfig(mode=mode, capacity_factor=factor)
    assert is_plain_topk(rounding, training=training) == is_plain
    assert leaves_sizes_open(rounding, training=training) == is_open


@st.composite
def aligned_cases(seed: st.DrawFn) -> Case:
    """Every count a multiple of t, every column sum one of G: rounding has nothing to do."""
    case = seed(cases())
    columns = []
    for column in case.columns():
        first, *rest = (count // case.t * case.t for count in column)
        columns.append([first + -(first + sum(rest)) % case.G, *rest])
    chosen = [list(row) for row in zip(*columns, strict=True)]
    return case._replace(chosen=chosen, tokens=[max(row) + T for row, T in zip(chosen, case.tokens, strict=True)])


@given(case=cases(), mode=st.sampled_from(MODES), factor=st.sampled_from([None, 1.0]), seed=st.integers(0, 99))
def test_no_rank_has_more_rows_than_most_rows_says(case: Case, mode: str, factor: float | None, seed: int) -> None:
    """Beside its pairs, whose number T K stands for."""
    rounding = RoundingConfig(mode=mode, t=case.t, G=case.G, capacity_factor=factor)  # type: ignore[arg-type]
    most = max_rows(rounding, 0, 1, len(case.chosen[0]), len(case.tokens), training=True)
    rounded = case.round_counts(mode, capacity_factor=factor, seed=seed)
    for chosen, rows in zip(case.chosen, rounded.rows_SE.sum(1).tolist(), strict=True):
        assert rows <= sum(chosen) + most if most is not None else rows == sum(chosen)


@given(
    counts=st.lists(st.lists(st.integers(0, 4000), min_size=4, max_size=4), min_size=1, max_size=2),
    divisor=st.sampled_from([1, 50]),
    mode=st.sampled_from(MODES),
)
def test_nor_where_t_is_chosen_automatically(counts: list[list[int]], divisor: int, mode: str) -> None:
    """Many pairs, or so few that some modes pad."""
    chosen_SE = torch.tensor(counts) // divisor
    rounding = RoundingConfig(mode=mode)  # type: ignore[arg-type]
    most = max_rows(rounding, 0, 1, 4, len(counts), training=True)
    rows_S = round_counts(chosen_SE, chosen_SE.amax(1), rounding).rows_SE.sum(1)
    assert most is None or (rows_S <= chosen_SE.sum(1) + most).all()


@given(case=cases(), mode=st.sampled_from(MODES), factor=st.sampled_from([1.0, 1.25, 3.0]), seed=st.integers(0, 99))
def test_no_owner_has_more_rows_than_most_received_says(case: Case, mode: str, factor: float, seed: int) -> None:
    """With as many experts a token as the counts have, if every rank had the tokens of the one with most."""
    S, E = len(case.chosen), len(case.chosen[0])
    rounding = RoundingConfig(mode=mode, t=case.t, G=case.G, capacity_factor=factor)  # type: ignore[arg-type]
    most = max_received(rounding, max(map(sum, case.chosen)), 1, training=True)
    assert most is not None
    rows_SE = case.round_counts(mode, capacity_factor=factor, seed=seed).rows_SE
    assert int(rows_SE.view(S, S, E // S).sum((0, 2)).max()) <= most


@given(case=aligned_cases(), mode=st.sampled_from(MODES), seed=st.integers(0, 2**31 - 2))
def test_aligned_counts_stay(case: Case, mode: str, seed: int) -> None:
    rounded = case.round_counts(mode, seed=seed)
    assert rounded.rows_SE.tolist() == rounded.pairs_SE.tolist() == case.chosen


# Apportionment.


@settings(max_examples=150)
@example(case=Case([[36, 0], [35, 0]], [50, 50], 48, 48))  # the unit that is not dealt has a priority of 35 > G / 2
@given(case=cases())
def test_apportion_rounds_an_experts_total_to_the_nearest_multiple_of_G(case: Case) -> None:
    totals = case.round_counts("apportion").rows_SE.sum(0).tolist()
    for column, total in zip(case.columns(), totals, strict=True):
        assert total % case.G == 0
        assert 2 * abs(total - sum(column)) <= case.G
        assert total == nearest_multiple(sum(column), case.G)


@given(case=cases())
def test_apportion_in_whole_tiles_gives_each_rank_the_floor_or_ceiling_of_its_own_count(case: Case) -> None:
    case = case._replace(t=case.G)
    for counts, rows in zip(case.chosen, case.round_counts("apportion").rows_SE.tolist(), strict=True):
        for count, n in zip(counts, rows, strict=True):
            assert n in (count // case.G * case.G, ceil_multiple(count, case.G))


@given(case=cases(max_ranks=1))
def test_apportion_on_one_rank_is_sonicmoes_nearest_rounding(case: Case) -> None:
    rounded = case.round_counts("apportion")
    (counts,), (T,) = case.chosen, case.tokens
    wanted = [nearest_multiple(count, case.G) for count in counts]
    assert rounded.rows_SE.tolist() == [wanted]
    # SonicMoE takes the best `wanted` tokens, which are all of them if there are fewer.
    assert rounded.pairs_SE.tolist() == [[min(rows, T) for rows in wanted]]


@pytest.mark.parametrize("t", [16, 32, 64])
def test_a_batch_smaller_than_a_tile_keeps_its_experts(t: int) -> None:
    # 100 tokens on an expert round to 128: take all there are. Rounding to what 100 tokens fill would leave it none.
    assert Case([[100, 80]], [100], t, 128).round_counts("apportion").pairs_SE.tolist() == [[100, 100]]
    assert Case([[40, 0], [40, 0]], [40, 40], t, 128).round_counts("apportion").pairs_SE.tolist() == [[40, 0], [40, 0]]


@st.composite
def small_cases(seed: st.DrawFn) -> Case:
    """Few units a column, so that every way to deal them can be listed, and tokens enough for any of them."""
    ep_size = seed(st.integers(1, 4))
    t = seed(st.integers(1, 6))
    row = st.lists(st.integers(0, 3 * t), min_size=ep_size, max_size=ep_size)
    chosen = seed(st.lists(row, min_size=ep_size, max_size=ep_size))
    return Case(chosen, [100] * ep_size, t, t * seed(st.integers(1, 3)))


def ways_to_deal(units: int, holders: int) -> Iterator[list[int]]:
    """Every way to give `units` to `holders`: the gaps between holders - 1 dividers in a line of units."""
    for dividers in combinations(range(units + holders - 1), holders - 1):
        edges = [-1, *dividers, units + holders - 1]
        yield [right - left - 1 for left, right in pairwise(edges)]


def changes(rows: Iterable[int], counts: Iterable[int]) -> int:
    return sum(abs(n - count) for n, count in zip(rows, counts, strict=True))


@given(case=small_cases())
def test_apportion_changes_as_few_assignments_as_its_column_totals_allow(case: Case) -> None:
    rows_SE = case.round_counts("apportion").rows_SE
    for counts, rows in zip(case.columns(), rows_SE.T.tolist(), strict=True):
        dealt = ways_to_deal(sum(rows) // case.t, len(rows))
        assert changes(rows, counts) == min(changes([n * case.t for n in each], counts) for each in dealt)


def test_apportion_gives_a_tied_unit_to_the_lowest_rank() -> None:
    rounded = Case([[4, 4, 0, 4], [4, 0, 4, 4], [0, 4, 4, 4], [0, 0, 0, 4]], [8] * 4, 8, 8).round_counts("apportion")
    assert rounded.rows_SE.tolist() == [[8, 8, 0, 8], [0, 0, 8, 8], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_apportion_with_fewer_tokens_than_a_chunk_completes_it_with_padding() -> None:
    rounded = Case([[5, 2], [5, 0]], [5, 5], 8, 8).round_counts("apportion")
    assert rounded.rows_SE.tolist() == [[8, 0], [0, 0]]
    assert rounded.pairs_SE.tolist() == [[5, 0], [0, 0]]


@st.composite
def deals(seed: st.DrawFn) -> tuple[list[int], int, list[int], int]:
    """Weights, step, caps and wanted units of one column."""
    holders = seed(st.integers(1, 5))
    # Small numbers tie; large ones reach the ends of what counts may be.
    most_step, most_weight = seed(st.sampled_from([(3, 6), (3, 6), (2**28, 2**29 - 1)]))
    step = seed(st.integers(1, most_step))
    weights = seed(st.lists(st.integers(0, most_weight), min_size=holders, max_size=holders))
    caps = seed(st.lists(st.integers(0, 4), min_size=holders, max_size=holders))
    return weights, step, caps, seed(st.integers(0, sum(caps)))


@settings(max_examples=200)
@example(deal=([6, 0, 0], 6, [1, 1, 1], 2))  # the first holder would tie with the others, but is at its cap
@given(deal=deals())
def test_deal_units_serves_the_highest_priorities_first(deal: tuple[list[int], int, list[int], int]) -> None:
    weights, step, caps, wanted = deal
    queue = sorted(
        (step * j - weight, holder) for holder, weight in enumerate(weights) for j in range(caps[holder])
    )  # by falling priority weight - step * j, ties by holder
    served = [holder for _, holder in queue[:wanted]]
    dealt = deal_units(torch.tensor(weights)[:, None], step, torch.tensor(caps)[:, None], torch.tensor([wanted]))
    assert dealt[:, 0].tolist() == [served.count(holder) for holder in range(len(weights))]
    # Weights that are counts: no other way within the caps changes less.
    feasible = (each for each in product(*(range(cap + 1) for cap in caps)) if sum(each) == wanted)
    cost = changes([n * step for n in dealt[:, 0].tolist()], weights)
    assert len(caps) > 3 or cost == min(changes([n * step for n in each], weights) for each in feasible)


# Each rank alone.


@given(case=cases())
def test_nearest_up_and_down_round_every_count_by_itself(case: Case) -> None:
    def each(rounded: Any) -> list[list[int]]:
        return [[rounded(count) for count in row] for row in case.chosen]

    assert case.round_counts("nearest").rows_SE.tolist() == each(lambda count: nearest_multiple(count, case.t))
    assert case.round_counts("up").rows_SE.tolist() == each(lambda count: ceil_multiple(count, case.t))
    assert case.round_counts("down").rows_SE.tolist() == each(lambda count: count // case.t * case.t)


@given(case=cases())
def test_pad_keeps_the_choice_and_completes_its_chunks(case: Case) -> None:
    rounded = case.round_counts("pad")
    assert rounded.rows_SE.tolist() == [[ceil_multiple(count, case.t) for count in row] for row in case.chosen]
    assert rounded.pairs_SE.tolist() == case.chosen


@given(case=cases())
def test_off_changes_nothing(case: Case) -> None:
    rounded = case.round_counts("off")
    assert rounded.rows_SE.tolist() == rounded.pairs_SE.tolist() == case.chosen


@given(case=cases(), seed=st.integers(0, 2**31 - 2))
def test_stochastic_gives_the_floor_or_ceiling_and_repeats_with_its_draw(case: Case, seed: int) -> None:
    rounded = case.round_counts("stochastic", seed=seed)
    for counts, rows in zip(case.chosen, rounded.rows_SE.tolist(), strict=True):
        for count, n in zip(counts, rows, strict=True):
            assert n in (count // case.t * case.t, ceil_multiple(count, case.t))
    assert_same(rounded, case.round_counts("stochastic", seed=seed))


@pytest.mark.parametrize(
    "draws", [range(600), range(10**9, 2**31 - 2, (2**31 - 2 - 10**9) // 600)], ids=["near", "far"]
)
def test_stochastic_rounds_up_as_often_as_the_remainder_says(draws: range) -> None:
    t = 16
    case = Case([[16 * rank + expert for expert in range(16)] for rank in range(8)], [1000] * 8, t, 16)
    ups = torch.stack([case.round_counts("stochastic", seed=seed).rows_SE for seed in draws]).double() / t
    ups -= torch.tensor(case.chosen).div(t, rounding_mode="floor")
    chance = torch.arange(16, dtype=torch.float64).expand(8, 16) / t
    spread = (chance * (1 - chance) / len(draws)).sqrt()
    assert ((ups.mean(0) - chance).abs() <= 5 * spread).all()
    # Independent cells: the number of ups in a draw spreads as a sum of independent coins does.
    expected = (chance * (1 - chance)).sum()
    assert 0.7 * expected < ups.sum((1, 2)).var() < 1.3 * expected
    # And one cell tells nothing about its neighbour, or about itself in the next draw.
    centred = ups - chance
    for other in (centred.roll(1, 2), centred.roll(1, 1), centred.roll(1, 0)):
        assert abs((centred * other).mean()) < 5 * 0.25 / ups.numel() ** 0.5


def test_stochastic_differs_between_draws() -> None:
    case = Case([[8] * 16 for _ in range(4)], [100] * 4, 16, 16)
    assert len({str(case.round_counts("stochastic", seed=seed).rows_SE.tolist()) for seed in range(50)}) == 50


# Capacity.


@settings(max_examples=150)
@given(case=cases(), mode=st.sampled_from(MODES), factor=st.sampled_from([1, 1.0, 1.05, 1.1, 1.25, 2.0, 3.7]))
def test_no_owner_receives_more_than_capacity_and_only_the_overfull_are_cut(
    case: Case, mode: str, factor: float
) -> None:
    free, held = case.round_counts(mode, seed=7), case.round_counts(mode, capacity_factor=factor, seed=7)
    unit = {"apportion": case.G, "off": 1}.get(mode, case.t)
    pairs_per_rank = Fraction(sum(map(sum, case.chosen)), len(case.tokens))
    limit = max(int(Fraction(str(factor)) * pairs_per_rank) // unit, 1) * unit
    before, after = rows_by_dst(free.rows_SE), rows_by_dst(held.rows_SE)
    assert after == [min(rows, limit) for rows in before]
    per_rank = len(case.chosen[0]) // len(case.tokens)
    for dst, rows in enumerate(before):
        mine = slice(dst * per_rank, (dst + 1) * per_rank)
        if rows <= limit:
            assert torch.equal(held.rows_SE[:, mine], free.rows_SE[:, mine])
        cut = free.pairs_SE[:, mine].sum() - held.pairs_SE[:, mine].sum()
        assert int(held.cut_S[dst]) == int(cut)
    assert (held.rows_SE <= free.rows_SE).all()
    assert (held.rows_SE.sum(0) % unit == 0).all()


@given(case=cases(), mode=st.sampled_from(MODES))
def test_capacity_takes_from_an_owners_largest_experts(case: Case, mode: str) -> None:
    free, held = case.round_counts(mode, seed=7), case.round_counts(mode, capacity_factor=1.0, seed=7)
    unit = {"apportion": case.G, "off": 1}.get(mode, case.t)
    per_rank = len(case.chosen[0]) // len(case.tokens)
    before, after = free.rows_SE.sum(0).tolist(), held.rows_SE.sum(0).tolist()
    for expert, (rows, saved) in enumerate(zip(before, after, strict=True)):
        first = expert // per_rank * per_rank
        if saved < rows:
            assert max(after[first : first + per_rank]) <= saved + unit


def test_capacity_of_a_batch_too_small_to_round_is_cut_in_chunks_of_padding() -> None:
    chosen_SE, tokens_S = torch.tensor([[60, 2], [50, 0]]), torch.tensor([60, 60])
    rounded = round_counts(chosen_SE, tokens_S, RoundingConfig(capacity_factor=1.5))
    # A mean of 56 pairs, of which 84 are allowed: five chunks of 16 of the eight that expert 0 would have.
    assert int(rounded.t) == 16
    assert rounded.rows_SE.sum(0).tolist() == [80, 16]
    assert (rounded.pairs_SE <= chosen_SE).all()
    assert rounded.cut_S.tolist() == [110 - int(rounded.pairs_SE[:, 0].sum()), 0]


@given(case=cases(), mode=st.sampled_from(MODES))
def test_capacity_that_nobody_reaches_changes_nothing(case: Case, mode: str) -> None:
    # ep_size times the mean is everything there is; the rest is what rounding up may add.
    factor = len(case.tokens) * (1.0 + len(case.chosen[0]) * case.G)
    if any(map(any, case.chosen)):
        assert_same(case.round_counts(mode, seed=7), case.round_counts(mode, capacity_factor=factor, seed=7))


# Made for a GPU: integers only, and nothing is read on the host.


class IntegersOnly(TorchDispatchMode):
    """Fails at the first operation that makes a floating-point tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype not in (torch.int64, torch.bool):
                raise AssertionError(f"{func} made a tensor of {tensor.dtype}")
        return result


@pytest.mark.parametrize("factor", [None, 1.25], ids=["free", "capacity"])
@pytest.mark.parametrize("t", ["auto", 16])
@pytest.mark.parametrize("mode", MODES)
def test_the_decision_is_integers_and_reads_nothing_on_the_host(mode: str, t: Any, factor: float | None) -> None:
    rounding = RoundingConfig(mode=mode, t=t, capacity_factor=factor)  # type: ignore[arg-type]
    chosen_SE = torch.randint(0, 500, (4, 8))
    with IntegersOnly():
        real = round_counts(chosen_SE, torch.full((4,), 600), rounding, seed=3)
    # A fake tensor has no values: reading one raises.
    with FakeTensorMode():
        fake = round_counts(torch.empty(4, 8, dtype=torch.int64), torch.empty(4, dtype=torch.int64), rounding, seed=3)
    for name in ("rows_SE", "pairs_SE", "cut_S", "t"):
        assert getattr(fake, name).shape == getattr(real, name).shape
        assert getattr(real, name).dtype == torch.int64
