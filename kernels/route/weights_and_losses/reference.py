"""Combine weights of the selected pairs and the auxiliary losses, differentiated by autograd: the CPU path, and the
twin of triton.py beside it. The losses count top-K choices, before rounding.

Legend: B sequences, L tokens of a sequence, T tokens on this rank, E experts, K experts per token, N pairs this rank
sends, S ranks of the EP group.
"""

import torch
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
    """(N,) combine weights, differentiable. Anything for a spare entry.

    A chosen pair weighs exactly what plain top-K gives it. A pair that rounding added weighs its own score; under
    sigmoid scores divided by the token's top-K sum like the chosen ones, else it would outweigh them (softmax scores
    are already shares of one). Source: SonicMoE, arXiv 2512.14080, section 5.
    """
    # A spare entry has token -1; its weight is never used.
    pairs_N = (token_ids_N.long() * scores_TE.shape[1] + expert_ids_N).clamp(min=0)
    weights_N = scores_TE.reshape(-1).index_select(0, pairs_N)
    if config.renormalize:
        # All chosen scores can underflow, under a bias or a sigmoid; DeepSeek adds the same epsilon.
        sums_T1 = scores_TE.gather(1, topk_ids_TK).sum(1, keepdim=True) + 1e-20
        # Divided before they are read: pairs are distinct, so no two gradients meet in an atomic addition.
        divided_N = (scores_TE / sums_T1).reshape(-1).index_select(0, pairs_N)
        weights_N = divided_N if config.score == "sigmoid" else torch.where(chosen_N, divided_N, weights_N)
    return weights_N * config.scale if config.scale != 1 else weights_N


def balance_loss(
    scores_TE: Tensor, balance_counts: BalanceCounts, sequence_length: int, config: RouterConfig
) -> Tensor:
    """() load-balancing loss E * sum_e f_e P_e, already weighted by `balance_coef`.

    P_e is the mean of expert e's score (sigmoid scores divided by their sum over the experts), f_e its share of the
    tokens' K experts of highest score, whatever an expert bias or group limits make of them: of each sequence
    ("sequence", mean over sequences), of this rank's tokens ("batch") or of the whole EP group's ("global"). 1 at
    perfect balance. The counts carry no gradient.
    Source: Switch (arXiv 2101.03961, eq. 4), DeepSeek-V3 (arXiv 2412.19437, eq. 17-20), global-batch counts as in arXiv
    2501.11873.
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
    """() mean squared logsumexp of the logits, weighted by `z_loss_coef`. Source: ST-MoE, arXiv 2202.08906, eq. 5."""
    if config.z_loss_coef == 0 or logits_TE.shape[0] == 0:
        return logits_TE[:0].sum()
    return config.z_loss_coef * logits_TE.logsumexp(dim=1).square().mean()
