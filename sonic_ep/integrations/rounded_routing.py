"""The routing that rounding makes of the top-K and the weights of a framework's own router.

Source: SonicMoE, arXiv 2512.14080, section 5; docs/token_rounding.md.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

import torch
from torch import Tensor

from sonic_ep.config import RouterConfig
from sonic_ep.kernels.route.weights_and_losses.reference import weights_of_pairs
from sonic_ep.routers.route import RoutingContext, decide_pairs
from sonic_ep.routers.topk import TopK
from sonic_ep.routing import PairLists, RoutedPairs, Routing


def rounded_topk(
    module: object, topk: TopK, weights_TK: Tensor, context: RoutingContext, scale: float = 1.0
) -> Routing:
    """Rounds the top-K of a framework's router, and returns the routing. A collective; see `decide_pairs`.

    module: of the experts, for replay under activation checkpointing. topk, weights_TK: (T, K) what the router chose,
    and the weights that it gave. The others: see `rounded_routing`.
    """
    pairs, scores_TE = decide_pairs(module, topk, context), topk.scores_TE
    given_TE = torch.zeros_like(scores_TE).scatter(1, topk.topk_ids_TK, weights_TK.to(scores_TE.dtype))
    return rounded_routing(pairs, given_TE, scores_TE, context.config.router, scale)


def rounded_routing(
    routed_pairs: RoutedPairs, given_TE: Tensor, scores_TE: Tensor, config: RouterConfig, scale: float
) -> Routing:
    """Returns the routing of pairs that rounding left and added, differentiable in weights and scores.

    given_TE: (T, E) weights of the router, which top-K pairs have; zero outside of the top-K. scores_TE: (T, E) fp32 or
    fp64. config, scale: how an added pair gets its weight, see `weights_of_pairs`; the result is multiplied by scale.
    """
    T, pairs = scores_TE.shape[0], routed_pairs
    weights_N = given_weights(pairs, given_TE).to(scores_TE.dtype)
    lists = pairs.token_ids_N, pairs.expert_ids_N, pairs.chosen_N
    added_N = scale * weights_of_pairs(scores_TE, pairs.topk_ids_TK, *lists, config)
    return Routing.of(pairs, weights_N.where(pairs.chosen_N, added_N), T)


def given_weights(pairs: PairLists, given_TE: Tensor) -> Tensor:
    """Returns (N,) what `given_TE`, (T, E), has for each pair. Differentiable in it."""
    # A spare entry has token -1; its weight is never used.
    pairs_N = (pairs.token_ids_N.long() * given_TE.shape[1] + pairs.expert_ids_N).clamp(min=0)
    return given_TE.reshape(-1).index_select(0, pairs_N)
