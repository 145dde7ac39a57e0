"""The routing of a top-K that somebody else's router has chosen: the counts of all ranks, this rank's pairs, weights.
Rounded or not.

Source of rounding: SonicMoE, arXiv 2512.14080, section 5; docs/token_rounding.md.

Legend: S ranks of the EP group, T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig, RoundingConfig, RouterConfig
from sonic_ep.first_order import Context, first_order
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.kernels.backend import count_topk, in_slots, in_two_tables, pairs_with_weights, weights_of_rounded
from sonic_ep.kernels.route.topk_pairs.reference import EPSILON
from sonic_ep.routers.count_exchange import RankStatus, gather_counts
from sonic_ep.routers.route import RoutingContext, decide_pairs
from sonic_ep.routers.topk import TopK
from sonic_ep.routing import AsyncSplitSizes, GroupCounts, unrounded

_OFF = RoundingConfig(mode="off")
_Table = tuple[torch.Size, torch.dtype]
_Tables = tuple[torch.Size, torch.dtype, torch.Size]


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

    def counts(
        self, counts_E: Tensor, num_tokens: int, tokens_1: Tensor | None = None
    ) -> tuple[GroupCounts, AsyncSplitSizes | None]:
        """Returns what `gather` does, on one rank without an exchange. tokens_1: (1,) int64, `num_tokens`, if known.

        Raises ValueError for `problem`.
        """
        if self.group.size > 1:
            return self.gather(counts_E, num_tokens)
        if self.problem is not None:
            raise ValueError(self.problem)
        tokens_1 = counts_E.new_full((1,), num_tokens) if tokens_1 is None else tokens_1
        return unrounded(counts_E.as_strided((1, counts_E.shape[0]), (counts_E.shape[0], 1)), tokens_1), None

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


class RoutedTopK(NamedTuple):
    """The pairs of a top-K, see TopKPairs, and the counts of all ranks. weights_N: without a gradient. chosen: the ids
    or the map that they come from."""

    weights_N: Tensor
    slots_N: Tensor
    token_ids_N: Tensor
    counts: GroupCounts
    split_sizes: AsyncSplitSizes | None
    chosen: Tensor


def route_topk(chosen: Tensor, weights: Tensor, E: int, K: int, call: RouterCall) -> RoutedTopK:
    """Returns the pairs of a top-K, and the counts of all ranks. A collective.

    Shapes:  see `pairs_with_weights`. Raises what `RouterCall.gather` raises.
    """
    counts_E, tokens_1, token_ids_N, slots_N, weights_N = pairs_with_weights(chosen, weights, E, K)
    counts, split_sizes = call.counts(counts_E, chosen.shape[0], tokens_1)
    return RoutedTopK(weights_N, slots_N, token_ids_N, counts, split_sizes, chosen)


class WeightsOfPairs(torch.autograd.Function):
    """Returns the weights of pairs, which are computed already, as a function of the table that they come from."""

    @staticmethod
    def forward(ctx: Context[_Table], weights: Tensor, weights_N: Tensor, slots_N: Tensor) -> Tensor:
        ctx.save_for_backward(slots_N)
        ctx.call = weights.shape, weights.dtype
        return weights_N.detach()

    @staticmethod
    @first_order
    def backward(ctx: Context[_Table], *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slots_N,) = ctx.saved_tensors
        return in_slots(grad_outputs[0], slots_N, *ctx.call), None, None


@dataclass(frozen=True, slots=True)
class Added:
    """The weight of a pair that rounding adds: `scale` times its score, divided by the sum of the token's top-K scores
    if `divides`."""

    scale: float
    divides: bool

    @classmethod
    def by(cls, config: RouterConfig, scale: float = 1.0) -> Self:
        """Returns that of a router with this config, see `weights_of_pairs`. scale: a further factor."""
        return cls(scale * config.scale, config.renormalize and config.score == "sigmoid")


class GivenTopK(NamedTuple):
    """What a framework's router gives for rounding. scores_TE, allowed_TE: see TopK. by_expert: whether the weights are
    (T, E), else (T, K) like the ids."""

    topk_ids_TK: Tensor
    weights: Tensor
    scores_TE: Tensor
    allowed_TE: Tensor | None
    by_expert: bool = False


def round_topk(router: object, given: GivenTopK, added: Added, config: MoEConfig, call: RouterCall) -> RoutedTopK:
    """Rounds a top-K, and returns its pairs and the counts of all ranks. A collective; see `decide_pairs`.

    Not differentiable. router: the module, for replay under activation checkpointing.
    """
    counts_E, tokens_1 = count_topk(given.topk_ids_TK, config.E)
    context = call.context(config, given.topk_ids_TK if call.has_given_experts else None)
    scores_TE = given.scores_TE
    topk = TopK(scores_TE, scores_TE, given.allowed_TE, given.topk_ids_TK, counts_E, tokens_1=tokens_1)
    pairs = decide_pairs(router, topk, context)
    weights_N, slots_N = weights_of_rounded(
        pairs, given.weights, scores_TE, by_expert=given.by_expert, scale=added.scale, divides=added.divides
    )
    return RoutedTopK(weights_N, slots_N, pairs.token_ids_N, pairs.counts, pairs.split_sizes, pairs.topk_ids_TK)


class WeightsOfRounded(torch.autograd.Function):
    """Returns the weights of rounded pairs, likewise, as a function of the table of weights and of the scores."""

    @staticmethod
    def forward(
        ctx: Context[tuple[_Tables, Added]],
        weights: Tensor,
        scores_TE: Tensor,
        topk_ids_TK: Tensor,
        weights_N: Tensor,
        slots_N: Tensor,
        added: Added,
    ) -> Tensor:
        ctx.save_for_backward(slots_N, *((scores_TE, topk_ids_TK) if added.divides else (None, None)))
        ctx.call = (weights.shape, weights.dtype, scores_TE.shape), added
        return weights_N.detach()

    @staticmethod
    @first_order
    def backward(ctx: Context[tuple[_Tables, Added]], *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        slots_N, scores_TE, topk_ids_TK = ctx.saved_tensors
        tables, added = ctx.call
        dweights, dscores_TE = in_two_tables(grad_outputs[0], slots_N, *tables)
        if added.scale != 1:
            dscores_TE *= added.scale
        if added.divides:
            assert scores_TE is not None
            assert topk_ids_TK is not None
            sums_T1 = scores_TE.gather(1, topk_ids_TK).sum(1, keepdim=True) + EPSILON
            dscores_TE /= sums_T1
            dsums_T1 = -(dscores_TE * scores_TE).sum(1, keepdim=True) / sums_T1
            dscores_TE.scatter_add_(1, topk_ids_TK, dsums_T1.expand_as(topk_ids_TK))
        return dweights, dscores_TE, None, None, None, None
