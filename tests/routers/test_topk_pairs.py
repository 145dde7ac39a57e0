"""Weights of the pairs of a given top-K, rounded or not, and their gradients, against autograd in float64.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup, RoundingConfig
from sonic_ep.config import MoEConfig, RouterConfig
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.kernels.route.topk.reference import topk_mask
from sonic_ep.kernels.route.weights_and_losses.reference import weights_of_pairs
from sonic_ep.routers.route import decide_pairs
from sonic_ep.routers.topk import TopK
from sonic_ep.routers.topk_pairs import (
    Added,
    GivenTopK,
    RouterCall,
    WeightsOfPairs,
    WeightsOfRounded,
    round_topk,
    route_topk,
)

T, E, K = 60, 12, 3
CALL = RouterCall(group=EPGroup.alone(), exchange=LocalTransport(), dtype=torch.float64, training=True)  # type: ignore[arg-type]


def a_topk() -> tuple[Tensor, Tensor, Tensor]:
    """Scores, ids and weights, of which the last two have nothing to do with each other."""
    scores_TE = torch.randn(T, E, dtype=torch.float64).sigmoid()
    return scores_TE, scores_TE.topk(K).indices, torch.rand(T, K, dtype=torch.float64)


@pytest.mark.parametrize("of_map", [False, True])
def test_weights_without_rounding(of_map: bool) -> None:
    _, ids, weights = a_topk()
    if of_map:
        weights = torch.rand(T, E, dtype=torch.float64)
    chosen, weights = topk_mask(ids, E) if of_map else ids, weights.requires_grad_()
    routed = route_topk(chosen, weights.detach(), E, K, CALL)
    weights_N = WeightsOfPairs.apply(weights, routed.weights_N, routed.slots_N)
    given_TE = weights if of_map else torch.zeros(T, E, dtype=torch.float64).scatter(1, ids, weights)
    expert_ids_N, token_ids_N = topk_mask(ids, E).T.nonzero().unbind(1)
    wanted_N = given_TE[token_ids_N, expert_ids_N]
    assert routed.token_ids_N.tolist() == token_ids_N.tolist()
    assert torch.equal(weights_N, wanted_N)
    dweights_N = torch.randn_like(wanted_N)
    found, wanted = (torch.autograd.grad(each, weights, dweights_N)[0] for each in (weights_N, wanted_N))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize(
    "router",
    [
        RouterConfig(),
        RouterConfig(score="sigmoid", renormalize=True, scale=2.5),
        RouterConfig(score="sigmoid", renormalize=False),
    ],
    ids=["softmax", "sigmoid", "sigmoid alone"],
)
def test_weights_of_rounded_pairs(router: RouterConfig, by_expert: bool) -> None:
    scores_TE, ids, weights = a_topk()
    weights = torch.rand(T, E, dtype=torch.float64) if by_expert else weights
    inputs = weights.requires_grad_(), scores_TE.requires_grad_()
    config = MoEConfig(d=1, n=1, E=E, K=K, router=router, rounding=RoundingConfig(mode="nearest", G=8, t=8))
    given, added = GivenTopK(ids, weights, scores_TE, None, by_expert), Added.by(router, 1.5)
    with torch.no_grad():
        routed = round_topk(None, given, added, config, CALL)
    weights_N = WeightsOfRounded.apply(*inputs, routed.chosen, routed.weights_N, routed.slots_N, added)

    pairs = decide_pairs(None, TopK(scores_TE, scores_TE.detach(), None, ids), CALL.context(config))
    assert 0 < int(pairs.chosen_N.sum()) < len(pairs.chosen_N)
    tokens_N, experts_N = pairs.token_ids_N.long(), pairs.expert_ids_N
    given_TE = weights if by_expert else torch.zeros(T, E, dtype=torch.float64).scatter(1, ids, weights)
    of_scores_N = 1.5 * weights_of_pairs(scores_TE, ids, pairs.token_ids_N, experts_N, pairs.chosen_N, router)
    wanted_N = given_TE[tokens_N, experts_N].where(pairs.chosen_N, of_scores_N)
    assert torch.equal(routed.token_ids_N, pairs.token_ids_N)
    torch.testing.assert_close(weights_N, wanted_N, rtol=1e-14, atol=0)
    dweights_N = torch.randn_like(wanted_N)
    found, wanted = (torch.autograd.grad(each, inputs, dweights_N) for each in (weights_N, wanted_N))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
