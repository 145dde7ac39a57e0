"""A rank dies in mid-step: the others are told which one and where, in time, and exit cleanly."""

import functools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.groups import EPGroup
from sonic_ep.symmetric_memory import symmetric_memory
from tests.dispatch.oracle import Case, combine_rows, on_device
from tests.helpers.shared_files import shared_files
from tests.helpers.triton_device import triton_device

DEVICE = triton_device()
SIZE = 2 if DEVICE == "cuda" and torch.cuda.device_count() < 3 else 3
TIMEOUT = 2.0
CASE = Case((5, 4, 3)[:SIZE], 16, SIZE, "all")


def live(rank: int, folder: str, device: str) -> None:
    """Two steps; the last rank is killed between the second one's dispatch and combine."""
    store = dist.FileStore(f"{folder}/store", SIZE)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE)
    group = EPGroup()
    allocate = (
        shared_files(group, folder)
        if device == "cpu"
        else functools.partial(symmetric_memory, group, torch.device("cuda", rank))
    )
    transport = SymmetricTransport(group, allocate, timeout=TIMEOUT)
    raised = Path(folder) / f"told-{rank}"
    try:
        for step in range(5):
            prepared = transport.prepare(*on_device(device, CASE.routing(rank), CASE.plan().of_rank(rank)))
            rows = transport.dispatch(torch.ones(CASE.tokens[rank], CASE.H, device=device), prepared.handle).result()
            if step == 1 and rank == SIZE - 1:
                if device == "cuda":
                    torch.cuda.synchronize()
                os.kill(os.getpid(), signal.SIGKILL)
            combine_rows(transport, rows, prepared.handle)
            if device == "cuda":
                torch.cuda.synchronize()
    except RuntimeError as error:
        raised.write_text(str(error))


@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < SIZE, reason=f"needs {SIZE} CUDA devices")
def test_the_others_are_told_and_exit(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=live, args=(rank, str(tmp_path), DEVICE)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 90
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * (SIZE - 1) + [-signal.SIGKILL]
    for rank in range(SIZE - 1):
        raised = (tmp_path / f"told-{rank}").read_text()
        assert raised.startswith(f"rank {SIZE - 1} of the EP group did not come to combine within {TIMEOUT:g} s")
