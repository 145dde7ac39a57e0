"""Initial values. They depend on a seed and a number, not on device, rank or ep_size."""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor


def rng_for(seed: int, number: int) -> torch.Generator:
    """Returns a CPU generator for `number`. Numbers of one seed have distinct states, by splitmix64's increment."""
    return torch.Generator("cpu").manual_seed((seed + (number + 1) * 0x9E3779B97F4A7C15) % 2**63)


def fill_normal(values: Tensor, std: float, generator: torch.Generator) -> None:
    """Fills with normal(0, std), drawn on the CPU in fp32: equal on every device, and up to rounding in every dtype."""
    fill(values, draw(values.shape, generator) * std)


def draw(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Returns fp32 values of normal(0, 1) on the CPU. torch draws them in one thread."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def drawn_in_threads(draw_one: Callable[[int], list[Tensor]], number: int) -> Iterator[list[Tensor]]:
    """Yields draw_one(0), ..., draw_one(number - 1), several of which are computed at once."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, number, threads):  # not all at once, which would hold all values in fp32
            yield from pool.map(draw_one, range(start, min(start + threads, number)))


def fill(values: Tensor, whole: Tensor) -> None:
    """Copies `whole` into a tensor, or this rank's part of it into a DTensor, as FSDP makes them. No collective."""
    if hasattr(values, "placements"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(values, DTensor)
        whole = distribute_tensor(whole.to(values.device), values.device_mesh, values.placements, src_data_rank=None)
    values.copy_(whole)
