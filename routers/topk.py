"""Token-choice routing: from logits to scores and plain top-K.

Legend: T tokens on this rank, E experts, K experts per token, g expert groups, N pairs this rank sends.
"""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from sonic_ep.config import RouterConfig
from sonic_ep.first_order import Context, first_order
from sonic_ep.kernels.backend import router_operations
from sonic_ep.kernels.route.interface import RouterOperations, TopK, entropy_of
from sonic_ep.kernels.route.topk.reference import experts_of_best_groups, scores_of, top_experts


def counts_by_score(config: RouterConfig) -> bool:
    """Returns True if the balance loss counts the top-K by score alone, without expert bias and group limits.

    The bias and the limits balance the top-K themselves. With their counts the loss would have no effect on the scores.
    Source: DeepSeek-V3 (arXiv 2412.19437, eq. 18), Megatron-Core's compute_routing_scores_for_aux_loss.
    """
    return config.balance != "none" and (config.expert_bias or config.num_groups > 1)


def compute_topk(logits_TE: Tensor, expert_bias_E: Tensor | None, K: int, config: RouterConfig) -> TopK:
    """Returns each token's K experts of highest score plus bias, among the experts of its best groups.

    Shapes:  logits_TE (T, E) floating point; expert_bias_E (E,) or None.
    Source:  group limits and bias as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2). The bias affects only which
             experts are in the top-K, not the combine weights.
    """
    fused = router_operations(logits_TE.device, logits_TE.dtype, K)
    if fused is not None:
        topk = fused_topk(fused, logits_TE.detach(), expert_bias_E, K, config)
        return replace(topk, scores_TE=_Scores.apply(logits_TE, topk.scores_TE, config.score == "softmax"))
    scores_TE = scores_of(logits_TE, config)
    ranking_TE = scores_TE.detach() if expert_bias_E is None else scores_TE.detach() + expert_bias_E
    allowed_TE = None if config.num_groups == 1 else experts_of_best_groups(ranking_TE, config)
    is_bad_TE = ~logits_TE.detach().isfinite()
    bad_logits = is_bad_TE.sum() if config.check_logits else None
    entropy_T = entropy_of(scores_TE.detach()).masked_fill(is_bad_TE.any(1), float("nan"))
    topk_ids_TK = top_experts(ranking_TE, allowed_TE, K)
    by_score_TK = top_experts(scores_TE, None, K) if counts_by_score(config) else None
    return TopK(
        scores_TE,
        ranking_TE,
        allowed_TE,
        topk_ids_TK,
        plain_entropy_T=entropy_T,
        bad_logits=bad_logits,
        by_score_TK=by_score_TK,
    )


def fused_topk(
    operations: RouterOperations, logits_TE: Tensor, expert_bias_E: Tensor | None, K: int, config: RouterConfig
) -> TopK:
    """Returns the same by kernels, with scores that have no gradient."""
    topk = operations.compute_topk(logits_TE, expert_bias_E, K, config)
    if not counts_by_score(config):
        return topk
    by_score = operations.compute_topk(logits_TE, None, K, _score_alone(config))
    return replace(topk, by_score_TK=by_score.topk_ids_TK)


@functools.cache
def _score_alone(config: RouterConfig) -> RouterConfig:
    return replace(config, expert_bias=False, num_groups=1, groups_per_token=1, check_logits=False)


class _Scores(torch.autograd.Function):
    """Returns the scores that a kernel computed from the logits. Backward is softmax's or sigmoid's."""

    @staticmethod
    def forward(ctx: Context[bool], logits_TE: Tensor, scores_TE: Tensor, is_softmax: bool) -> Tensor:
        ctx.call = is_softmax
        ctx.save_for_backward(scores_TE)
        return scores_TE.detach()

    @staticmethod
    @first_order
    def backward(ctx: Context[bool], *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (scores_TE,) = ctx.saved_tensors
        (dscores_TE,) = grad_outputs
        if ctx.call:
            return scores_TE * (dscores_TE - (scores_TE * dscores_TE).sum(1, keepdim=True)), None, None
        return dscores_TE * scores_TE * (1 - scores_TE), None, None
