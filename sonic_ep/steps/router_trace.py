"""What the programs of a layer depend on, and how the code of its router is traced, forward and backward.

Legend: T tokens on this rank, H hidden size, E experts, N pairs this rank sends.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import operations_for
from sonic_ep.kernels.experts import reference
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import ExpertWeights
from sonic_ep.kernels.program.trace import Trace, by_torch
from sonic_ep.kernels.route.interface import LossGradient, PairGradients
from sonic_ep.routers.fused import kernels_of_route
from sonic_ep.routers.route import RoutingContext, decide_pairs, pairs_of_one_rank
from sonic_ep.routers.topk import fused_topk
from sonic_ep.routers.weights_and_losses import fused_weights_and_losses
from sonic_ep.routing import RoutedPairs, Routing
from sonic_ep.steps.programs import USUAL_TOKENS, Ranks


@dataclass(frozen=True, eq=False, slots=True)
class Kind:
    """All that the programs of a step depend on, besides sizes. needs: whether x and the present weights need
    gradients. present: which of `LayerWeights` are. router: the dtype of the router's weight, and of its bias.
    """

    config: MoEConfig
    training: bool
    needs: tuple[bool, ...]
    present: tuple[bool, ...]
    dtype: torch.dtype
    router: tuple[torch.dtype, ...]
    device: torch.device
    ranks: Ranks | None = None

    @property
    def usual_sizes(self) -> dict[str, int]:
        """By name: tokens of this rank and of a sequence; on several ranks also the order of backwards; and where
        these are bounded the most tokens of a rank, rows of the pair buffer, and pairs that a rank sends or receives.
        """
        sizes, rows = {"T": USUAL_TOKENS, "L": USUAL_TOKENS}, self.config.K * USUAL_TOKENS
        if self.ranks is not None:
            is_bounded = self.ranks.symmetric is not None and not self.ranks.is_static
            sizes |= {"M": USUAL_TOKENS, "P": rows, "V": rows} if is_bounded else {}
            sizes["order"] = 0
        return sizes

    @property
    def all_needs(self) -> list[bool]:
        """Whether x and each of `LayerWeights` needs a gradient."""
        needs = iter(self.needs)
        return [next(needs), *[is_there and next(needs) for is_there in self.present]]

    def weights_of(self, present: Sequence[Tensor]) -> "LayerWeights":
        """Returns the weights of which these are present."""
        left = iter(present)
        return LayerWeights._make([next(left) if is_there else None for is_there in self.present])


class LayerWeights(NamedTuple):
    """The weights of a layer. Biases are None without one."""

    router: Tensor
    router_bias: Tensor | None
    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None

    @property
    def present(self) -> list[Tensor]:
        return [each for each in self if each is not None]

    @property
    def of_router(self) -> list[Tensor]:
        return [self.router] if self.router_bias is None else [self.router, self.router_bias]

    @property
    def of_experts(self) -> ExpertWeights:
        return ExpertWeights(*self[2:])

    def with_experts_in(self, dtype: torch.dtype) -> Self:
        """Returns these with the experts' weights cast."""
        b1, b2 = (None if each is None else each.to(dtype) for each in self[4:])
        return self._replace(w1=self.w1.to(dtype), w2=self.w2.to(dtype), b1=b1, b2=b2)


@functools.cache
def kernels_compute(dtype: torch.dtype, of_router: torch.dtype, device: torch.device, config: MoEConfig) -> bool:
    """Returns True if kernels compute all of a layer with rows of this dtype, and with such a weight of the router."""
    rows, w2 = (torch.empty(size, dtype=dtype, device=device) for size in ((1, config.d), (1, config.d, config.n)))
    router = torch.empty(config.E, config.d, dtype=of_router, device=device)
    computes = operations_for(rows, w2, activation_named(config.activation))
    return computes is not reference and kernels_of_route(rows, router, config) is not None


class TracedRoute(NamedTuple):
    """A routing of slots. for_backward: what `traced_route_gradients` needs."""

    pairs: RoutedPairs
    routing: Routing
    loss: Tensor
    entropy_T: Tensor
    for_backward: list[Tensor]


