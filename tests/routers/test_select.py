"""Which pairs are selected: against loops over Python tuples that know the rule and nothing of keys and bits.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

import math
import struct
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sonic_ep.config import RouterConfig
from sonic_ep.kernels.route.select.reference import (
    chosen_pairs,
    pairs_of_mask,
    pairs_of_topk,
    select_tokens,
    start_selection,
)
from sonic_ep.kernels.route.topk.reference import ordered_bits, top_experts, topk_mask
from sonic_ep.routers.topk import compute_topk

NAN, INF = float("nan"), float("inf")
SMALLEST, LARGEST = 2.0**-149, (2 - 2.0**-23) * 2.0**127
# Ties and every awkward value of a float32: both zeros, denormals, the ends, infinities, NaN of both signs.
AWKWARD = (0.0, -0.0, 0.5, 0.5, -1.0, SMALLEST, -SMALLEST, 2.0**-127, LARGEST, -LARGEST, INF, -INF, NAN, -NAN)


def rank_of(score: float) -> tuple[int, float]:
    """Sorts like the rule says: NaN below everything, zeros equal."""
    return (0, 0.0) if math.isnan(score) else (1, score)


def chosen_first(scores: list[float], chosen: list[bool], allowed: list[bool], wanted: int) -> set[int]:
    """One expert's tokens: those that chose it, those that may, the rest; by score; by id."""

    def merit(token: int) -> tuple[int, tuple[int, float], int]:
        return 2 if chosen[token] else int(allowed[token]), rank_of(scores[token]), -token

    return set(sorted(range(len(scores)), key=merit, reverse=True)[:wanted])


def best_experts(scores: list[float], allowed: list[bool], K: int) -> list[int]:
    """One token's experts, best first: allowed ones before others, then by score, then the smaller id."""
    return sorted(range(len(scores)), key=lambda e: (allowed[e], rank_of(scores[e]), -e), reverse=True)[:K]


class Case(NamedTuple):
    """Scores, the experts each token may take (None: all) and the tokens wanted of each expert."""

    scores: list[list[float]]
    allowed: list[list[bool]] | None
    K: int
    pairs: list[int]

    def scores_TE(self) -> Tensor:
        return torch.tensor(self.scores, dtype=torch.float32).view(len(self.scores), len(self.pairs))

    def allowed_TE(self) -> Tensor | None:
        shape = len(self.scores), len(self.pairs)
        return None if self.allowed is None else torch.tensor(self.allowed, dtype=torch.bool).view(shape)

    def may(self) -> list[list[bool]]:
        return self.allowed if self.allowed is not None else [[True] * len(self.pairs) for _ in self.scores]

    def topk_ids(self) -> list[list[int]]:
        return [best_experts(row, may, self.K) for row, may in zip(self.scores, self.may(), strict=True)]

    def select(self) -> Tensor:
        topk_ids_TK = torch.tensor(self.topk_ids(), dtype=torch.int64).view(-1, self.K)
        return select_tokens(self.scores_TE(), topk_ids_TK, self.allowed_TE(), torch.tensor(self.pairs))


@st.composite
def cases(seed: st.DrawFn) -> Case:
    T, E = seed(st.integers(0, 12)), seed(st.integers(1, 6))
    K = seed(st.integers(1, E))
    any_float = st.floats(width=32, allow_nan=True)
    score = seed(st.sampled_from([st.sampled_from(AWKWARD), st.sampled_from([0.25, 0.5]), any_float]))
    scores = seed(st.lists(st.lists(score, min_size=E, max_size=E), min_size=T, max_size=T))
    allowed = seed(st.none() | st.lists(st.lists(st.booleans(), min_size=E, max_size=E), min_size=T, max_size=T))
    return Case(scores, allowed, K, seed(st.lists(st.integers(0, T), min_size=E, max_size=E)))


@settings(max_examples=200)
@given(case=cases())
def test_selection_is_the_loops(case: Case) -> None:
    selected_TE = case.select()
    topk_ids = case.topk_ids()
    for expert, wanted in enumerate(case.pairs):
        scores = [row[expert] for row in case.scores]
        chosen = [expert in ids for ids in topk_ids]
        allowed = [row[expert] for row in case.may()]
        expected = chosen_first(scores, chosen, allowed, wanted)
        assert set(selected_TE[:, expert].nonzero().flatten().tolist()) == expected


