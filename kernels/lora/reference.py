"""The gradients that a low-rank update of W2 adds to activations, in plain torch: the CPU path and the oracle.

The GEMM of kernels/experts/ that computes dH applies the activation's derivative to the product with W2 alone. This
operation adds the update's share. Half-precision operands are computed in fp32 and rounded once on output. It writes
to its arguments, row by row: rows behind the last expert's hold no values before and after.

Legend: P rows of the pair buffer, J pre-activation columns (2I if gated else I), I expert width, Z partial sums of one
value. Gate and up are interleaved, see kernels/experts/activations.py.
"""

import torch
from torch import Tensor

from sonic_ep.kernels.experts.activations import Activation


def _up(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def add_hidden_grads(
    dh_PJ: Tensor, ds_PZ: Tensor, h_PJ: Tensor, da_PI: Tensor, weights_P: Tensor, activation: Activation
) -> None:
    """Adds act'(H) (s dA') to dH and <dA', A> to the first partial sum of dS, in place, with s = `weights_P`.

    dA' is what a low-rank update of W2 adds to dO W2. dH and dS are linear in it, and A' does not depend on it.

    Shapes:  dh_PJ and h_PJ (P, J), ds_PZ (P, Z), da_PI (P, I), weights_P (P,).
    Example:

        >>> import torch
        >>> from sonic_ep.kernels.experts.activations import activation_named
        >>> from sonic_ep.kernels.lora.reference import add_hidden_grads
        >>> dh, ds = torch.tensor([[1.0]]), torch.tensor([[1.0]])
        >>> h, da, s = torch.tensor([[3.0]]), torch.tensor([[2.0]]), torch.tensor([0.5])
        >>> add_hidden_grads(dh, ds, h, da, s, activation_named("relu2"))
        >>> dh.tolist(), ds.tolist()
        ([[7.0]], [[19.0]])
    """
    h, da = _up(h_PJ), _up(da_PI)
    ds_PZ[:, 0] += (da * activation.forward(h)).sum(1).to(ds_PZ.dtype)
    dh_PJ.copy_(_up(dh_PJ) + activation.backward(_up(weights_P)[:, None] * da, h))
