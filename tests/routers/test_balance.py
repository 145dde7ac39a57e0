"""Balance losses and bias updates: against loops in double precision.

Legend: B sequences, L tokens of a sequence, T tokens on this rank, E experts, K experts per token, S ranks of the EP
group.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sonic_ep.config import RouterConfig
from sonic_ep.kernels.route.weights_and_losses.reference import balance_loss, z_loss
from sonic_ep.routers.router import updated_bias
from sonic_ep.routers.topk import TopK, compute_topk
from sonic_ep.routing import BalanceCounts, GroupCounts

SCORES = ("softmax", "sigmoid")


def config_of(score: str, balance: str, coef: float = 0.5) -> RouterConfig:
    return RouterConfig(score=score, balance=balance, balance_coef=coef)  # type: ignore[arg-type]


def counts_of(topks: list[TopK]) -> GroupCounts:
    """What the ranks of one EP group know of each other."""
    chosen_SE = torch.stack([topk.counts_E() for topk in topks])
    tokens_S = torch.tensor([topk.scores_TE.shape[0] for topk in topks])
    # Rounding must not show in a loss: give it something else.
    return GroupCounts(chosen_SE, chosen_SE * 0 + 8, chosen_SE * 0 + 3, tokens_S, tokens_S * 0, 8)


def loss_of(topk: TopK, counts: GroupCounts, L: int, config: RouterConfig) -> Tensor:
    return balance_loss(topk.scores_TE, BalanceCounts(topk.topk_ids_TK, counts.chosen_SE), L, config)


def hand_shares(logits: list[float], score: str) -> list[float]:
    values = [math.exp(logit) if score == "softmax" else 1 / (1 + math.exp(-logit)) for logit in logits]
    return [value / math.fsum(values) for value in values]


def hand_loss(tokens: list[list[float]], ids: list[list[int]], score: str, load: list[float] | None = None) -> float:
    """E * sum of f_e * P_e over the tokens given; f from their own choices unless `load` says otherwise."""
    E, K = len(tokens[0]), len(ids[0])
    shares = [hand_shares(logits, score) for logits in tokens]
    loss = 0.0
    for expert in range(E):
        mean_share = math.fsum(share[expert] for share in shares) / len(tokens)
        own = sum(expert in chosen for chosen in ids) / (len(tokens) * K)
        loss += (own if load is None else load[expert]) * mean_share
    return E * loss


@pytest.mark.parametrize("score", SCORES)
def test_sequence_loss_is_the_mean_of_each_sequences_own(score: str) -> None:
    B, L, E, K = 3, 7, 6, 2
    logits_TE = torch.randn(B * L, E, dtype=torch.float64)
    config = config_of(score, "sequence")
    topk = compute_topk(logits_TE, None, K, config)
    tokens, ids = logits_TE.view(B, L, E).tolist(), topk.topk_ids_TK.view(B, L, K).tolist()
    expected = sum(hand_loss(tokens[b], ids[b], score) for b in range(B)) / B
    assert loss_of(topk, counts_of([topk]), L, config).item() == pytest.approx(0.5 * expected, rel=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_batch_loss_counts_this_ranks_tokens(score: str) -> None:
    logits_TE = torch.randn(20, 6, dtype=torch.float64)
    config = config_of(score, "batch")
    topk, other = compute_topk(logits_TE, None, 2, config), compute_topk(torch.randn(9, 6), None, 2, config)
    expected = 0.5 * hand_loss(logits_TE.tolist(), topk.topk_ids_TK.tolist(), score)
    loss = loss_of(topk, counts_of([other, topk]), 10, config)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_global_loss_counts_the_whole_groups_tokens(score: str) -> None:
    config = config_of(score, "global")
    topks = [compute_topk(torch.randn(T, 6, dtype=torch.float64), None, 2, config) for T in (20, 9, 0)]
    counts = counts_of(topks)
    total = counts.chosen_SE.sum(0)
    load = (total.double() / total.sum()).tolist()
    for topk in topks[:2]:
        logits = topk.scores_TE.log() if score == "softmax" else topk.scores_TE.logit()
        expected = 0.5 * hand_loss(logits.tolist(), topk.topk_ids_TK.tolist(), score, load)
        assert loss_of(topk, counts, 1, config).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("score", SCORES)
def test_mean_over_ranks_of_the_global_loss_is_the_loss_of_one_process(score: str) -> None:
    config = config_of(score, "global")
    logits_TE = torch.randn(4 * 10, 8, dtype=torch.float64)
    whole = compute_topk(logits_TE, None, 2, config)
    parts = [compute_topk(part, None, 2, config) for part in logits_TE.chunk(4)]
    losses = torch.stack([loss_of(part, counts_of(parts), 10, config) for part in parts])
    torch.testing.assert_close(losses.mean(), loss_of(whole, counts_of([whole]), 40, config), rtol=1e-12, atol=0)
    # With the whole in one place, batch and global are the same.
    batch = loss_of(whole, counts_of([whole]), 40, config_of(score, "batch"))
    torch.testing.assert_close(losses.mean(), batch, rtol=1e-12, atol=0)


@pytest.mark.parametrize("balance", ["sequence", "batch", "global"])
@pytest.mark.parametrize("score", SCORES)
def test_perfect_balance_costs_the_coefficient(score: str, balance: str) -> None:
    L, E, K = 6, 6, 2
    config = config_of(score, balance, coef=0.03)
    ids_TK = torch.tensor([[t % E, (t + 1) % E] for t in range(2 * L)])
    scores_TE = torch.full((2 * L, E), 1 / E if score == "softmax" else 0.7, dtype=torch.float64)
    topk = TopK(scores_TE, scores_TE, None, ids_TK)
    assert topk.counts_E().tolist() == [2 * L * K // E] * E
    assert loss_of(topk, counts_of([topk]), L, config).item() == pytest.approx(0.03, rel=1e-12)


@pytest.mark.parametrize("balance", ["sequence", "batch", "global"])
def test_one_expert_for_all_costs_the_most(balance: str) -> None:
    scores_TE = torch.nn.functional.one_hot(torch.zeros(8, dtype=torch.int64), 4).double()
    topk = TopK(scores_TE, scores_TE, None, torch.zeros(8, 1, dtype=torch.int64))
    config = config_of("softmax", balance, coef=0.03)
    assert loss_of(topk, counts_of([topk]), 4, config).item() == pytest.approx(0.03 * 4, rel=1e-12)


@pytest.mark.parametrize("balance", ["sequence", "batch", "global"])
@pytest.mark.parametrize("score", SCORES)
def test_gradient_flows_through_the_scores_and_not_through_the_counts(score: str, balance: str) -> None:
    L, E, K = 5, 4, 2
    logits_TE = torch.randn(2 * L, E, dtype=torch.float64, requires_grad=True)
    config = config_of(score, balance)
    topk = compute_topk(logits_TE, None, K, config)
    (gradient,) = torch.autograd.grad(loss_of(topk, counts_of([topk]), L, config), logits_TE)

    def dense(logits_TE: Tensor) -> Tensor:
        scores_TE = logits_TE.exp() if score == "softmax" else 1 / (1 + (-logits_TE).exp())
        shares_TE = scores_TE / scores_TE.sum(1, keepdim=True)
        chosen_TE = torch.zeros(2 * L, E, dtype=torch.float64)
        for token, ids in enumerate(topk.topk_ids_TK.tolist()):
            chosen_TE[token, ids] = 1 / K
        pieces = [slice(0, L), slice(L, 2 * L)] if balance == "sequence" else [slice(0, 2 * L)]
        losses = [E * (chosen_TE[piece].mean(0) * shares_TE[piece].mean(0)).sum() for piece in pieces]
        return 0.5 * torch.stack(losses).mean()

    (expected,) = torch.autograd.grad(dense(logits_TE), logits_TE)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


def test_z_loss_is_the_mean_squared_logsumexp() -> None:
    logits_TE = torch.randn(9, 5, dtype=torch.float64) * 4
    expected = sum(math.log(math.fsum(map(math.exp, row))) ** 2 for row in logits_TE.tolist()) / 9
    assert z_loss(logits_TE, RouterConfig(z_loss_coef=0.01)).item() == pytest.approx(0.01 * expected, rel=1e-12)


def test_z_loss_gradient() -> None:
    logits_TE = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda logits: z_loss(logits, RouterConfig(z_loss_coef=0.3)), logits_TE)


LOSSES: dict[str, dict[str, Any]] = {
    "none": {},
    "sequence": {"balance": "sequence", "balance_coef": 0.5, "z_loss_coef": 0.1},
    "batch": {"balance": "batch", "balance_coef": 0.5, "z_loss_coef": 0.1},
    "global": {"balance": "global", "balance_coef": 0.5, "z_loss_coef": 0.1},
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("score", SCORES)
def test_no_tokens_cost_nothing_and_leave_a_graph(score: str, options: dict[str, Any]) -> None:
    config = RouterConfig(score=score, **options)  # type: ignore[arg-type]
    weight_EH = torch.randn(4, 3, requires_grad=True)
    logits_TE = torch.empty(0, 3) @ weight_EH.T
    empty, other = compute_topk(logits_TE, None, 2, config), compute_topk(torch.randn(6, 4), None, 2, config)
    # The other rank has tokens; its gradient's all-reduce waits for this rank's, so there must be one.
    loss = loss_of(empty, counts_of([empty, other]), 1, config) + z_loss(logits_TE, config)
    assert loss.item() == 0
    (gradient,) = torch.autograd.grad(loss, weight_EH)
    assert torch.equal(gradient, torch.zeros_like(weight_EH))


def test_losses_that_are_off_are_zero_whatever_the_logits() -> None:
    # An expert masked by a logit of -inf is no reason for a loss of NaN.
    logits_TE = torch.tensor([[0.0, 1.0, -math.inf], [1.0, 0.0, -math.inf]], requires_grad=True)
    topk = compute_topk(logits_TE, None, 1, RouterConfig())
    loss = loss_of(topk, counts_of([topk]), 2, RouterConfig()) + z_loss(logits_TE, RouterConfig())
    assert loss.item() == 0


def test_bias_rises_for_the_starved_and_falls_for_the_full() -> None:
    bias_E = torch.tensor([0.5, -0.5, 0.0, 0.25])
    moved = updated_bias(bias_E, torch.tensor([0, 9, 4, 3]), 0.125)
    assert moved.tolist() == [0.625, -0.625, 0.0, 0.375]
    assert moved.dtype == torch.float32


def test_bias_rests_where_the_load_is_even() -> None:
    bias_E = torch.randn(8)
    assert torch.equal(updated_bias(bias_E, torch.full((8,), 3), 0.1), bias_E)
    assert torch.equal(updated_bias(bias_E, torch.zeros(8, dtype=torch.int64), 0.1), bias_E)


def test_bias_update_is_exact_for_counts_that_float32_cannot_hold() -> None:
    counts_E = torch.tensor([2**26 + 1, 2**26, 2**26 - 1])
    assert updated_bias(torch.zeros(3), counts_E, 1.0).tolist() == [-1.0, 0.0, 1.0]
