"""Makes a `Routing` of the top-K experts and weights that a model's own router returns.

With a capacity factor every destination rank receives a bounded number of rows, for which static buffers are made. At
ep_size and above it that bound is all pairs. Below, each expert loses its pairs of least weight while a rank has more.

Legend: S ranks of the EP group, T tokens on this rank, K experts per token, E experts, e local experts, N pairs this
rank sends.
"""

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig, RoundingConfig, RouterConfig
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.integrations.rounded_routing import given_weights, spread
from sonic_ep.kernels.backend import allows_spare_capacity, chosen_pairs
from sonic_ep.kernels.route.topk.reference import times_chosen
from sonic_ep.routers.count_exchange import RankStatus, gather_counts
from sonic_ep.routers.rounding import max_received
from sonic_ep.routers.route import RoutingContext, decide_pairs
from sonic_ep.routers.topk import TopK
from sonic_ep.routing import INDEX_DTYPE, AsyncSplitSizes, GroupCounts, Routing, unrounded

_OFF = RoundingConfig(mode="off")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterCall:
    """One call of a framework's router: what a routing needs beside the router's results.

    exchange: see `gather_counts`. dtype: of the experts' input. training: of the module. Both must be equal on all
    ranks. problem: why this rank cannot route, which all ranks raise as ValueError, or None. has_given_experts: see
    RankStatus.
    """

    group: EPGroup
    exchange: Exchange
    dtype: torch.dtype
    training: bool
    problem: str | None = None
    has_given_experts: bool = False

    def gather(self, counts_E: Tensor, num_tokens: int) -> tuple[GroupCounts, AsyncSplitSizes | None]:
        """Returns the counts of all ranks and the copy of their sizes, see GroupDecision. A collective."""
        status = RankStatus(
            counts_E=counts_E,
            num_tokens=num_tokens,
            dtype=self.dtype,
            training=self.training,
            problem=self.problem,
            has_given_experts=self.has_given_experts,
        )
        counts, split_sizes, _ = gather_counts(status, _OFF, self.group, self.exchange)
        return counts, split_sizes

    def context(self, config: MoEConfig, expert_ids_TK: Tensor | None = None) -> RoutingContext:
        """Returns the same for `decide_pairs`."""
        return RoutingContext(
            config=config,
            group=self.group,
            dtype=self.dtype,
            training=self.training,
            problem=self.problem,
            exchange=self.exchange,
            expert_ids_TK=expert_ids_TK,
        )


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
) -> Routing:
    """Returns the routing of every (token, expert) pair. A collective: with several ranks, one all-gather of counts.

    Shapes:    topk_ids_TK (T, K) integers, distinct in each row; topk_weights_TK (T, K) floating point, differentiable.
    has_sentinels: ids of E and more are no pairs: experts of other ranks (`AllReduceEP` of transformers). Their weights
               get gradients of zero. On the CPU the host reads the number of pairs.
    capacity:  its capacity_factor, if any, is at least ep_size: in training it bounds the rows that arrive, and removes
               no pair. Then ValueError, on every rank, if static buffers do not take T tokens.
    """
    if call.problem is not None and call.group.size == 1:
        raise ValueError(call.problem)
    T, K = topk_ids_TK.shape
    if has_sentinels:
        ids_N, order_N = topk_ids_TK.flatten().to(INDEX_DTYPE).sort(stable=True)  # by expert, then token
        counts_E = times_chosen(ids_N.clamp(max=E).long(), E + 1)[:E]
    else:
        topk_ids_TK = topk_ids_TK.long()
        counts_E = times_chosen(topk_ids_TK, E)
        order_N = _order_of_pairs(topk_ids_TK, counts_E)
    received = _most_received(capacity, T, K, E, call.group, training=call.training)
    if call.group.size == 1:
        counts, split_sizes = unrounded(counts_E[None], counts_E.new_full((1,), T)), None
    else:
        problem = call.problem or (None if received is None else call.exchange.problem_with(T))
        counts, split_sizes = replace(call, problem=problem).gather(counts_E, T)
    max_rows = T * K if has_sentinels and allows_spare_capacity(topk_ids_TK) else None
    if has_sentinels and max_rows is None:
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
) -> Routing:
    """Returns the routing without the pairs of least weight of experts on ranks that would receive too many rows.

    A collective, in training. Differentiable in topk_weights_TK. It takes the arguments of `routing_of_topk`.

    experts: their module, for replay under activation checkpointing. capacity: of mode "off", with a capacity_factor.
    """
    (T, K), ids_TK = topk_ids_TK.shape, topk_ids_TK.long()
    given_TE = spread(topk_weights_TK, ids_TK, E)
    config = config_of(E, K, RouterConfig(), capacity)
    context = call.context(config, ids_TK if call.has_given_experts else None)
    pairs = decide_pairs(experts, TopK(given_TE, given_TE.detach(), None, ids_TK), context)
    return Routing.of(pairs, given_weights(pairs, given_TE), T)


def _order_of_pairs(topk_ids_TK: Tensor, counts_E: Tensor) -> Tensor:
    """Returns where the pairs are in the flattened table, by expert, then token: (N,) int64."""
    token_ids_N, expert_ids_N, _ = chosen_pairs(topk_ids_TK, counts_E)
    token_ids_N = token_ids_N.long()
    slot_N = (topk_ids_TK.index_select(0, token_ids_N) == expert_ids_N[:, None]).to(torch.uint8).argmax(1)
    return token_ids_N * topk_ids_TK.shape[1] + slot_N
