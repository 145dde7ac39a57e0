"""Memory for captures, which execute nothing and so need addresses alone.

A few MiB of a device are behind all of them, so that recording a layer takes no memory that training has not left.
"""

import functools

import torch

from sonic_ep.kernels.launch_sequence.driver import compiled_library, driver


def memory_of_capture() -> torch.cuda.MemPool:
    """Returns a pool of torch for the tensors of a capture. What they hold is undefined."""
    return torch.cuda.MemPool(_allocator().allocator())


@functools.cache
def _allocator() -> torch.cuda.memory.CUDAPluggableAllocator:
    driver()  # connects the library that torch opens by the same path
    functions = "sequence_allocate_for_capture", "sequence_free_of_capture"
    return torch.cuda.memory.CUDAPluggableAllocator(str(compiled_library()), *functions)
