"""The whole routing of a layer as one differentiable function, where kernels compute it: logits, top-K, the group's
counts, routed pairs, weights and losses.

Saved for backward are x, the router's weight, the logits, and the lists of pairs. Elsewhere the same steps are separate
operations of autograd (linear.py, topk.py, weights_and_losses.py).

Legend: T tokens on this rank, H hidden size, E experts, N pairs this rank sends.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig, RouterConfig
from sonic_ep.first_order import Context, first_order
from sonic_ep.kernels.backend import router_linear, router_operations
from sonic_ep.kernels.batch_invariant.linear import LinearInBlocks
from sonic_ep.kernels.route.interface import LossGradient, PairGradients, RouterLinear, RouterOperations
from sonic_ep.routers.linear import DTYPES_OF_KERNELS, linear_gradients
from sonic_ep.routers.route import RoutingContext, decide_pairs
from sonic_ep.routers.topk import TopK, fused_topk
from sonic_ep.routers.weights_and_losses import fused_weights_and_losses
from sonic_ep.routing import RoutedPairs

_Call = tuple[RouterLinear, RouterOperations, RouterConfig]


@dataclass(slots=True)
class FusedRoute:
    """One routing. kernels: of `kernels_of_route`. topk, pairs: results without a gradient, once it has been called.

    router, context: see `decide_pairs`. expert_bias_E: (E,) or None. sequence_length: see `Router.forward`.
    """

    router: object
    kernels: tuple[RouterLinear, RouterOperations]
    expert_bias_E: Tensor | None
    context: RoutingContext
    sequence_length: int
    topk: TopK | None = None
    pairs: RoutedPairs | None = None

    def __call__(self, x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (N,) weights_N, the () loss, and x_TH for `moe`, whose gradient may be overwritten. A collective."""
        weights_N, loss, passed_TH = _FusedRoute.apply(x_TH, weight_EH, bias_E, self)
        return weights_N, loss, passed_TH if x_TH.requires_grad else x_TH


def kernels_of_route(
    x_TH: Tensor, weight_EH: Tensor, config: MoEConfig
) -> tuple[RouterLinear, RouterOperations] | None:
    """Returns the kernels for these rows and the router's weight, or None where separate operations route."""
    if (
        config.router.linear_dtype == "input"
        or weight_EH.dtype not in DTYPES_OF_KERNELS
        or (linear := router_linear(x_TH)) is None
    ):
        return None
    operations = router_operations(x_TH.device, torch.float32, config.K)
    linear = LinearInBlocks(linear) if config.batch_invariant else linear
    return None if operations is None else (linear, operations)


class _FusedRoute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context[_Call], x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, call: FusedRoute
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = call.context.config
        linear, operations = call.kernels
        logits_TE = linear.logits(x_TH, weight_EH, bias_E)
        topk = fused_topk(operations, logits_TE, call.expert_bias_E, config.K, config.router)
        if call.context.expert_ids_TK is not None:
            topk = topk.with_given(call.context.expert_ids_TK)
        pairs = decide_pairs(call.router, topk, call.context)
        if pairs.topk_ids_TK is not topk.topk_ids_TK:  # replayed
            topk = topk.with_ids(pairs.topk_ids_TK)
        weights_N, losses = fused_weights_and_losses(
            operations, logits_TE, topk.scores_TE, pairs, call.sequence_length, config.router
        )
        ctx.save_for_backward(
            x_TH, weight_EH, logits_TE, pairs.topk_ids_TK, pairs.token_ids_N, pairs.expert_ids_N, losses.dshares_BE
        )
        ctx.call = linear, operations, config.router
        ctx.set_materialize_grads(False)
        call.topk, call.pairs = topk, pairs
        return weights_N, losses.value, x_TH

    @staticmethod
    @first_order
    def backward(ctx: Context[_Call], *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dweights_N, dloss, dx_others_TH = grad_outputs
        if dweights_N is None and dloss is None:
            return dx_others_TH, None, None, None
        x_TH, weight_EH, logits_TE, topk_ids_TK, token_ids_N, expert_ids_N, dshares_BE = ctx.saved_tensors
        linear, operations, config = ctx.call
        pairs = None if dweights_N is None else PairGradients(token_ids_N, expert_ids_N, dweights_N)
        loss = None if dloss is None else LossGradient(dloss, dshares_BE)
        dlogits_TE = operations.logits_gradient(logits_TE, topk_ids_TK, pairs, loss, config)
        return *linear_gradients(linear, ctx.needs_input_grad, dlogits_TE, x_TH, weight_EH, dx_others_TH), None
