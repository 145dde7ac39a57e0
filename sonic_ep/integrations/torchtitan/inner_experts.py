"""The weights of torchtitan's grouped experts, as `moe` takes them.

Source of the layouts: pytorch/torchtitan, torchtitan/models/common/moe.py and torchtitan/models/gpt_oss/moe.py.

Legend: e local experts, H hidden size, I expert width, J pre-activation columns (2I if gated else I).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from sonic_ep.first_order import Context
from sonic_ep.integrations.framework_experts import Weights

_LIMIT = 7.0  # of the activation swiglu_oai


def problem_with_experts(config: GroupedExperts.Config) -> str | None:
    """Returns why we cannot compute the experts of a config, or None."""
    if type(config) is GptOssGroupedExperts.Config and config.swiglu_limit != _LIMIT:
        return f"swiglu_limit={config.swiglu_limit} is not supported; set it to {_LIMIT}"
    if type(config) in (GroupedExperts.Config, GptOssGroupedExperts.Config):
        return None
    return (
        f"inner_experts is a {type(config).__qualname__}, and sonic_ep computes only GroupedExperts and "
        "GptOssGroupedExperts; remove the converter or the override that makes it, or take sonic_ep out of "
        "override.imports"
    )


def activation_of(experts: GroupedExperts) -> str:
    """Returns the name of the activation among ours."""
    return "swiglu_oai" if isinstance(experts, GptOssGroupedExperts) else "swiglu"


def weights_of(experts: Any, dtype: torch.dtype, tp_size: int) -> tuple[Weights, Tensor | None]:
    """Returns w1, w2, b1, b2 and, if w1 is the gate weights alone, the up weights (e, I, H).

    They are in `dtype`, differentiable, on this rank.

    In the module:  w1_EFD, w3_EFD (e, I, H), w2_EDF (e, H, I); of gpt-oss mlp1_weight_EGD (e, J, H), with gate and up
                    rows in turns, mlp2_weight_EDF (e, H, I), and biases (e, J) and (e, H).
    tp_size:        the number of ranks that each have a slice of I. Their outputs are summed, so each adds its share of
                    the second bias, whose gradient is not divided, because every rank has all of it.
    """
    if isinstance(experts, GptOssGroupedExperts):
        names = "mlp1_weight_EGD", "mlp2_weight_EDF", "mlp1_bias_EG", "mlp2_bias_ED"
        w1, w2, b1, b2 = (_local(experts, name, dtype) for name in names)
        return (w1, w2, b1, _Share.apply(b2, tp_size) if tp_size > 1 else b2), None
    w1, w2, w3 = (_local(experts, name, dtype) for name in ("w1_EFD", "w2_EDF", "w3_EFD"))
    return (w1, w2, None, None), w3


def _local(experts: nn.Module, name: str, dtype: torch.dtype) -> Tensor:
    weight = getattr(experts, name)
    return (weight.to_local() if isinstance(weight, DTensor) else weight).to(dtype)


class _Share(torch.autograd.Function):
    """Returns values / number, and passes the gradient on as it is."""

    @staticmethod
    def forward(ctx: Context[None], values: Tensor, number: int) -> Tensor:
        return values / number

    @staticmethod
    def backward(ctx: Context[None], *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_outputs[0], None
