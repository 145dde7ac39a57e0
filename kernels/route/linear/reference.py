"""The router's linear layer as one GEMM in the dtype of the weight: the CPU path, and the twin of triton.py.

The contract is RouterLinear (kernels/route/interface.py), except for dtypes and error bounds: any dtype is allowed, and
the error is the error of torch's GEMM.

Legend: T tokens on this rank, H hidden size, E experts.
"""

import torch.nn.functional as F
from torch import Tensor


def logits(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None) -> Tensor:
    """Returns x weight^T + bias: (T, E) logits in the dtype of the weight.

    Shapes:  x_TH (T, H), cast to that dtype; weight_EH (E, H); bias_E (E,) in the dtype of the weight.
    Example: one token, two experts.

        >>> import torch
        >>> from sonic_ep.kernels.route.linear.reference import logits
        >>> weight_EH, bias_E = torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.5, 0.0])
        >>> logits(torch.tensor([[1.0, 2.0]]), weight_EH, bias_E).tolist()
        [[11.5, 17.0]]
    """
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
    """Returns the gradients of x and of the weight: each None unless `of_x` or `of_weight` asks for it.

    dx_others_TH: another gradient of x. The gradient of x is added to it in place. Allowed only if the weight has the
    dtype of x.

    Shapes:  the gradients (T, H) in the dtype of x and (E, H) in the dtype of dlogits_TE (T, E).
    Example: only expert 0 has a gradient.

        >>> import torch
        >>> from sonic_ep.kernels.route.linear.reference import gradients
        >>> x_TH, weight_EH = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
        >>> dx_TH, dw_EH = gradients(torch.tensor([[1.0, 0.0]]), x_TH, weight_EH, of_x=True, of_weight=True)
        >>> dx_TH.tolist(), dw_EH.tolist()
        ([[3.0, 4.0]], [[1.0, 2.0], [0.0, 0.0]])
    """
    dx_TH = None
    if of_x and dx_others_TH is not None:
        dx_TH = dx_others_TH.addmm_(dlogits_TE, weight_EH)
    elif of_x:
        dx_TH = (dlogits_TE @ weight_EH).to(x_TH.dtype)
    return dx_TH, dlogits_TE.T @ x_TH.to(dlogits_TE.dtype) if of_weight else None
