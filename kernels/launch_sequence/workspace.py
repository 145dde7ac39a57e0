"""The workspace of cuBLAS: scratch memory that GEMMs of torch use without its dispatcher knowing.

torch has one for each cuBLAS handle and stream. So launches that were recorded on one stream refer to that stream's.
Repeated on another stream, they get a workspace of their own, because both may run at the same time.
"""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

_OPERAND = 16  # rows and columns of a GEMM


class Memory(NamedTuple):
    """A range of memory of the current device, which torch owns."""

    address: int
    num_bytes: int


_POOLS: dict[tuple[int, int], torch.cuda.MemPool] = {}  # by cuBLAS handle and stream
_WORKSPACES: dict[tuple[torch.device, int], Tensor] = {}  # by device and stream


def workspace_of_capture(stream: torch.cuda.Stream) -> Memory:
    """Returns the workspace for this thread's GEMMs on a stream that nothing but captures uses; empty without one."""
    key = torch.cuda.current_blas_handle(), stream.cuda_stream
    if key not in _POOLS:
        _POOLS[key] = torch.cuda.MemPool()
    pool = _POOLS[key]
    # torch allocates the workspace at the first GEMM, so in the pool. Later GEMMs allocate it only if it was freed.
    exact = torch.autocast("cuda", enabled=False)
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool), torch.no_grad(), exact:
        operand = torch.empty(_OPERAND, _OPERAND, device=stream.device)
        torch.mm(operand, operand, out=operand.clone())
        del operand
    blocks = [block for segment in snapshot_of(pool) for block in segment["blocks"]]
    allocated = [Memory(block["address"], block["size"]) for block in blocks if block["state"] == "active_allocated"]
    return max(allocated, key=lambda memory: memory.num_bytes, default=Memory(0, 0))


def snapshot_of(pool: torch.cuda.MemPool) -> list[dict[str, Any]]:
    """Returns torch's description of the segments of a pool."""
    numbers = pool.id
    # torch gives up references to these numbers that it does not own (pytorch pull request 196366). Python then frees
    # them too early and dies at a later allocation; from Python 3.12 on only if a number is above 256.
    for number in numbers:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    return torch.cuda.memory_snapshot(numbers)


def workspace_of_stream(device: torch.device, stream: int, num_bytes: int) -> Tensor:
    """Returns memory of at least so many bytes for recorded GEMMs that run on a stream, given as a raw handle."""
    known = _WORKSPACES.get((device, stream))
    if known is None or known.nbytes < num_bytes:
        known = _WORKSPACES[device, stream] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    return known
