"""Combine weights of the routed pairs and the auxiliary losses, in plain torch: the CPU path, the twin of triton.py.

Autograd differentiates them. The losses count the top-K of each token, before rounding.

Legend: B sequences, L tokens of a sequence, T tokens on this rank, E experts, K experts per token, N pairs this rank
sends, S ranks of the EP group.
"""

from torch import Tensor

from sonic_ep.config import RouterConfig
from sonic_ep.kernels.route.topk.reference import times_chosen, topk_mask
from sonic_ep.routing import BalanceCounts


def weights_of_pairs(
    scores_TE: Tensor,
    topk_ids_TK: Tensor,
    token_ids_N: Tensor,
    expert_ids_N: Tensor,
    chosen_N: Tensor,
    config: RouterConfig,
) -> Tensor:
    """Returns (N,) combine weights, in the dtype of the scores and differentiable.

    A pair in the token's top-K has exactly its plain top-K weight: its score, divided by the sum of the token's K
    scores if `config.renormalize`. A pair that rounding added has its own score; sigmoid scores are divided by the same
    sum, because the pair would outweigh the top-K otherwise. Softmax scores are already shares of one. All weights are
    multiplied by `config.scale`. The weight of a spare entry (token -1) is undefined.
    Source: SonicMoE, arXiv 2512.14080, section 5.

    Shapes:  scores_TE (T, E); topk_ids_TK (T, K) int64; token_ids_N, expert_ids_N (N,) integers; chosen_N (N,) bool,
             True for pairs of the top-K.
    Example: one token; experts 0 and 1 are its top 2, rounding added expert 2.

        >>> import torch
        >>> from sonic_ep.config import RouterConfig
        >>> from sonic_ep.kernels.route.weights_and_losses.reference import weights_of_pairs
        >>> scores_TE, topk_ids_TK = torch.tensor([[0.375] + [0.125] * 5]), torch.tensor([[0, 1]])
        >>> tokens_N, experts_N, chosen_N = torch.tensor([[0, 0, 0], [0, 1, 2], [True, True, False]])
        >>> weights_of_pairs(scores_TE, topk_ids_TK, tokens_N, experts_N, chosen_N.bool(), RouterConfig()).tolist()
        [0.75, 0.25, 0.125]
    """
    # A spare entry has token -1. Any index is good enough, because its weight is never used.
    pairs_N = (token_ids_N.long() * scores_TE.shape[1] + expert_ids_N).clamp(min=0)
    weights_N = scores_TE.reshape(-1).index_select(0, pairs_N)
    if config.renormalize:
        # All K scores can underflow to 0, with an expert bias or sigmoid scores. DeepSeek adds the same epsilon.
        sums_T1 = scores_TE.gather(1, topk_ids_TK).sum(1, keepdim=True) + 1e-20
        # We divide before the gather: pairs are distinct, so its backward never adds two gradients atomically.
        divided_N = (scores_TE / sums_T1).reshape(-1).index_select(0, pairs_N)
        if config.score == "softmax":
            divided_N = divided_N.where(chosen_N, weights_N)
        weights_N = divided_N
    return weights_N * config.scale if config.scale != 1 else weights_N


def balance_loss(
    scores_TE: Tensor, balance_counts: BalanceCounts, sequence_length: int, config: RouterConfig
) -> Tensor:
    """Returns the () load-balancing loss balance_coef * E * sum_e f_e P_e.

    P_e is the mean score of expert e over the tokens; sigmoid scores are first divided by their sum over the experts.
    f_e is the share of expert e among the K experts of highest score of the tokens, without expert bias or group
    limits. With `config.balance` "sequence", f_e and P_e are of one sequence, and the loss is the mean over sequences.
    With "batch" f_e is of this rank's tokens, with "global" of the whole EP group. At perfect balance the sum times E
    is 1. The counts carry no gradient. Returns 0 for balance "none" or T = 0.
    Source: Switch (arXiv 2101.03961, eq. 4), DeepSeek-V3 (arXiv 2412.19437, eq. 17-20), global-batch counts as in arXiv
    2501.11873.

    Example: two tokens prefer expert 0, so f = [1, 0], P = [0.75, 0.25], and the loss is 2 * 0.75.

        >>> import torch
        >>> from sonic_ep.config import RouterConfig
        >>> from sonic_ep.kernels.route.weights_and_losses.reference import balance_loss
        >>> from sonic_ep.routing import BalanceCounts
        >>> scores_TE, counts = torch.tensor([[0.75, 0.25]] * 2), BalanceCounts(torch.zeros(2, 1).long(), None)
        >>> balance_loss(scores_TE, counts, 2, RouterConfig(balance="batch", balance_coef=1.0)).tolist()
        1.5
    """
    (T, E), K = scores_TE.shape, balance_counts.ids_TK.shape[1]
    if config.balance == "none" or T == 0:
        return scores_TE[:0].sum()
    shares_TE = scores_TE
    if config.score == "sigmoid":
        shares_TE = shares_TE / (shares_TE.sum(1, keepdim=True) + 1e-20)
    if config.balance == "sequence":
        B = T // sequence_length
        chosen_BE = topk_mask(balance_counts.ids_TK, E).view(B, sequence_length, E).sum(1)
        load_BE = chosen_BE.to(shares_TE.dtype) / (sequence_length * K)
        mean_BE = shares_TE.view(B, sequence_length, E).mean(1)
        return config.balance_coef * E * (load_BE * mean_BE).sum() / B
    if config.balance == "batch":
        load_E = times_chosen(balance_counts.ids_TK, E).to(shares_TE.dtype) / (T * K)
    else:
        total_E = balance_counts.times_SE.sum(0)
        load_E = total_E.to(shares_TE.dtype) / total_E.sum()
    return config.balance_coef * E * (load_E * shares_TE.mean(0)).sum()


def z_loss(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """Returns the () z-loss: z_loss_coef * mean over tokens of logsumexp(logits)^2. Returns 0 for T = 0.

    Source: ST-MoE, arXiv 2202.08906, eq. 5.
    Example: the logsumexp of two zeros is ln 2, its square 0.4805.

        >>> import torch
        >>> from sonic_ep.config import RouterConfig
        >>> from sonic_ep.kernels.route.weights_and_losses.reference import z_loss
        >>> round(z_loss(torch.zeros(3, 2), RouterConfig(z_loss_coef=1.0)).tolist(), 4)
        0.4805
    """
    if config.z_loss_coef == 0 or logits_TE.shape[0] == 0:
        return logits_TE[:0].sum()
    return config.z_loss_coef * logits_TE.logsumexp(dim=1).square().mean()
