"""Captures need addresses, and no memory behind them."""

import pytest
import torch
from torch import Tensor

from sonic_ep.kernels.launch_sequence.recorder import record
from sonic_ep.kernels.launch_sequence.replay import Replay

pytestmark = pytest.mark.gpu
GIB = 2**30


def test_a_recording_of_more_memory_than_the_gpu_has() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(1000, device=device)

    def function(tensors: list[Tensor]) -> list[Tensor]:
        scratch = [tensors[0].new_empty(size, dtype=torch.uint8) for size in sizes]
        scratch[1][:8].copy_(scratch[0][:8])
        return [tensors[0] * 2]

    sizes = [torch.cuda.mem_get_info()[1], 8 * GIB]
    with pytest.raises(torch.OutOfMemoryError):
        function([x])
    record(function, [x], [], [])
    reserved = torch.cuda.memory_reserved()
    record(function, [x], [], [])
    assert torch.cuda.memory_reserved() == reserved
    sizes = [8, 8]
    recording = record(function, [x], [], [])
    assert torch.equal(Replay(recording, [], device)([x], list)[0], x * 2)
