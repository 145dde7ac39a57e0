"""Losses and bias updates that keep experts evenly loaded. All of them count top-K choices, before rounding.

Legend: B sequences, L tokens of a sequence, T tokens on this rank, E experts, K experts per token, S ranks of the EP
group.
"""

import torch
from torch import Tensor


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The bias after one step: up by `rate` where an expert got fewer tokens than the mean, down where more.

    Source: auxiliary-loss-free load balancing, arXiv 2408.15664, algorithm 1.
    """
    counts_E = counts_E.to(torch.float64)
    return bias_E + rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)
