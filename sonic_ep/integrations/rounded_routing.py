"""The routing that rounding makes of the top-K and the weights of a framework's own router.

Source: SonicMoE, arXiv 2512.14080, section 5; docs/token_rounding.md.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

import torch
from torch import Tensor

from sonic_ep.kernels.route.weights_and_losses.reference import weights_of_pairs
from sonic_ep.routers.route import RoutingContext, decide_pairs
from sonic_ep.routers.topk import TopK
from sonic_ep.routing import PairLists, Routing


def rounded_routing(
    module: object, topk: TopK, given_TE: Tensor, context: RoutingContext, scale: float = 1.0
) -> Routing:
    """Rounds the top-K of a framework's router, and returns the routing. A collective; see `decide_pairs`.

    Differentiable in weights and scores. module: of the experts, for replay under activation checkpointing. topk: what
    the router chose, of scores in fp32 or fp64. given_TE: the weights that it gave, see `spread`. scale: factor on the
    weight of an added pair, which the config of `context` makes of its score, see `weights_of_pairs`.
    """
    pairs, scores_TE = decide_pairs(module, topk, context), topk.scores_TE
    weights_N = given_weights(pairs, given_TE).to(scores_TE.dtype)
    lists = pairs.token_ids_N, pairs.expert_ids_N, pairs.chosen_N
    added_N = scale * weights_of_pairs(scores_TE, pairs.topk_ids_TK, *lists, context.config.router)
    return Routing.of(pairs, weights_N.where(pairs.chosen_N, added_N), scores_TE.shape[0])


def spread(weights_TK: Tensor, topk_ids_TK: Tensor, E: int) -> Tensor:
    """Returns the weights of top-K pairs as (T, E), in fp32 at least: zero outside of the top-K. Differentiable."""
    weights_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
    return weights_TK.new_zeros(weights_TK.shape[0], E).scatter(1, topk_ids_TK, weights_TK)


def given_weights(pairs: PairLists, given_TE: Tensor) -> Tensor:
    """Returns (N,) what `given_TE`, (T, E), has for each pair. Differentiable in it."""
    # A spare entry has token -1; its weight is never used.
    pairs_N = (pairs.token_ids_N.long() * given_TE.shape[1] + pairs.expert_ids_N).clamp(min=0)
    return given_TE.reshape(-1).index_select(0, pairs_N)
