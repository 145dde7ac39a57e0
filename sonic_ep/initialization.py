"""Initial values. They depend on a seed and a number, not on device, rank or ep_size."""

import torch
from torch import Tensor


def rng_for(seed: int, number: int) -> torch.Generator:
    """Returns a CPU generator for `number`. Numbers of one seed have distinct states, by splitmix64's increment."""
    return torch.Generator("cpu").manual_seed((seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**63)


def fill_normal(values: Tensor, std: float, generator: torch.Generator) -> None:
    """Fills with normal(0, std), drawn on the CPU in fp32: equal on every device, and up to rounding in every dtype."""
    fill(values, torch.randn(values.shape, generator=generator, device="cpu", dtype=torch.float32) * std)


def fill(values: Tensor, whole: Tensor) -> None:
    """Copies `whole` into a tensor, or this rank's part of it into a DTensor, as FSDP makes them. No collective."""
    if hasattr(values, "placements"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(values, DTensor)
        whole = distribute_tensor(whole.to(values.device), values.device_mesh, values.placements, src_data_rank=None)
    values.copy_(whole)
