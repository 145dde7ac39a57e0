"""The weights of torchtitan's grouped experts, as `moe` takes them.

Source of the layouts: pytorch/torchtitan, torchtitan/models/common/moe.py and torchtitan/models/gpt_oss/moe.py.

Legend: e local experts, H hidden size, I expert width, J pre-activation columns (2I if gated else I).
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from sonic_ep.first_order import Context
from sonic_ep.integrations.framework_experts import Weights

_LIMIT = 7.0  # of the activation swiglu_oai
_NAMES = "w1_EFD", "w2_EDF", "w3_EFD"
_GPT_OSS_NAMES = "mlp1_weight_EGD", "mlp2_weight_EDF", "mlp1_bias_EG", "mlp2_bias_ED"


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


def local_parameters(experts: Any) -> list[Tensor]:
    """Returns this rank's parts of the module's parameters, differentiable.

    They are w1_EFD, w2_EDF, w3_EFD, or of gpt-oss mlp1_weight_EGD, mlp2_weight_EDF, mlp1_bias_EG, mlp2_bias_ED.
    """
    is_gpt_oss = isinstance(experts, GptOssGroupedExperts)
    parameters = [getattr(experts, name) for name in (_GPT_OSS_NAMES if is_gpt_oss else _NAMES)]
    return [each.to_local() if isinstance(each, DTensor) else each for each in parameters]


def weights_of(parameters: list[Tensor], dtype: torch.dtype, tp_size: int) -> tuple[Weights, Tensor | None]:
    """Returns w1, w2, b1, b2 in `dtype` and, if w1 is the gate weights alone, the up weights (e, I, H).

    parameters: see `local_parameters`. w1_EFD, w3_EFD are (e, I, H), w2_EDF (e, H, I); of gpt-oss mlp1_weight_EGD
                (e, J, H), with gate and up rows in turns, mlp2_weight_EDF (e, H, I), and biases (e, J) and (e, H).
    tp_size:    the number of ranks that each have a slice of I. Their outputs are summed, so each adds its share of the
                second bias, whose gradient is not divided, because every rank has all of it.
    """
    w1, w2, *others = [each.to(dtype) for each in parameters]
    if len(others) == 1:
        return (w1, w2, None, None), others[0]
    b1, b2 = others
    return (w1, w2, b1, _Share.apply(b2, tp_size) if tp_size > 1 else b2), None


class _Share(torch.autograd.Function):
    """Returns values / number, and passes the gradient on as it is."""

    @staticmethod
    def forward(ctx: Context[None], values: Tensor, number: int) -> Tensor:
        return values / number

    @staticmethod
    def backward(ctx: Context[None], *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_outputs[0], None
