"""The workspace of cuBLAS: recorded GEMMs that use one get one of the stream on which they run."""

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sonic_ep.kernels.launch_sequence.driver import raw_stream
from sonic_ep.kernels.launch_sequence.recorder import record
from sonic_ep.kernels.launch_sequence.replay import Replay
from sonic_ep.kernels.launch_sequence.workspace import snapshot_of, workspace_of_stream


def test_a_stream_has_one_workspace_that_grows() -> None:
    device = torch.device("cpu")
    first = workspace_of_stream(device, 5, 100)
    assert first.nbytes == 100
    assert workspace_of_stream(device, 5, 60) is first
    assert workspace_of_stream(device, 6, 60) is not first
    assert workspace_of_stream(device, 5, 200).nbytes == 200


def test_numbers_of_a_pool_outlive_its_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives up two references that it does not own."""

    def snapshot(numbers: tuple[int, int]) -> list[Any]:
        for number in numbers:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(number))
        return [{"blocks": []}]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    pool: Any = SimpleNamespace(id=(int("1000"), int("2000")))
    before = [sys.getrefcount(number) for number in pool.id]
    assert snapshot_of(pool) == [{"blocks": []}]
    assert [sys.getrefcount(number) for number in pool.id] == before


@pytest.mark.gpu
def test_a_pool_of_any_number_has_a_snapshot() -> None:
    pools = [torch.cuda.MemPool() for _ in range(300)]
    for _ in range(1000):
        assert snapshot_of(pools[-1]) == []


def gemm(tensors: list[Tensor]) -> list[Tensor]:
    left, right = tensors
    return [left @ right]


@pytest.mark.gpu
def test_a_recorded_gemm_that_splits_its_sums() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    operands = [torch.randn(64, 2**17, device=device), torch.randn(2**17, 64, device=device)]
    expected = gemm(operands)[0]
    recording = record(gemm, operands, [], [])
    assert recording.workspace_bytes
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            scratch = workspace_of_stream(device, raw_stream(device), recording.workspace_bytes)
            scratch.fill_(255)  # NaN
            assert torch.equal(Replay(recording, [], device)(operands, list)[0], expected)
            assert (scratch != 255).any()
