"""The router's linear layer: logits in fp32 at least, without TF32, on tensor cores where they can be that exact.

A bf16 row times fp32 weights needs no fp32 arithmetic: kernels/router.py states how it is done and the error.

Legend: T tokens, H hidden size, E experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sonic_ep.kernels.operations import router_linear
from sonic_ep.kernels.router import RouterLinear


def linear(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None) -> Tensor:
    """(T, E) x weight^T + bias in fp32, or in float64 for float64 x, whatever autocast says."""
    dtype = torch.promote_types(x_TH.dtype, torch.float32)
    weight_EH, bias_E = weight_EH.to(dtype), None if bias_E is None else bias_E.to(dtype)
    operations = router_linear(x_TH)
    if operations is not None:
        return _SplitLinear.apply(x_TH, weight_EH, bias_E, operations)
    with torch.autocast(x_TH.device.type, enabled=False):
        return F.linear(x_TH.to(dtype), weight_EH, bias_E)


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, operations: RouterLinear) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EH)
        ctx.operations = operations
        return operations.logits(x_TH, weight_EH, bias_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dlogits_TE,) = grad_outputs
        x_TH, weight_EH = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        with torch.autocast(x_TH.device.type, enabled=False):
            dx_TH, dweight_EH = ctx.operations.gradients(dlogits_TE, x_TH, weight_EH, of_x=of_x, of_weight=of_weight)
        return dx_TH, dweight_EH, dlogits_TE.sum(0) if of_bias else None, None