@given(case=cases())
def test_each_expert_gets_its_number_and_the_better_candidates(case: Case) -> None:
    selected_TE = case.select()
    assert selected_TE.sum(0).tolist() == case.pairs
    for expert in range(len(case.pairs)):
        chosen = [expert in ids for ids in case.topk_ids()]
        taken = selected_TE[:, expert].tolist()
        for among in (True, False):
            merits = [
                (taken[token], rank_of(row[expert]))
                for token, row in enumerate(case.scores)
                if chosen[token] is among and (among or case.allowed is None or case.may()[token][expert])
            ]
            saved, left = [merit for is_in, merit in merits if is_in], [merit for is_in, merit in merits if not is_in]
            assert not saved or not left or min(saved) >= max(left), "kept or added below dropped or unselected"
        # Nothing is added while a chosen pair is dropped.
        dropped = any(c and not s for c, s in zip(chosen, taken, strict=True))
        added = any(s and not c for c, s in zip(chosen, taken, strict=True))
        assert not (dropped and added)


@settings(max_examples=200)
@given(case=cases())
def test_top_experts_are_the_loops(case: Case) -> None:
    ids_TK = top_experts(case.scores_TE(), case.allowed_TE(), case.K)
    assert ids_TK.tolist() == case.topk_ids()


@pytest.mark.parametrize("values", [2, 100], ids=["tied", "spread"])
def test_top_experts_of_thousands_are_the_loops(values: int) -> None:
    scores_TE = torch.randint(0, values, (4, 4096)) / values
    scores_TE[0, :4000] = -1.0
    expected = [best_experts(row, [True] * 4096, 16) for row in scores_TE.tolist()]
    assert top_experts(scores_TE, None, 16).tolist() == expected


def test_the_docstrings_example() -> None:
    scores_TE = torch.tensor([[0.1], [0.9], [0.5], [0.7]])
    # Tokens 0 and 2 chose expert 0 of two; the others expert 1.
    scores_TE = torch.cat([scores_TE, torch.zeros(4, 1)], dim=1)
    selected_TE = select_tokens(scores_TE, torch.tensor([[0], [1], [0], [1]]), None, torch.tensor([3, 0]))
    assert selected_TE[:, 0].tolist() == [True, True, True, False]


def test_classes_outrank_scores() -> None:
    scores_TE = torch.tensor([[-INF, 0.0], [0.2, 0.0], [0.9, 0.0]])
    topk_ids_TK = torch.tensor([[0], [1], [1]])  # only token 0 chose expert 0
    allowed_TE = torch.tensor([[True, True], [True, True], [False, True]])
    taken = [
        select_tokens(scores_TE, topk_ids_TK, allowed_TE, torch.tensor([wanted, 0]))[:, 0].tolist() for wanted in (1, 2)
    ]
    assert taken == [[True, False, False], [True, True, False]]


@pytest.mark.parametrize(("T", "E", "K"), [(7, 4, 2), (5000, 3, 1), (3, 4096, 16)], ids=str)
def test_equal_scores_go_to_the_smaller_id(T: int, E: int, K: int) -> None:
    scores_TE = torch.full((T, E), 1 / E)
    ids_TK = top_experts(scores_TE, None, K)
    assert ids_TK.tolist() == [list(range(K))] * T
    wanted = T // 2
    selected_TE = select_tokens(scores_TE, ids_TK, None, torch.full((E,), wanted))
    assert torch.equal(selected_TE, (torch.arange(T) < wanted)[:, None].expand(T, E))


def test_scores_order_by_their_float32_value() -> None:
    # Apart in float64, the same in float32: the id decides. A step of float32 decides by itself.
    assert top_experts(torch.tensor([[0.3, 0.3 + 1e-12]], dtype=torch.float64), None, 1).tolist() == [[0]]
    above = torch.tensor(0.3).nextafter(torch.tensor(1.0)).item()
    assert top_experts(torch.tensor([[0.3, above]], dtype=torch.float64), None, 1).tolist() == [[1]]