def traced_route(
    kind: Kind, x_TH: Tensor, weights: LayerWeights, bias_E: Tensor | None, updates: Tensor | None, L: int
) -> TracedRoute:
    """Returns the routing of slots. bias_E: of the experts, if there is one. updates: see RankStatus.

    L: tokens of a sequence.
    """
    config, ranks, alone = kind.config, kind.ranks, EPGroup.alone()
    kernels = kernels_of_route(x_TH, weights.router, config)
    assert kernels is not None
    linear, operations = kernels
    logits_TE = linear.logits(x_TH, weights.router, weights.router_bias)
    topk = fused_topk(operations, logits_TE, bias_E, config.K, config.router)
    context = RoutingContext(
        config=config,
        group=alone if ranks is None else ranks.group,
        dtype=kind.dtype,
        training=kind.training,
        exchange=None if ranks is None else ranks.transport,
        layer=0 if ranks is None else ranks.layer,
        needs_backward=any(kind.needs),
        bias_updates=updates,
    )
    pairs = pairs_of_one_rank(topk, context, None) if ranks is None else decide_pairs(None, topk, context)
    weights_N, losses = fused_weights_and_losses(operations, logits_TE, topk.scores_TE, pairs, L, config.router)
    for_backward = [logits_TE, pairs.topk_ids_TK, pairs.token_ids_N, pairs.expert_ids_N]
    for_backward += [] if losses.dshares_BE is None else [losses.dshares_BE]
    routing = Routing.of(pairs, weights_N, x_TH.shape[0])
    return TracedRoute(pairs, routing, losses.value, topk.entropy_T(), for_backward)


def traced_route_gradients(
    kind: Kind,
    saved: list[Tensor],
    dweights_N: Tensor,
    dloss: Tensor | None,
    x_TH: Tensor,
    router_EH: Tensor,
    dx_others_TH: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of x, with dx_others_TH and maybe in its memory, of the router's weight and of its bias.

    saved: `TracedRoute.for_backward`; is emptied. needs: which of the three are needed.
    """
    logits_TE, topk_ids_TK, token_ids_N, expert_ids_N, *dshares_BE = saved
    saved.clear()
    of_x, of_weight, of_bias = needs
    kernels = kernels_of_route(x_TH, router_EH, kind.config)
    assert kernels is not None
    linear, operations = kernels
    loss = None if dloss is None else LossGradient(dloss, dshares_BE[0] if dshares_BE else None)
    pairs = PairGradients(token_ids_N, expert_ids_N, dweights_N)
    dlogits_TE = operations.logits_gradient(logits_TE, topk_ids_TK, pairs, loss, kind.config.router)
    dx_TH, drouter_EH = linear.gradients(
        dlogits_TE, x_TH, router_EH, of_x=of_x, of_weight=of_weight, dx_others_TH=dx_others_TH if of_x else None
    )
    dbias_E = by_torch(_sum_of_tokens, (kind.config.E,), torch.float32, dlogits_TE) if of_bias else None
    return dx_TH, drouter_EH, dbias_E


def _sum_of_tokens(dlogits_TE: Tensor) -> Tensor:
    return dlogits_TE.sum(0)


def traced_weights(trace: Trace, kind: Kind) -> LayerWeights:
    """Returns slots for the weights. The code takes slots for tensors."""
    c = kind.config
    J = 2 * c.n if activation_named(c.activation).gated else c.n
    e = c.E if kind.ranks is None else c.E // kind.ranks.group.size
    shapes = (c.E, c.d), (c.E,), (e, J, c.d), (e, c.d, c.n), (e, J), (e, c.d)
    dtypes = kind.router[0], kind.router[-1], *[kind.dtype] * 4
    described = zip(shapes, dtypes, kind.present, strict=True)
    slots = [trace.input(shape, dtype) for shape, dtype, is_there in described if is_there]
    return kind.weights_of(cast(list[Tensor], slots))
