"""The router's linear layer as one GEMM in the dtype of the weight: the CPU path, and the twin of triton.py beside it.

The contract of RouterLinear (kernels/route/interface.py) but for its bounds.

Legend: T tokens on this rank, H hidden size, E experts.
"""

import torch.nn.functional as F
from torch import Tensor


def logits(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None) -> Tensor:
    """Returns (T, E) logits in the dtype of the weight."""
    return F.linear(x_TH.to(weight_EH.dtype), weight_EH, bias_E)


def gradients(
    dlogits_TE: Tensor,
    x_TH: Tensor,
    weight_EH: Tensor,
    *,
    of_x: bool,
    of_weight: bool,
    dx_others_TH: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of x and of the weight, None where not asked for.

    dx_others_TH: another gradient of x, to which this one is added in place; only where the weight has the dtype of x.
    """
    dx_TH = None
    if of_x and dx_others_TH is not None:
        dx_TH = dx_others_TH.addmm_(dlogits_TE, weight_EH)
    elif of_x:
        dx_TH = (dlogits_TE @ weight_EH).to(x_TH.dtype)
    return dx_TH, dlogits_TE.T @ x_TH.to(dlogits_TE.dtype) if of_weight else None
