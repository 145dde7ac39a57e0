"""Token-choice top-K and its weights: against a router written with loops and math.exp, in double precision.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sonic_ep.config import RouterConfig
from sonic_ep.kernels.route.select.reference import pairs_of_mask, pairs_of_topk, select_tokens
from sonic_ep.kernels.route.topk.reference import scores_of
from sonic_ep.kernels.route.weights_and_losses.reference import weights_of_pairs
from sonic_ep.routers.topk import TopK, _Scores, compute_topk


class Token(NamedTuple):
    """One token routed by hand."""

    scores: list[float]
    ids: list[int]
    weights: list[float]
    allowed: list[int]


def route_by_hand(logits: list[float], bias: list[float], K: int, config: RouterConfig) -> Token:
    """DeepSeek-V3's gate (arXiv 2412.19437, 2.1.2) for one token; with one group and no bias, plain top-K."""
    if config.score == "softmax":
        high = max(logits)
        exponentials = [math.exp(logit - high) for logit in logits]
        total = math.fsum(exponentials)
        scores = [e / total for e in exponentials]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    ranking = [score + b for score, b in zip(scores, bias, strict=True)]
    size = len(logits) // config.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
    if config.num_groups > 1:
        groups.sort(key=lambda group: sum(sorted(ranking[e] for e in group)[-2:]), reverse=True)
    allowed = [e for group in groups[: config.groups_per_token] for e in group]
    ids = sorted(allowed, key=lambda e: ranking[e], reverse=True)[:K]
    divisor = math.fsum(scores[e] for e in ids) if config.renormalize else 1.0
    return Token(scores, ids, [scores[e] / divisor * config.scale for e in ids], sorted(allowed))


def dense_weights(topk: TopK, token_ids_N: Tensor, expert_ids_N: Tensor, weights_N: Tensor) -> Tensor:
    return torch.zeros_like(topk.scores_TE).index_put((token_ids_N, expert_ids_N), weights_N)


def plain_weights(topk: TopK, config: RouterConfig) -> Tensor:
    """(T, E) weights of the plain choice."""
    token_ids_N, expert_ids_N = pairs_of_topk(topk.topk_ids_TK)
    chosen_N = torch.ones_like(token_ids_N, dtype=torch.bool)
    weights_N = weights_of_pairs(topk.scores_TE, topk.topk_ids_TK, token_ids_N, expert_ids_N, chosen_N, config)
    return dense_weights(topk, token_ids_N, expert_ids_N, weights_N)


SCORES = {"softmax": {"score": "softmax"}, "sigmoid": {"score": "sigmoid"}}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"renormalize": False},
    "renormalized": {},
    "scaled": {"scale": 2.5},
    "biased": {"expert_bias": True},
    "groups": {"num_groups": 4, "groups_per_token": 2, "renormalize": False},
    "deepseek": {"num_groups": 8, "groups_per_token": 4, "expert_bias": True, "scale": 2.5},
}
SHAPES = [(20, 16, 1), (20, 16, 4), (20, 16, 8), (5, 256, 8), (3, 4096, 16)]


@pytest.mark.parametrize(("T", "E", "K"), SHAPES, ids=lambda size: str(size))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_choice_and_weights_are_the_loops(
    score: dict[str, Any], options: dict[str, Any], T: int, E: int, K: int
) -> None:
    config = RouterConfig(**score, **options)
    logits_TE = torch.randn(T, E, dtype=torch.float64) * 2
    bias_E = torch.randn(E, dtype=torch.float64) * 0.2 if config.expert_bias else None
    topk = compute_topk(logits_TE, bias_E, K, config)
    weights_TE = plain_weights(topk, config)
    bias = [0.0] * E if bias_E is None else bias_E.tolist()
    for token, logits in enumerate(logits_TE.tolist()):
        expected = route_by_hand(logits, bias, K, config)
        assert topk.topk_ids_TK[token].tolist() == expected.ids
        scores_E = torch.tensor(expected.scores, dtype=torch.float64)
        torch.testing.assert_close(topk.scores_TE[token], scores_E, rtol=1e-12, atol=0)
        assert weights_TE[token, expected.ids].tolist() == pytest.approx(expected.weights, rel=1e-12)
        if topk.allowed_TE is not None:
            assert topk.allowed_TE[token].nonzero().flatten().tolist() == expected.allowed
        else:
            assert config.num_groups == 1


@pytest.mark.parametrize(("E", "K"), [(1, 1), (16, 16), (4, 4)])
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_every_expert_may_be_chosen(score: dict[str, Any], E: int, K: int) -> None:
    topk = compute_topk(torch.randn(9, E), None, K, RouterConfig(**score))
    assert topk.topk_ids_TK.sort(1).values.tolist() == [list(range(E))] * 9
    torch.testing.assert_close(plain_weights(topk, RouterConfig(**score)).sum(1), torch.ones(9))


