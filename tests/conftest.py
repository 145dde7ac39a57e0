"""What every test starts from: one thread, seed 0, hypothesis profiles, ranks on request, no GPU assumed."""

import gc
import os
import sys
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

from sonic_ep.extras import require_extra
from tests.helpers.launch import RankPool, backend_of_gpus
from tests.helpers.poison import poisoned_empty
from tests.helpers.tolerances import limit_tolerances

torch.set_num_threads(1)
limit_tolerances()

# Triton reads it once, when it is imported: without a GPU its kernels run on CPU tensors, interpreted with numpy.
# The layer itself still takes the reference on CPU tensors.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Every process of the tests compiles its own kernels: there are many shapes, and several test processes.
os.environ.setdefault("SONIC_EP_COMPILE_PROCESSES", "1")

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_sessionstart() -> None:
    """In CI tests do not skip for want of a package, as they do elsewhere."""
    if "CI" in os.environ and sys.platform == "linux":
        for extra, modules in (
            ("megatron", ("megatron.core", "psutil")),
            ("deepspeed", ("deepspeed", "transformers")),
            ("torchtitan", ("torchtitan", "spmd_types", "torchdata", "tyro")),
        ):
            require_extra(extra, *modules)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files with slow tests come first: at the end no worker waits for another that has just begun one.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        if "gpus" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        if torch.cuda.is_available():
            if getattr(getattr(item, "module", None), "DEVICE", None) == "cuda":  # that of triton_device.py
                item.add_marker("gpu")
        elif item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False"))
    of_registry = [item for item in items if item.get_closest_marker("parallel_registry")]
    if of_registry and not _has_parallel_registry():
        for item in of_registry:
            item.add_marker(pytest.mark.skip(reason="transformers before 5.23 has no registry for expert parallelism"))


def _has_parallel_registry() -> bool:
    from sonic_ep.integrations.transformers.register import has_parallel_registry

    return has_parallel_registry()


def pytest_collection_finish() -> None:
    # Modules and items stay, and take long to look at: torch, Triton's interpreter and frameworks collect all the time.
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poison() -> Iterator[None]:
    """NaN, or the largest integer, in all that sonic_ep allocates without writing it (this process only)."""
    with poisoned_empty():
        yield


@pytest.fixture(scope="module")
def gpus() -> Iterator[Callable[[int], RankPool]]:
    """As `ranks`, over NCCL and with a GPU each; skips where there are too few, see `backend_of_gpus`."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size, backend_of_gpus(world_size)))

    yield pool
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(4).run(worker, *args)`: warm pools, one for each world size, started on first use."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield pool
    for each in pools.values():
        each.close()
