"""A layer on the GPU whose weights are not drawn on the CPU, as `MoE` does it, which takes minutes for large ones."""

import torch

from sonic_ep import EPGroup, MoE, MoEConfig


def layer_without_experts(config: MoEConfig, group: EPGroup | None = None, *, router_std: float) -> MoE:
    """bf16, with a random router, the same on every rank; the weights of its experts hold anything."""
    layer = MoE(config, group, seed=0, device="meta", dtype=torch.bfloat16).to_empty(device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    torch.nn.init.normal_(layer.router.weight, std=router_std, generator=generator)
    for buffer in layer.buffers():
        buffer.zero_()
    return layer
