"""The router's operations as Triton kernels: the module that kernels/router.py describes."""

from sonic_ep.kernels.cuda.router_choice import compute_topk
from sonic_ep.kernels.cuda.router_outputs import logits_gradient, losses, weights_of_pairs

__all__ = ["compute_topk", "weights_of_pairs", "logits_gradient", "losses"]
