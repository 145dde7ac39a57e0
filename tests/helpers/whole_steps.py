"""A step of a model of transformers, forward and backward, with nothing in it that a CUDA graph cannot hold.

Imports transformers inside: it takes seconds.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from sonic_ep import RoundingConfig, TransportConfig

STATIC = TransportConfig(kind="symmetric", buffers="static", timeout=60)
# How two ranks share a model: its experts alone, or with FSDP2 or tensor parallelism of all else.
DIVIDED = {"experts": {}, "fsdp": {"fsdp_size": 2}, "tp": {"tp_size": 2}}


def model_with(
    path: Path, device: str, how: str | None, transport: TransportConfig, rounding: RoundingConfig | None
) -> Any:
    """The model in a folder, in training mode. how: one of DIVIDED, or None for one rank. Buffers hold every pair, or
    what rounding allows."""
    from transformers import AutoModelForCausalLM

    from sonic_ep.integrations.transformers import SonicEPOptions, register, round_tokens

    every_pair = RoundingConfig(mode="off", capacity_factor=1 if how is None else dist.get_world_size())
    register(SonicEPOptions(rounding=every_pair, transport=transport))
    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    if how is None:
        options["experts_implementation"] = "sonic_ep"
    elif DIVIDED[how]:
        from transformers.distributed import DistributedConfig

        layout = {**DIVIDED[how], "ep_size": 2, "ep_implementation": "sonic_ep"}
        options["distributed_config"] = DistributedConfig.from_dict(layout)
    model: Any = AutoModelForCausalLM.from_pretrained(path, **options)
    if "distributed_config" not in options:
        model = model.to(device)
    if how == "experts":
        _divide_experts(model, device)
    if rounding is not None:
        round_tokens(model, rounding)
    return model.train()


def _divide_experts(model: nn.Module, device: str) -> None:
    """What transformers does to experts for a DistributedConfig, without FSDP or tensor parallelism."""
    from transformers.distributed.expert_parallel import (  # pyright: ignore[reportMissingImports]  # in 5.23
        EpDispatchExpertsParallel,
    )

    from sonic_ep.integrations.transformers.experts import registered_experts

    size, rank = dist.get_world_size(), dist.get_rank()
    grid = init_device_mesh(device, (size, 1), mesh_dim_names=("ep", "tp"))
    for experts in registered_experts(model, "there is nothing to divide").values():
        module: Any = experts
        for name in ("gate_up_proj", "down_proj"):
            setattr(module, name, nn.Parameter(getattr(module, name).detach().chunk(size)[rank].clone()))
        module.num_experts //= size
        module._is_expert_parallel = True
        EpDispatchExpertsParallel().install_forward(
            module, grid["ep"], tp_mesh=grid["tp"], ep_implementation="sonic_ep"
        )


def causal_mask(like: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, 1, L, L), added to the attention's logits of token ids (B, L).

    With this mask transformers reads nothing on the host. Without one it reads the positions, to find packed sequences,
    except in a capture, where it makes another mask than in an eager step.
    """
    B, L = like.shape
    hidden = torch.ones(L, L, dtype=torch.bool, device=like.device).triu(1)
    mask = torch.zeros(L, L, dtype=dtype, device=like.device).masked_fill(hidden, torch.finfo(dtype).min)
    return mask.expand(B, 1, L, L).contiguous()


def step(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Returns the loss. Gradients are in `grad` of the parameters."""
    loss = model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False).loss
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of this rank's shards, by parameter."""
    grads: dict[str, Any] = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: grad.to_local() if hasattr(grad, "to_local") else grad for name, grad in grads.items()}
