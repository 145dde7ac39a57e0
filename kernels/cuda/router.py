"""The router's operations as Triton kernels: the module that kernels/router.py describes."""

from sonic_ep.kernels.cuda.router_choice import choose
from sonic_ep.kernels.cuda.router_outputs import gates_of_pairs, logits_gradient, losses

__all__ = ["choose", "gates_of_pairs", "logits_gradient", "losses"]
