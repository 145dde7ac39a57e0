"""The integer part of routing, without gradients: the group's counts, then the pairs that this rank sends.

Legend: T tokens on this rank, E experts, N pairs this rank sends.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig, RoundingConfig
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.kernels.backend import allows_spare_capacity, chosen_pairs, start_selection
from sonic_ep.kernels.program.trace import by_torch
from sonic_ep.kernels.route.topk.reference import times_chosen
from sonic_ep.routers.count_exchange import RankStatus, gather_counts
from sonic_ep.routers.given_routing import NOT_ROUNDED
from sonic_ep.routers.replay import record_pairs, replayed_pairs
from sonic_ep.routers.rounding import is_plain_topk, max_received, max_rows, round_counts
from sonic_ep.routers.topk import TopK
from sonic_ep.routing import BalanceCounts, GroupCounts, RoutedPairs

_LOG = logging.getLogger("sonic_ep")
# From the (E,) number of pairs of each expert, and the length of the lists: token ids, expert ids, and whether the pair
# is in its token's top-K.
FinishPairs = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingContext:
    """The inputs of `decide_pairs` other than the logits.

    dtype: of x. training: training mode. problem: why this rank cannot continue, or None. exchange: the transport that
    gathers the counts, or None for the group's own all-gather. meanwhile: called once while the gather is in flight, to
    launch work that does not need its result. layer, needs_backward, bias_updates: see RankStatus. expert_ids_TK:
    int64, the experts of each token in place of its top-K, or None; with them config is `without_rounding`.
    """

    config: MoEConfig
    group: EPGroup
    dtype: torch.dtype
    training: bool
    problem: str | None = None
    exchange: Exchange | None = None
    meanwhile: Callable[[], None] | None = None
    layer: int = 0
    needs_backward: bool = False
    bias_updates: Tensor | None = None
    expert_ids_TK: Tensor | None = None


@functools.cache
def without_rounding(config: MoEConfig) -> MoEConfig:
    """Returns the config for tokens whose experts are given. Logs that they are not rounded, once for each config."""
    if config.rounding.mode == "off":
        return config
    _LOG.warning(NOT_ROUNDED, config.rounding.mode)
    return replace(config, rounding=replace(config.rounding, mode="off"))


def decide_pairs(router: object, topk: TopK, context: RoutingContext) -> RoutedPairs:
    """Returns the pairs of this rank. A collective, except if a region replays the pairs of `router` (replay.py).

    Raises:  ValueError for this rank's problem. Problems of other ranks raise when the result's `split_sizes` is
             checked, see `gather_counts`. RuntimeError under replay, see replay.py.
    """
    context.group.enter_layer(context.layer)
    # Drawn under replay too, so that later random numbers are the same as in the first forward.
    seed = _draw_seed(context, topk.topk_ids_TK.device)
    routed_pairs = replayed_pairs(router)
    if routed_pairs is not None:
        if context.problem is not None:
            raise ValueError(context.problem)
        if context.meanwhile is not None:
            context.meanwhile()
    else:
        rounding, training = context.config.rounding, context.training
        alone = context.group.size == 1 and topk.bad_logits is None and context.problem is None
        if alone and topk.tokens_1 is not None:
            if context.meanwhile is not None:
                context.meanwhile()
            routed_pairs = pairs_of_one_rank(topk, context, seed)
            record_pairs(router, routed_pairs)
            return routed_pairs
        status, group = _rank_status(topk, seed, context), context.group
        finish: FinishPairs | None = None

        def during_gather() -> None:
            nonlocal finish
            finish = start_pairs(topk, rounding, training=training)
            if context.meanwhile is not None:
                context.meanwhile()

        counts, split_sizes, by_score_SE = gather_counts(status, rounding, group, context.exchange, during_gather)
        routed_pairs = select(topk, counts, context.group.rank, rounding, training=training, finish=finish)
        balance_counts = None
        if topk.by_score_TK is not None:
            balance_counts = BalanceCounts(topk.by_score_TK, counts.chosen_SE if by_score_SE is None else by_score_SE)
        routed_pairs = replace(routed_pairs, split_sizes=split_sizes, balance_counts=balance_counts)
    record_pairs(router, routed_pairs)
    return routed_pairs


def pairs_of_one_rank(topk: TopK, context: RoutingContext, seed: Tensor | None) -> RoutedPairs:
    """Returns what `decide_pairs` does where no other rank has to know anything, and nothing is read by the host."""
    rounding, training = context.config.rounding, context.training
    chosen_E, tokens_1 = topk.counts_E(), topk.tokens_1
    assert tokens_1 is not None
    finish = start_pairs(topk, rounding, training=training)
    chosen_SE = chosen_E.as_strided((1, chosen_E.shape[0]), (chosen_E.shape[0], 1))
    counts = round_counts(chosen_SE, tokens_1, rounding, training=training, seed=tokens_1 if seed is None else seed)
    routed_pairs = select(topk, counts, 0, rounding, training=training, finish=finish)
    if topk.by_score_TK is not None:
        routed_pairs = replace(routed_pairs, balance_counts=BalanceCounts(topk.by_score_TK, chosen_SE))
    return routed_pairs


def _draw_seed(context: RoutingContext, device: torch.device) -> Tensor | None:
    stochastic = context.training and context.config.rounding.mode == "stochastic"
    return torch.randint(2**31 - 1, (), device=device) if stochastic else None


def _rank_status(topk: TopK, seed: Tensor | None, context: RoutingContext) -> RankStatus:
    num_tokens, problem = topk.topk_ids_TK.shape[0], context.problem
    if problem is None and context.training and context.exchange is not None:
        problem = context.exchange.problem_with(num_tokens)
    of_all_ranks = topk.by_score_TK if context.config.router.balance == "global" else None
    return RankStatus(
        counts_E=topk.counts_E(),
        by_score_E=None if of_all_ranks is None else _times_chosen(of_all_ranks, context.config.E),
        num_tokens=num_tokens,
        dtype=context.dtype,
        training=context.training,
        seed=seed,
        bad_logits=topk.bad_logits,
        problem=problem,
        layer=context.layer,
        needs_backward=context.needs_backward,
        bias_updates=context.bias_updates,
        has_given_experts=context.expert_ids_TK is not None,
    )


def _times_chosen(ids_TK: Tensor, E: int) -> Tensor:
    return by_torch(functools.partial(times_chosen, E=E), (E,), torch.int64, ids_TK)


def start_pairs(topk: TopK, rounding: RoundingConfig, *, training: bool) -> FinishPairs:
    """Starts this rank's lists of pairs before the group's counts are known. Returns the function that finishes them.

    Plain top-K depends on no other rank, so its lists are then complete already.
    """
    if is_plain_topk(rounding, training=training):
        lists = chosen_pairs(topk.topk_ids_TK, topk.counts_E())
        return lambda *_: lists
    # Within an expert the bias changes no order, but rounding of score + bias could.
    return start_selection(topk.scores_TE.detach(), topk.topk_ids_TK, topk.allowed_TE)


def select(
    topk: TopK,
    counts: GroupCounts,
    rank: int,
    rounding: RoundingConfig,
    *,
    training: bool,
    finish: FinishPairs | None = None,
) -> RoutedPairs:
    """Returns the pairs of this rank: for each expert its `counts.pairs_SE[rank]` best tokens.

    Tokens with the expert in their top-K rank first (kernels/route/select/reference.py). On a GPU the lists may have
    spare entries. rounding, training: those that the counts were rounded with. finish: the result of `start_pairs`, if
    it was called before.
    """
    (T, K), (S, E) = topk.topk_ids_TK.shape, counts.pairs_SE.shape
    limit = max_rows(rounding, T, K, E, S, training=training)
    pairs_E, capacity = counts.pairs_SE[rank], T * K
    if not is_plain_topk(rounding, training=training):
        assert limit is not None
        capacity = min(limit, T * E) if allows_spare_capacity(pairs_E) else int(pairs_E.sum())
    lists = (finish or start_pairs(topk, rounding, training=training))(pairs_E, capacity)
    received = max_received(rounding, T, K, training=training)
    return RoutedPairs(topk.topk_ids_TK, *lists, counts, limit, received)
