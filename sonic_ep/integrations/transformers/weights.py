"""The weights of an experts module of transformers, as our kernels read them.

Source of the layouts: huggingface/transformers, src/transformers/integrations/moe.py, `use_experts_implementation`.

Legend: e local experts, H hidden size, I expert width, J pre-activation columns (2I if gated else I).
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from sonic_ep.functional import Layout
from sonic_ep.kernels.experts.mlp import ExpertWeights

_log_once = functools.cache(logging.getLogger("sonic_ep.integrations.transformers").info)


def weights_of(experts: Any, dtype: torch.dtype) -> ExpertWeights:
    """Returns the module's weights in `dtype`, differentiable. A layout that kernels cannot read is copied.

    In the module:  gate_up_proj (e, J, H), or up_proj without a gate; down_proj (e, H, I); with `has_bias`
                    gate_up_proj_bias (e, J) and down_proj_bias (e, H). With `is_transposed` the weights are (e, H, J)
                    and (e, I, H). With `is_concatenated` the J rows are [gate; up], else they alternate.
    Returns:        w1 (e, J, H), w2 (e, H, I), b1 (e, J), b2 (e, H), in the order of `layout_of`. All are contiguous.
    Raises:         ValueError for a weight that is sharded while the experts compute.
    """
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    w1, w2 = _local(experts, name), _local(experts, "down_proj")
    b1 = _local(experts, f"{name}_bias") if experts.has_bias else None
    b2 = _local(experts, "down_proj_bias") if experts.has_bias else None
    _log_copy(experts)
    if experts.is_transposed and layout_of(experts) != "transposed":
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    return ExpertWeights(*(None if each is None else each.to(dtype).contiguous() for each in (w1, w2, b1, b2)))  # type: ignore[arg-type]


def layout_of(experts: Any) -> Layout:
    """Returns the `layout` of `moe`."""
    if experts.has_gate and experts.is_concatenated:
        return "concatenated"
    return "transposed" if experts.is_transposed else "interleaved"


def copied(experts: Any) -> str:
    """Returns which weights have a layout that every forward copies: "nothing", "gate_up_proj" or "all"."""
    if layout_of(experts) != "concatenated":
        return "nothing"
    return "all" if experts.is_transposed else "gate_up_proj" if experts.has_bias else "nothing"


def num_local_experts(experts: Any) -> int:
    """Returns e."""
    return experts.down_proj.shape[0]


def _local(experts: Any, name: str) -> Tensor:
    weight = getattr(experts, name)
    if hasattr(weight, "placements"):
        raise ValueError(
            f"{type(experts).__name__}.{name} is a DTensor with placements {weight.placements} while the experts "
            "compute; shard it with the model's own plan of DistributedConfig, which passes local tensors"
        )
    return weight


def _log_copy(experts: Any) -> None:
    if (weights := copied(experts)) == "nothing":
        return
    which = "its weights" if weights == "all" else weights
    _log_once("%s: each forward copies %s to the layout that the kernels read", type(experts).__name__, which)
