"""Finds a framework's activation among ours, by comparing values.

Names do not tell activations apart: a framework has several functions with the same values, a program may pass a
function of its own, and a config has its own alpha and limit. So the framework's function is called on a few numbers.

Legend: P rows of the pair buffer, I expert width, J pre-activation columns (2I if gated else I).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sonic_ep.kernels.experts.activations import ACTIVATIONS

# Small values tell the curves apart, large ones a limit. The largest is far above any published limit.
_VALUES = (-1000.0, -60.0, -15.0, -9.0, -7.5, -3.0, -1.0, -0.3, 0.0, 0.1, 0.8, 2.0, 5.0, 7.5, 9.0, 15.0, 60.0, 1000.0)
# A function may compute in fp32. The nearest two curves, GELU and its tanh approximation, differ by 5e-4.
_RTOL, _ATOL = 1e-5, 1e-6


@torch.no_grad()
def activation_like(theirs: Callable[[Tensor], object], *, gated: bool) -> str | None:
    """Returns the name of our activation (ACTIVATIONS) that has the values of `theirs`, or None.

    theirs: from float64 (P, J) on the CPU, gate and up columns in turns if gated, to (P, I).
    """
    values = torch.tensor(_VALUES, dtype=torch.float64, device="cpu")
    h_PJ = torch.cartesian_prod(values, values) if gated else values[:, None]
    found = theirs(h_PJ)
    if not isinstance(found, Tensor) or found.shape != (h_PJ.shape[0], 1):
        return None
    scale = 1 + h_PJ[:, 1:].abs().sum(1, keepdim=True)  # of up, which multiplies an error of the curve
    for name, ours in ACTIVATIONS.items():
        if ours.gated == gated and torch.allclose(ours.forward(h_PJ) / scale, found.to(h_PJ) / scale, _RTOL, _ATOL):
            return name
    return None
