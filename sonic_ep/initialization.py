"""Initial values that depend on a seed and on what is filled, never on device, rank or ep_size."""

import torch
from torch import Tensor


def rng_for(seed: int, number: int) -> torch.Generator:
    """A generator of its own for each `number` of one seed (splitmix64's increment keeps them apart)."""
    return torch.Generator("cpu").manual_seed((seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**63)


def fill_normal(values: Tensor, std: float, generator: torch.Generator) -> None:
    """normal(0, std) drawn on the CPU in fp32: the same on every device, and up to rounding in every dtype."""
    fill(values, torch.randn(values.shape, generator=generator, device="cpu", dtype=torch.float32) * std)


def fill(values: Tensor, whole: Tensor) -> None:
    """Copy `whole` into a tensor, or this rank's part of it into a DTensor, as FSDP has made of it. No collective."""
    if hasattr(values, "placements"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(values, DTensor)
        whole = distribute_tensor(whole.to(values.device), values.device_mesh, values.placements, src_data_rank=None)
    values.copy_(whole)
