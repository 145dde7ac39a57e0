"""Makes a `Routing` of the top-K experts and weights that a model's own router returns, as ids or as a map.

With a capacity factor every destination rank receives a bounded number of rows, for which static buffers are made. At
ep_size and above it that bound is all pairs. Below, each expert loses its pairs of least weight while a rank has more.

Legend: S ranks of the EP group, T tokens on this rank, K experts per token, E experts, e local experts, N pairs this
rank sends.
"""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig, RoundingConfig, RouterConfig
from sonic_ep.groups import EPGroup
from sonic_ep.integrations.rounded_routing import rounded_routing, spread
from sonic_ep.kernels.backend import allows_spare_capacity
from sonic_ep.kernels.route.topk.reference import times_chosen
from sonic_ep.routers.rounding import max_received
from sonic_ep.routers.topk_pairs import GivenTopK, RouterCall, WeightsOfPairs, route_topk
from sonic_ep.routing import INDEX_DTYPE, Routing
from sonic_ep.steps.experts_step import RunsAs

_OFF = RoundingConfig(mode="off")


@functools.cache
def config_of(E: int, K: int, router: RouterConfig, rounding: RoundingConfig) -> MoEConfig:
    """Returns what routing reads. Cached, because it checks all fields, and every step needs it."""
    return MoEConfig(d=1, n=1, E=E, K=K, router=router, rounding=rounding)


def routing_of_topk(
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    E: int,
    call: RouterCall,
    has_sentinels: bool = False,
    capacity: RoundingConfig = _OFF,
    runs_as: RunsAs | None = None,
) -> Routing:
    """Returns the routing of every (token, expert) pair. A collective: with several ranks, one all-gather of counts.

    Shapes:    topk_ids_TK (T, K) integers, distinct in each row; topk_weights_TK (T, K) floating point, differentiable.
    has_sentinels: ids of E and more are no pairs: experts of other ranks (`AllReduceEP` of transformers). Their weights
               get gradients of zero. On the CPU the host reads the number of pairs.
    capacity:  its capacity_factor, if any, is at least ep_size: in training it bounds the rows that arrive, and removes
               no pair. Then ValueError, on every rank, if static buffers do not take T tokens.
    runs_as:   of `FrameworkExperts.begin`: whether it runs as a program.
    """
    T, K = topk_ids_TK.shape
    received = _most_received(capacity, T, K, E, call.group, training=call.training)
    if received is not None and call.problem is None and call.group.size > 1:
        call = replace(call, problem=call.exchange.problem_with(T))
    if has_sentinels:
        return _without_sentinels(topk_ids_TK, topk_weights_TK, E, call, received)
    return _routed(topk_ids_TK.long(), topk_weights_TK, E, K, call, received, runs_as)


def routing_of_map(
    probs_TE: Tensor, routing_map_TE: Tensor, K: int, *, call: RouterCall, runs_as: RunsAs | None = None
) -> Routing:
    """Returns the routing of every pair of a map, with its probability for a weight. A collective.

    Shapes:    probs_TE (T, E) floating point, differentiable; routing_map_TE (T, E) bool, K times True in each row.
    runs_as:   see `routing_of_topk`.
    """
    return _routed(routing_map_TE, probs_TE, routing_map_TE.shape[1], K, call, None, runs_as)


def _routed(
    chosen: Tensor, weights: Tensor, E: int, K: int, call: RouterCall, received: int | None, runs_as: RunsAs | None
) -> Routing:
    routes = None if runs_as is None else runs_as.routes
    routed = None if routes is None else routes.route(chosen, weights, E, K, call)
    with torch.no_grad():
        routed = routed or route_topk(chosen, weights, E, K, call)
    weights_N = WeightsOfPairs.apply(weights, routed.weights_N, routed.slots_N)
    return Routing(
        weights_N,
        routed.token_ids_N,
        routed.counts,
        chosen.shape[0],
        max_received=received,
        split_sizes=routed.split_sizes,
    )


def _without_sentinels(
    topk_ids_TK: Tensor, topk_weights_TK: Tensor, E: int, call: RouterCall, received: int | None
) -> Routing:
    T, K = topk_ids_TK.shape
    ids_N, order_N = topk_ids_TK.flatten().to(INDEX_DTYPE).sort(stable=True)  # by expert, then token
    counts_E = times_chosen(ids_N.clamp(max=E).long(), E + 1)[:E]
    counts, split_sizes = call.counts(counts_E, T)
    max_rows = T * K if allows_spare_capacity(topk_ids_TK) else None
    if max_rows is None:
        order_N = order_N[: int(counts_E.sum())]
    weights_N = topk_weights_TK.flatten().index_select(0, order_N)
    token_ids_N = (order_N // max(K, 1)).to(INDEX_DTYPE)
    return Routing(weights_N, token_ids_N, counts, T, max_rows, received, split_sizes)


def _most_received(capacity: RoundingConfig, T: int, K: int, E: int, group: EPGroup, *, training: bool) -> int | None:
    """Returns an upper bound of the rows that any rank receives if none is removed, or None without a capacity."""
    received = max_received(capacity, T, K, training=training)
    return None if received is None else min(received, group.size * T * min(K, E // group.size))


def capped_routing(
    experts: object,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    E: int,
    call: RouterCall,
    capacity: RoundingConfig,
    runs_as: RunsAs | None = None,
) -> Routing:
    """Returns the routing without the pairs of least weight of experts on ranks that would receive too many rows.

    A collective, in training. Differentiable in topk_weights_TK. It takes the arguments of `routing_of_topk`.

    experts: their module, for replay under activation checkpointing. capacity: of mode "off", with a capacity_factor.
    """
    K, ids_TK = topk_ids_TK.shape[1], topk_ids_TK.long()
    given = GivenTopK(ids_TK, topk_weights_TK, spread(topk_weights_TK.detach(), ids_TK, E), None)
    return rounded_routing(experts, given, config_of(E, K, RouterConfig(), capacity), call, runs_as=runs_as)