def test_bias_moves_the_choice_and_not_the_weight() -> None:
    logits_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    config = RouterConfig(renormalize=False, score="sigmoid", expert_bias=True)
    topk = compute_topk(logits_TE, torch.tensor([0.0, 0.0, 0.0, 9.0]), 2, config)
    assert topk.topk_ids_TK.tolist() == [[3, 0]]
    assert torch.equal(plain_weights(topk, config)[0, [3, 0]], logits_TE.sigmoid()[0, [3, 0]])


def test_bias_takes_part_in_the_choice_of_groups() -> None:
    config = RouterConfig(score="sigmoid", num_groups=2, groups_per_token=1, expert_bias=True)
    # The second group wins by its bias; its experts then win inside it by biased score, the first group's by none.
    topk = compute_topk(torch.tensor([[3.0, 3.0, 0.0, 1.0]]), torch.tensor([0.0, 0.0, 2.0, 0.5]), 2, config)
    assert topk.topk_ids_TK.tolist() == [[2, 3]]


def test_counts_are_of_the_plain_choice() -> None:
    topk = compute_topk(torch.randn(50, 6), None, 2, RouterConfig())
    ids = topk.topk_ids_TK.flatten().tolist()
    assert topk.counts_E().tolist() == [ids.count(expert) for expert in range(6)]


