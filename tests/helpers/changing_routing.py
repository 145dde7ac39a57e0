"""Steps whose routing changes: inputs that lean, and roundings whose bound static buffers are made for."""

import torch
from torch import Tensor

from sonic_ep import RoundingConfig, RouterConfig, TransportConfig

STATIC = TransportConfig(kind="symmetric", buffers="static", timeout=30)
LOSSES = RouterConfig(balance="batch", balance_coef=0.01, z_loss_coef=0.001)
BOUNDED = {
    "apportion": RoundingConfig(mode="apportion", t=64, capacity_factor=1.25),
    "nearest": RoundingConfig(mode="nearest", capacity_factor=1.0),
    "pad": RoundingConfig(mode="pad", t=16, capacity_factor=4.0),
    "off": RoundingConfig(mode="off", capacity_factor=1.5),
}


def leaning_tokens(step: int, tokens: int, d: int, device: str, dtype: torch.dtype) -> Tensor:
    """Tokens that lean to some experts, more so every step."""
    torch.manual_seed(step)
    leaning = torch.randn(d, device=device) * step
    return (torch.randn(tokens, d, device=device) + leaning * torch.rand(tokens, 1, device=device)).to(dtype)
