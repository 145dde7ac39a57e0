"""The routing that rounding makes of the top-K and the weights of a framework's own router.

Source: SonicMoE, arXiv 2512.14080, section 5; docs/token_rounding.md.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig
from sonic_ep.routers.replay import replaying
from sonic_ep.routers.rounding import max_received, max_rows
from sonic_ep.routers.topk_pairs import Added, GivenTopK, RouterCall, WeightsOfRounded, round_topk
from sonic_ep.routing import Routing
from sonic_ep.steps.experts_step import RunsAs


def rounded_routing(
    module: object,
    given: GivenTopK,
    config: MoEConfig,
    call: RouterCall,
    *,
    scale: float = 1.0,
    runs_as: RunsAs | None = None,
) -> Routing:
    """Rounds the top-K of a framework's router, and returns the routing. A collective; see `decide_pairs`.

    Differentiable in weights and scores. module: of the experts, for replay under activation checkpointing. given: what
    the router chose, of scores in fp32 or fp64. config: of `config_of`; it makes the weight of an added pair of its
    score, with `scale` as a factor. runs_as: of `FrameworkExperts.begin`: whether it runs as a program.
    """
    added, routes = Added.by(config.router, scale), None if runs_as is None else runs_as.routes
    if replaying() and not given.by_expert:  # of other experts, perhaps, than the weights
        weights_TE = spread(given.weights, given.topk_ids_TK, config.E)
        given = given._replace(weights=weights_TE, by_expert=True)
    routed = None if routes is None else routes.round(given, added, config, call)
    with torch.no_grad():
        routed = routed or round_topk(module, given, added, config, call)
    weights_N = WeightsOfRounded.apply(
        given.weights, given.scores_TE, routed.chosen, routed.weights_N, routed.slots_N, added
    )
    (T, K), rounding = given.topk_ids_TK.shape, config.rounding
    limits = (
        max_rows(rounding, T, K, config.E, call.group.size, training=call.training),
        max_received(rounding, T, K, training=call.training),
    )
    return Routing(weights_N, routed.token_ids_N, routed.counts, T, *limits, routed.split_sizes)


def spread(weights_TK: Tensor, topk_ids_TK: Tensor, E: int) -> Tensor:
    """Returns the weights of top-K pairs as (T, E), in fp32 at least: zero outside of the top-K. Differentiable."""
    weights_TK = weights_TK.to(torch.promote_types(weights_TK.dtype, torch.float32))
    return weights_TK.new_zeros(weights_TK.shape[0], E).scatter(1, topk_ids_TK, weights_TK)