@pytest.mark.parametrize("balance", ["none", "batch"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_balance_loss_counts_by_score_alone_what_bias_or_groups_correct(name: str, balance: Any) -> None:
    T, E, K = 20, 16, 4
    config = RouterConfig(**OPTIONS[name], balance=balance, balance_coef=0.0 if balance == "none" else 0.1)
    logits_TE, bias_E = torch.randn(T, E), torch.randn(E) if config.expert_bias else None
    got = compute_topk(logits_TE, bias_E, K, config).by_score_TK
    if balance == "none" or name in ("plain", "renormalized", "scaled"):
        assert got is None
    else:
        assert got is not None
        assert got.tolist() == [sorted(range(E), key=each.__getitem__, reverse=True)[:K] for each in logits_TE.tolist()]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_entropy_is_of_shares_of_the_sum_and_nan_where_a_logit_is_bad(score: dict[str, Any], bad: float) -> None:
    config, logits_TE = RouterConfig(**score), torch.randn(4, 6, dtype=torch.float64) * 2
    logits_TE[2, 1] = bad
    entropy_T = compute_topk(logits_TE, None, 2, config).entropy_T().tolist()
    assert math.isnan(entropy_T.pop(2))
    scores = [route_by_hand(logits_TE[token].tolist(), [0.0] * 6, 2, config).scores for token in (0, 1, 3)]
    shares = [[each / math.fsum(of_token) for each in of_token] for of_token in scores]
    assert entropy_T == pytest.approx([-math.fsum(p * math.log(p) for p in of_token) for of_token in shares])


class Selected(NamedTuple):
    topk: TopK
    token_ids_N: Tensor
    expert_ids_N: Tensor
    chosen_N: Tensor
    weights_N: Tensor


def select(logits_TE: Tensor, bias_E: Tensor | None, K: int, pairs_E: Tensor, config: RouterConfig) -> Selected:
    topk = compute_topk(logits_TE, bias_E, K, config)
    mask_TE = select_tokens(topk.ranking_TE, topk.topk_ids_TK, topk.allowed_TE, pairs_E)
    token_ids_N, expert_ids_N = pairs_of_mask(mask_TE, int(pairs_E.sum()))
    chosen_N = (topk.topk_ids_TK[token_ids_N] == expert_ids_N[:, None]).any(1)
    weights_N = weights_of_pairs(topk.scores_TE, topk.topk_ids_TK, token_ids_N, expert_ids_N, chosen_N, config)
    return Selected(topk, token_ids_N, expert_ids_N, chosen_N, weights_N)


@given(
    seed=st.integers(0, 2**31),
    score=st.sampled_from(["softmax", "sigmoid"]),
    renormalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    groups=st.sampled_from([1, 4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_kept_pairs_weigh_exactly_what_plain_topk_gives_and_added_ones_their_own_score(
    seed: int, score: Any, renormalize: bool, scale: float, groups: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = RouterConfig(
        score=score, renormalize=renormalize, scale=scale, num_groups=groups, groups_per_token=max(1, groups // 2)
    )
    T, E, K = 30, 8, 3
    logits_TE = torch.randn(T, E, generator=generator, dtype=dtype) * 3
    pairs_E = torch.randint(0, T + 1, (E,), generator=generator)
    selected = select(logits_TE, None, K, pairs_E, config)
    saved = selected.chosen_N
    plain_TE = plain_weights(selected.topk, config)
    assert torch.equal(selected.weights_N[saved], plain_TE[selected.token_ids_N[saved], selected.expert_ids_N[saved]])
    added = selected.topk.scores_TE[selected.token_ids_N[~saved], selected.expert_ids_N[~saved]]
    if renormalize and score == "sigmoid":
        sums_T = selected.topk.scores_TE.gather(1, selected.topk.topk_ids_TK).sum(1)
        added = added / sums_T[selected.token_ids_N[~saved]]
    torch.testing.assert_close(selected.weights_N[~saved], added * scale)


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_an_added_pair_never_outweighs_the_tokens_best(score: dict[str, Any]) -> None:
    # All tokens for all experts. Scores far below one would let an undivided sigmoid score through.
    selected = select(torch.randn(40, 8) - 3, None, 2, torch.full((8,), 40), RouterConfig(**score))
    weights_TE = dense_weights(selected.topk, selected.token_ids_N, selected.expert_ids_N, selected.weights_N)
    assert (weights_TE.argmax(1) == selected.topk.topk_ids_TK[:, 0]).all()
    assert (weights_TE > 0).all()


@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "plain"])
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_gradient_of_gates_is_that_of_the_dense_formula(score: dict[str, Any], renormalize: bool) -> None:
    config = RouterConfig(**score, renormalize=renormalize, scale=1.5)
    T, E, K = 12, 6, 2
    logits_TE = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    selected = select(logits_TE, None, K, torch.tensor([9, 1, 0, 12, 4, 5]), config)
    weight_N = torch.randn(selected.weights_N.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(selected.weights_N @ weight_N, logits_TE)

    exponentials_TE = logits_TE.exp()
    if config.score == "softmax":
        scores_TE = exponentials_TE / exponentials_TE.sum(1, keepdim=True)
    else:
        scores_TE = exponentials_TE / (1 + exponentials_TE)
    total = torch.zeros((), dtype=torch.float64)
    for token, expert, chosen, weight in zip(
        selected.token_ids_N.tolist(), selected.expert_ids_N.tolist(), selected.chosen_N.tolist(), weight_N, strict=True
    ):
        divides = renormalize and (chosen or config.score == "sigmoid")
        divisor = sum(scores_TE[token, e] for e in selected.topk.topk_ids_TK[token].tolist()) if divides else 1.0
        total = total + weight * 1.5 * scores_TE[token, expert] / divisor
    (expected,) = torch.autograd.grad(total, logits_TE)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_gradcheck_of_gates(score: dict[str, Any], options: dict[str, Any]) -> None:
    config = RouterConfig(**score, **options)
    logits_TE = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    pairs_E = torch.tensor([2, 1, 0, 3] * 4)

    def pair_weights(logits_TE: Tensor) -> Tensor:
        return select(logits_TE, torch.zeros(16, dtype=torch.float64), 4, pairs_E, config).weights_N

    assert torch.autograd.gradcheck(pair_weights, logits_TE)


@pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)
def test_gradient_of_scores_that_a_kernel_computed(score: dict[str, Any]) -> None:
    config, logits_TE = RouterConfig(**score), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    wanted_TE = scores_of(logits_TE, config)
    got_TE = _Scores.apply(logits_TE, wanted_TE.detach(), config.score == "softmax")
    weight_TE = torch.randn(3, 5, dtype=torch.float64)
    got, wanted = (torch.autograd.grad((each * weight_TE).sum(), logits_TE) for each in (got_TE, wanted_TE))
    torch.testing.assert_close(got, wanted)


def test_ranking_carries_no_gradient() -> None:
    topk = compute_topk(torch.randn(4, 6, requires_grad=True), torch.zeros(6), 2, RouterConfig(expert_bias=True))
    assert topk.scores_TE.requires_grad
    assert not topk.ranking_TE.requires_grad


@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "plain"])
def test_sigmoid_scores_that_all_underflow_give_finite_weights_and_gradients(renormalize: bool) -> None:
    config = RouterConfig(score="sigmoid", renormalize=renormalize)
    logits_TE = torch.full((3, 4), -200.0, requires_grad=True)
    weights_TE = plain_weights(compute_topk(logits_TE, None, 2, config), config)
    assert weights_TE.isfinite().all()
    (gradient,) = torch.autograd.grad(weights_TE.sum(), logits_TE)
    assert gradient.isfinite().all()


def test_softmax_scores_of_zero_chosen_by_bias_give_finite_weights() -> None:
    # The first expert takes all of the softmax, the bias takes it out of the choice.
    config = RouterConfig(expert_bias=True)
    topk = compute_topk(torch.tensor([[200.0, 0.0, 0.0]]), torch.tensor([-2.0, 0.0, 0.0]), 2, config)
    assert topk.topk_ids_TK.tolist() == [[1, 2]]
    assert plain_weights(topk, config).isfinite().all()
