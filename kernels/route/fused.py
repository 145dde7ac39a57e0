"""The router's operations as Triton kernels: the module that kernels/route/interface.py describes."""

from sonic_ep.kernels.route.topk.triton import compute_topk
from sonic_ep.kernels.route.weights_and_losses.triton import logits_gradient, losses, weights_of_pairs

__all__ = ["compute_topk", "weights_of_pairs", "logits_gradient", "losses"]
