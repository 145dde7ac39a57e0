"""Process groups that live no longer than a test: with gloo each has threads, which wake up all the time."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def passing_groups() -> Iterator[None]:
    """Destroy the groups that were made within, on every rank in the same order."""
    gc.collect()  # what still holds groups of an earlier test
    # What is left, above all modules, stays as a rule, and takes long to look at: Megatron, ZeRO 3 and tests collect
    # again and again.
    gc.freeze()
    before = set(distributed_c10d._world.pg_map)
    try:
        yield
    finally:
        for group in [each for each in distributed_c10d._world.pg_map if each not in before]:
            dist.destroy_process_group(group)
