"""The bias update of auxiliary-loss-free load balancing. It counts the top-K of each token, before rounding.

The balance losses are in kernels/route/weights_and_losses/reference.py.

Legend: B sequences, L tokens of a sequence, T tokens on this rank, E experts, K experts per token, S ranks of the EP
group.
"""

import torch
from torch import Tensor


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """Returns the (E,) bias after one step: plus `rate` for an expert below the mean count, minus `rate` above it.

    Source: auxiliary-loss-free load balancing, arXiv 2408.15664, algorithm 1.
    """
    counts_E = counts_E.to(torch.float64)
    return bias_E + rate * torch.sign(counts_E.mean() - counts_E).to(bias_E.dtype)
