"""The differentiable part of routing: combine weights of the pairs and auxiliary losses. Fused where kernels exist.

With kernels, one kernel computes the whole gradient of the logits, and the logits are the only (T, E) tensor saved for
backward.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends, B sequences.
"""

import torch
from torch import Tensor

from sonic_ep.config import RouterConfig
from sonic_ep.first_order import Context, first_order
from sonic_ep.kernels.backend import router_operations
from sonic_ep.kernels.route.interface import Losses, LossGradient, PairGradients, RouterOperations
from sonic_ep.kernels.route.weights_and_losses.reference import balance_loss, weights_of_pairs, z_loss
from sonic_ep.routers.topk import TopK
from sonic_ep.routing import BalanceCounts, RoutedPairs

_ForBackward = tuple[RouterConfig, RouterOperations]


def weights_and_losses(
    logits_TE: Tensor,
    topk: TopK,
    pairs: RoutedPairs,
    sequence_length: int,
    config: RouterConfig,
) -> tuple[Tensor, Tensor]:
    """Returns (N,) combine weights of the pairs, and the () weighted sum of balance loss and z-loss.

    kernels/route/weights_and_losses/reference.py defines them. topk: of these logits, with the experts of
    `pairs.topk_ids_TK`.
    """
    operations = router_operations(logits_TE.device, logits_TE.dtype, pairs.topk_ids_TK.shape[1])
    if operations is None or logits_TE.shape[0] == 0:
        lists = pairs.topk_ids_TK, pairs.token_ids_N, pairs.expert_ids_N, pairs.chosen_N
        weights_N = weights_of_pairs(topk.scores_TE, *lists, config)
        balance = balance_loss(topk.scores_TE, _balance_counts(pairs), sequence_length, config)
        return weights_N, balance + z_loss(logits_TE, config)
    scores_TE = topk.scores_TE.detach()
    return _WeightsAndLosses.apply(logits_TE, operations, scores_TE, pairs, sequence_length, config)


def _balance_counts(pairs: RoutedPairs) -> BalanceCounts:
    return pairs.balance_counts or BalanceCounts(pairs.topk_ids_TK, pairs.counts.chosen_SE)


def fused_weights_and_losses(
    operations: RouterOperations,
    logits_TE: Tensor,
    scores_TE: Tensor,
    pairs: RoutedPairs,
    sequence_length: int,
    config: RouterConfig,
) -> tuple[Tensor, Losses]:
    """Returns the same by kernels, without gradients."""
    lists = pairs.topk_ids_TK, pairs.token_ids_N, pairs.expert_ids_N
    weights_N = operations.weights_of_pairs(scores_TE, *lists, config)
    if config.balance == "none" and config.z_loss_coef == 0:
        return weights_N, Losses(logits_TE.new_zeros(()), None)
    B = logits_TE.shape[0] // sequence_length if config.balance == "sequence" else 1
    return weights_N, operations.losses(logits_TE, *_balance_counts(pairs), B, config)


class _WeightsAndLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context[_ForBackward],
        logits_TE: Tensor,
        operations: RouterOperations,
        scores_TE: Tensor,
        pairs: RoutedPairs,
        sequence_length: int,
        config: RouterConfig,
    ) -> tuple[Tensor, Tensor]:
        weights_N, losses = fused_weights_and_losses(operations, logits_TE, scores_TE, pairs, sequence_length, config)
        ctx.save_for_backward(logits_TE, pairs.topk_ids_TK, pairs.token_ids_N, pairs.expert_ids_N, losses.dshares_BE)
        ctx.call = config, operations
        ctx.set_materialize_grads(False)
        return weights_N, losses.value

    @staticmethod
    @first_order
    def backward(ctx: Context[_ForBackward], *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dweights_N, dloss = grad_outputs
        logits_TE, topk_ids_TK, token_ids_N, expert_ids_N, dshares_BE = ctx.saved_tensors
        config, operations = ctx.call
        pairs = None if dweights_N is None else PairGradients(token_ids_N, expert_ids_N, dweights_N)
        loss = None if dloss is None else LossGradient(dloss, dshares_BE)
        return operations.logits_gradient(logits_TE, topk_ids_TK, pairs, loss, config), *[None] * 5
