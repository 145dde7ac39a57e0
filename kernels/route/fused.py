"""The router's fused Triton operations, as one module that implements RouterOperations (kernels/route/interface.py)."""

from sonic_ep.kernels.route.topk.triton import compute_topk
from sonic_ep.kernels.route.weights_and_losses.triton import logits_gradient, losses, weights_of_pairs

__all__ = ["compute_topk", "weights_of_pairs", "logits_gradient", "losses"]
