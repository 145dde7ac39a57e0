"""The selection's kernels give bit for bit the lists of routers/select.py, into memory that held garbage.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sonic_ep.config import RoundingConfig
from sonic_ep.kernels.backend import _implementation, runs_triton
from sonic_ep.kernels.route.select.reference import pairs_of_mask, pairs_of_topk, select_tokens
from sonic_ep.kernels.route.topk.reference import topk_mask
from sonic_ep.routers.rounding import round_counts
from sonic_ep.routers.route import select
from sonic_ep.routers.topk import TopK
from sonic_ep.routing import GroupCounts
from tests.helpers.poison import compiler_forgets
from tests.helpers.triton_device import triton_device
from tests.helpers.waiting import assert_nothing_waits

DEVICE = triton_device()
INTERPRETED = DEVICE == "cpu"
KERNELS: Any = import_module("sonic_ep.kernels.route.select.triton")
NAN, INF = float("nan"), float("inf")
SMALLEST, LARGEST = 2.0**-149, (2 - 2.0**-23) * 2.0**127
# Zeros of both signs, denormals, the ends, infinities, NaN of both signs, ties.
AWKWARD = (0.0, -0.0, 0.5, -1.0, SMALLEST, -SMALLEST, 2.0**-127, LARGEST, -LARGEST, INF, -INF, NAN, -NAN)

Lists = tuple[Tensor, Tensor, Tensor]


def _with_garbage(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(allocate)
    def filled(*args: Any, **kwargs: Any) -> Tensor:
        result = allocate(*args, **kwargs)
        return result.random_() if result.numel() else result

    return filled


@pytest.fixture(scope="module", autouse=True)
def _garbage_and_short_steps() -> Iterator[None]:
    with compiler_forgets(), pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, _with_garbage(getattr(torch, name)))
        if INTERPRETED:
            # Small cases must take several steps too, and the interpreter is slow.
            for name, words in (("_COUNT_WORDS", 8), ("_STEP_WORDS", 4), ("_SLOTS", 16)):
                patch.setattr(KERNELS, name, words)
        yield


class Case(NamedTuple):
    """Operands of a selection, on DEVICE."""

    scores_TE: Tensor
    topk_ids_TK: Tensor
    allowed_TE: Tensor | None
    pairs_E: Tensor

    def expected(self) -> Lists:
        mask_TE = select_tokens(self.scores_TE, self.topk_ids_TK.long(), self.allowed_TE, self.pairs_E)
        token_ids_N, expert_ids_N = pairs_of_mask(mask_TE, int(self.pairs_E.sum()))
        chosen_TE = topk_mask(self.topk_ids_TK.long(), mask_TE.shape[1])
        return token_ids_N.int(), expert_ids_N, chosen_TE[token_ids_N, expert_ids_N]

    def by_kernel(self) -> Lists:
        operands = (self.scores_TE, self.topk_ids_TK, self.allowed_TE)
        return KERNELS.start_selection(*operands)(self.pairs_E, int(self.pairs_E.sum()))

    def counts_E(self) -> Tensor:
        return topk_mask(self.topk_ids_TK.long(), self.pairs_E.shape[0]).sum(0)


def random_topk(T: int, E: int, K: int) -> Tensor:
    return torch.rand(T, E, device=DEVICE).argsort(1)[:, :K].contiguous()


def assert_same(lists: Lists, expected: Lists) -> None:
    for name, got, wanted in zip(("token_ids", "expert_ids", "chosen"), lists, expected, strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted), name


@st.composite
def cases(draw: st.DrawFn) -> Case:
    T, E = draw(st.sampled_from([0, 1, 2, 31, 32, 33, 100, 128, 129, 300])), draw(st.integers(1, 3))
    K = draw(st.integers(1, E))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    values = {
        "spread": torch.randn(T, E),
        "tied": torch.randint(0, 3, (T, E)) / 4,
        "constant": torch.full((T, E), draw(st.sampled_from(AWKWARD))),
        "awkward": torch.tensor(AWKWARD)[torch.randint(0, len(AWKWARD), (T, E))],
    }
    # float64 scores are ordered by their float32 value: neighbours of a tied score tie with it.
    scores = values[draw(st.sampled_from([*values]))].to(draw(st.sampled_from([torch.float32, torch.float64])))
    scores = scores + torch.rand(T, E) * 1e-12 if scores.dtype == torch.float64 else scores
    index_dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    ids = random_topk(T, E, K).to(index_dtype)
    allowed = (torch.rand(T, E, device=DEVICE) < 0.4) if draw(st.booleans()) else None
    counts = topk_mask(ids.long(), E).sum(0).cpu()
    wanted = [draw(st.sampled_from([0, T, int(c), int(c) - 1, int(c) + 1, T // 2, T - 1])) for c in counts]
    pairs = torch.tensor(wanted, dtype=index_dtype).clamp(0, T)
    return Case(scores.to(DEVICE), ids, allowed, pairs.to(DEVICE))


@settings(max_examples=40 if INTERPRETED else 300)
@given(case=cases())
def test_selection_is_the_references(case: Case) -> None:
    assert_same(case.by_kernel(), case.expected())


@settings(max_examples=20 if INTERPRETED else 200)
@given(case=cases())
def test_lists_of_a_choice_are_the_references(case: Case) -> None:
    token_ids_N, expert_ids_N = pairs_of_topk(case.topk_ids_TK.long())
    expected = token_ids_N.int(), expert_ids_N, torch.ones_like(token_ids_N, dtype=torch.bool)
    assert_same(KERNELS.chosen_pairs(case.topk_ids_TK, case.counts_E()), expected)


@pytest.mark.parametrize("allowed", [False, True], ids=["all", "some-allowed"])
def test_more_experts_than_a_tile(allowed: bool) -> None:
    """33 experts: a second tile of one; each of its own number."""
    T, E, K = 40, 33, 5
    allowed_TE = (torch.rand(T, E, device=DEVICE) < 0.5) if allowed else None
    pairs_E = torch.arange(E, device=DEVICE) % (T + 1)
    case = Case(torch.randn(T, E, device=DEVICE), random_topk(T, E, K), allowed_TE, pairs_E)
    assert_same(case.by_kernel(), case.expected())
    assert_same(
        KERNELS.chosen_pairs(case.topk_ids_TK, case.counts_E()), case._replace(pairs_E=case.counts_E()).expected()
    )


@pytest.mark.parametrize("spare", [0, 1, 1023, 5000])
@pytest.mark.parametrize("T", [40, 0])
def test_what_is_spare_behind_the_pairs_names_no_token(T: int, spare: int, poison: None) -> None:
    pairs_E = torch.tensor([40, 0, 17], device=DEVICE).clamp(max=T)
    case = Case(torch.randn(T, 3, device=DEVICE), random_topk(T, 3, 2), None, pairs_E)
    N = int(pairs_E.sum())
    begun = KERNELS.start_selection(case.scores_TE, case.topk_ids_TK, None)
    token_ids_N, expert_ids_N, chosen_N = begun(pairs_E, N + spare)
    assert_same((token_ids_N[:N], expert_ids_N[:N], chosen_N[:N]), case.expected())
    assert token_ids_N[N:].tolist() == [-1] * spare
    assert expert_ids_N[N:].tolist() == [0] * spare


def test_operands_may_be_views() -> None:
    T, E = 70, 3
    scores_TE, ids_TK = torch.randn(E, T, device=DEVICE).T, random_topk(T, E, 2).T.contiguous().T
    allowed_TE = (torch.rand(E, T, device=DEVICE) < 0.5).T
    pairs_E = torch.tensor([[20, 0], [70, 0], [50, 0]], device=DEVICE)[:, 0]
    case = Case(scores_TE, ids_TK, allowed_TE, pairs_E)
    assert_same(case.by_kernel(), case.expected())


def routed_case(T: int, E: int, K: int, *, tied: bool = False, groups: bool = False) -> Case:
    """What a router gives: its scores' own top K, its counts to the nearest multiple of 128."""
    scores_TE = torch.randn(T, E, device=DEVICE).add(torch.randn(E, device=DEVICE) / 2).softmax(1)
    scores_TE = scores_TE.bfloat16().float() if tied else scores_TE
    allowed_TE = None
    ranking_TE = scores_TE
    if groups:
        allowed_TE = topk_mask(random_topk(T, 8, 4), 8).repeat_interleave(E // 8, dim=1)
        ranking_TE = torch.where(allowed_TE, scores_TE, -1.0)
    ids_TK = ranking_TE.topk(K, dim=1).indices
    pairs_E = ((topk_mask(ids_TK, E).sum(0) + 64) // 128 * 128).clamp(max=T)
    return Case(scores_TE, ids_TK, allowed_TE, pairs_E)


SHAPES = [
    (16384, 128, 8),
    (16384, 512, 10),
    (40001, 64, 6),
    (3000, 4096, 16),
    (131077, 8, 2),
    (1000, 1, 1),
    (256, 8, 8),
]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="hours in Triton's interpreter")
@pytest.mark.parametrize("kind", ["spread", "tied", "groups"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_sizes(shape: tuple[int, int, int], kind: str) -> None:
    T, E, K = shape
    if kind == "groups" and (E < 64 or K > E // 2):
        pytest.skip("too few experts for groups")
    case = routed_case(T, E, K, tied=kind == "tied", groups=kind == "groups")
    first = case.by_kernel()
    assert_same(first, case.expected())
    for _ in range(3):
        assert_same(case.by_kernel(), first)
    topk_lists = KERNELS.chosen_pairs(case.topk_ids_TK, case.counts_E())
    token_ids_N, expert_ids_N = pairs_of_topk(case.topk_ids_TK)
    assert_same(topk_lists, (token_ids_N.int(), expert_ids_N, torch.ones_like(topk_lists[2])))


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("pairs", ["none", "all", "one", "chosen", "below", "above"])
@pytest.mark.parametrize("value", [0.25, NAN, -INF], ids=str)
def test_constant_scores_at_layer_size(value: float, pairs: str) -> None:
    T, E, K = 20000, 128, 8
    case = routed_case(T, E, K)
    counts_E = case.counts_E()
    wanted = {
        "none": torch.zeros_like(counts_E),
        "all": torch.full_like(counts_E, T),
        "one": torch.ones_like(counts_E),
        "chosen": counts_E,
        "below": counts_E // 2,
        "above": (counts_E * 2).clamp(max=T),
    }
    case = case._replace(scores_TE=torch.full_like(case.scores_TE, value), pairs_E=wanted[pairs])
    assert_same(case.by_kernel(), case.expected())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("tile_aligned", [False, True], ids=["plain", "rounded"])
def test_the_router_selects_by_kernel_and_reads_nothing_back(tile_aligned: bool) -> None:
    assert (
        _implementation("route.select", "chosen_pairs", runs_triton(torch.empty(0, device="cuda")))
        is KERNELS.chosen_pairs
    )
    case = routed_case(3000, 64, 6)
    topk = TopK(case.scores_TE, case.scores_TE, None, case.topk_ids_TK)
    chosen_SE, tokens_S = case.counts_E()[None], torch.tensor([3000], device="cuda")
    rounding = RoundingConfig(mode="nearest" if tile_aligned else "off")
    rounded = round_counts(chosen_SE, tokens_S, rounding)
    counts = GroupCounts(chosen_SE, rounded.rows_SE, rounded.pairs_SE, tokens_S, rounded.cut_S, rounded.t)
    assert_nothing_waits(lambda: select(topk, counts, 0, rounding, training=True))
    routed_pairs = select(topk, counts, 0, rounding, training=True)
    expected = case._replace(pairs_E=rounded.pairs_SE[0]).expected()
    N = expected[0].shape[0]
    assert_same((routed_pairs.token_ids_N[:N], routed_pairs.expert_ids_N[:N], routed_pairs.chosen_N[:N]), expected)
    assert (routed_pairs.token_ids_N[N:] == -1).all()
    assert (N < routed_pairs.token_ids_N.shape[0]) == tile_aligned