@given(values=st.lists(st.floats(width=32) | st.sampled_from(AWKWARD), min_size=2, max_size=10))
def test_ordered_bits_order_like_the_values(values: list[float]) -> None:
    bits = ordered_bits(torch.tensor(values, dtype=torch.float32)).tolist()
    for a, value_a in zip(bits, values, strict=True):
        assert 0 <= a < 2**32
        for b, value_b in zip(bits, values, strict=True):
            assert (a < b) == (rank_of(value_a) < rank_of(value_b)), struct.pack("2f", value_a, value_b)


@given(case=cases())
def test_pairs_come_by_expert_then_token(case: Case) -> None:
    selected_TE = case.select()
    token_ids_N, expert_ids_N = pairs_of_mask(selected_TE, sum(case.pairs))
    expected = [(e, t) for e in range(len(case.pairs)) for t in range(len(case.scores)) if selected_TE[t, e]]
    assert list(zip(expert_ids_N.tolist(), token_ids_N.tolist(), strict=True)) == expected


@given(case=cases())
def test_a_pure_choice_has_the_same_pairs_by_both_ways(case: Case) -> None:
    topk_ids_TK = torch.tensor(case.topk_ids(), dtype=torch.int64).view(-1, case.K)
    expected = sorted((e, t) for t, ids in enumerate(case.topk_ids()) for e in ids)
    token_ids_N, expert_ids_N = pairs_of_topk(topk_ids_TK)
    assert list(zip(expert_ids_N.tolist(), token_ids_N.tolist(), strict=True)) == expected
    mask_TE = topk_mask(topk_ids_TK, len(case.pairs))
    for listed, masked in zip((token_ids_N, expert_ids_N), pairs_of_mask(mask_TE, len(expected)), strict=True):
        assert torch.equal(listed, masked)
    # And selecting each expert's plain count selects the choice.
    counts = [sum(e in ids for ids in case.topk_ids()) for e in range(len(case.pairs))]
    assert torch.equal(case._replace(pairs=counts).select(), mask_TE)


def test_lists_of_the_docstrings_example() -> None:
    lists = chosen_pairs(torch.tensor([[1, 0], [2, 1]]), torch.tensor([1, 2, 1]))
    assert [each.tolist() for each in lists] == [[0, 0, 1, 1], [0, 1, 1, 2], [True] * 4]
    assert [each.dtype for each in lists] == [torch.int32, torch.int64, torch.bool]


@given(case=cases())
def test_lists_say_which_pairs_were_chosen(case: Case) -> None:
    topk_ids_TK = torch.tensor(case.topk_ids(), dtype=torch.int64).view(-1, case.K)
    pairs_E = torch.tensor(case.pairs)
    lists = start_selection(case.scores_TE(), topk_ids_TK, case.allowed_TE())(pairs_E, sum(case.pairs))
    selected = case.select().T.nonzero().tolist()
    expected = [(token, expert, expert in case.topk_ids()[token]) for expert, token in selected]
    assert list(zip(*(each.tolist() for each in lists), strict=True)) == expected
    assert [each.dtype for each in lists] == [torch.int32, torch.int64, torch.bool]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_choosing_and_selecting_reads_nothing_on_the_host(score: str, groups: int) -> None:
    config = RouterConfig(score=score, num_groups=groups, groups_per_token=max(groups // 2, 1))  # type: ignore[arg-type]
    # A fake tensor has no values: reading one raises.
    with FakeTensorMode():
        topk = compute_topk(torch.empty(10, 8), torch.empty(8), 3, config)
        pairs_E = torch.empty(8, dtype=torch.int64)
        lists = start_selection(topk.ranking_TE, topk.topk_ids_TK, topk.allowed_TE)(pairs_E, 24)
        assert [each.shape for each in lists] == [(24,)] * 3
        counts_E = topk.counts_E()
        assert counts_E.shape == (8,)
        assert [each.shape for each in chosen_pairs(topk.topk_ids_TK, counts_E)] == [(30,)] * 3
