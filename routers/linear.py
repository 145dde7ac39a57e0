"""The router's linear layer: logits in fp32 at least, on tensor cores where these are as accurate.

bf16 rows run on tensor cores, with weights of any dtype; kernels/route/interface.py has the error bound. With
`router.linear_dtype="input"` it is one GEMM in the dtype of x instead. All other rows use torch's GEMM, where
torch.set_float32_matmul_precision decides about TF32.

Legend: T tokens on this rank, H hidden size, E experts.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sonic_ep.config import LinearDtype
from sonic_ep.first_order import Context, first_order
from sonic_ep.kernels.backend import router_linear
from sonic_ep.kernels.batch_invariant.linear import LinearInBlocks
from sonic_ep.kernels.route.interface import RouterLinear
from sonic_ep.kernels.route.linear import reference

# Of weights. FSDP with mixed precision casts them to bf16; to cast them back would be two kernels more.
DTYPES_OF_KERNELS = (torch.float32, torch.bfloat16, torch.float16)


def linear(
    x_TH: Tensor,
    weight_EH: Tensor,
    bias_E: Tensor | None,
    linear_dtype: LinearDtype = "float32",
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns (T, E) logits x weight^T + bias, and x_TH, which the experts should read.

    The logits are fp32, or float64 for float64 x, also under autocast. linear_dtype: with "input", they and their
    gradients are computed in the dtype of x, and the logits are then converted to fp32. batch_invariant: see MoEConfig.

    With kernels or "input", the backward GEMM adds the gradient of the second result to the
    gradient of x in place, before rounding, which saves one pass. So nothing else may hold that gradient. This is true
    for the gradient that `moe` returns.
    """
    dtype, in_dtype_of_x = torch.promote_types(x_TH.dtype, torch.float32), linear_dtype == "input"
    inner = x_TH.dtype if in_dtype_of_x else dtype
    operations = reference if in_dtype_of_x else router_linear(x_TH)
    operations = None if torch.compiler.is_dynamo_compiling() else operations
    if operations in (None, reference) or weight_EH.dtype not in DTYPES_OF_KERNELS:
        weight_EH, bias_E = weight_EH.to(inner), None if bias_E is None else bias_E.to(inner)
    if batch_invariant:
        logits_TE, passed_TH = _Linear.apply(x_TH, weight_EH, bias_E, LinearInBlocks(operations or reference))
        # Gaps between rows, over which no vector of an elementwise function reaches: of the sigmoid, on a CPU.
        logits_TE = pad(logits_TE.to(dtype), (0, 1))[:, :-1]
        return logits_TE, passed_TH if x_TH.requires_grad else x_TH
    if operations is not None:
        logits_TE, passed_TH = _Linear.apply(x_TH, weight_EH, bias_E, operations)
        return logits_TE.to(dtype), passed_TH if x_TH.requires_grad else x_TH
    with torch.autocast(x_TH.device.type, enabled=False):
        return reference.logits(x_TH, weight_EH, bias_E).to(dtype), x_TH


def linear_in_blocks(linear: nn.Linear, x_TH: Tensor) -> Tensor:
    """Returns what `linear` returns for rows x_TH, with bits that do not depend on other rows."""
    weight, bias = (None if each is None else each.to(x_TH.dtype) for each in (linear.weight, linear.bias))
    return _Linear.apply(x_TH, weight, bias, LinearInBlocks(reference))[0]


class _Linear(torch.autograd.Function):
    """Returns the logits, and x itself. Backward adds the gradient of the second to the gradient of x in its GEMM."""

    @staticmethod
    def forward(
        ctx: Context[RouterLinear], x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None, operations: RouterLinear
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TH, weight_EH)
        ctx.call = operations
        ctx.set_materialize_grads(False)
        with torch.autocast(x_TH.device.type, enabled=False):
            return operations.logits(x_TH, weight_EH, bias_E), x_TH

    @staticmethod
    @first_order
    def backward(ctx: Context[RouterLinear], *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dlogits_TE, dx_others_TH = grad_outputs
        if dlogits_TE is None:
            return dx_others_TH, None, None, None
        x_TH, weight_EH = ctx.saved_tensors
        return *linear_gradients(ctx.call, ctx.needs_input_grad, dlogits_TE, x_TH, weight_EH, dx_others_TH), None


def linear_gradients(
    operations: RouterLinear,
    needs: tuple[bool, ...],
    dlogits_TE: Tensor,
    x_TH: Tensor,
    weight_EH: Tensor,
    dx_others_TH: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of x, weight and bias. needs: which of them. dx_others_TH: is added to the first."""
    of_x, of_weight, of_bias = needs[:3]
    dx_others_TH = None if dx_others_TH is None else dx_others_TH.contiguous()
    with torch.autocast(x_TH.device.type, enabled=False):
        dx_TH, dweight_EH = operations.gradients(
            dlogits_TE, x_TH, weight_EH, of_x=of_x, of_weight=of_weight, dx_others_TH=dx_others_TH
        )
    return dx_TH, dweight_EH, dlogits_TE.sum(0) if of_bias else None
