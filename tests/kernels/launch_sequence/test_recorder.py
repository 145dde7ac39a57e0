"""What recording needs besides a GPU; tests/sonic_ep/test_recorded_launches.py has those."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sonic_ep.kernels.launch_sequence import recorder

WATCHED = """
import sys
from types import SimpleNamespace

import torch

from sonic_ep.kernels.launch_sequence import recorder

recorder.driver = lambda: SimpleNamespace(sequence_captured_nodes=lambda stream: 0)
capture = SimpleNamespace(starts=[], sizes=[], allocated=[], order=[], freed={}, num_fixed=0)
x = torch.ones(2, requires_grad=True)
with recorder._WatchAllocations(capture, 0, None):
    (gradient,) = torch.autograd.grad((x * x).sum(), [x])
assert gradient.tolist() == [2, 2]
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_watching_allocations_does_not_import_dynamo() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_memory_that_torch_did_not_allocate_has_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "driver", lambda: SimpleNamespace(sequence_captured_nodes=lambda stream: 0))
    capture: Any = SimpleNamespace(starts=[], sizes=[], allocated=[], order=[], freed={}, num_fixed=0)
    watch = recorder._WatchAllocations(capture, 0, None)
    own = torch.zeros(4)
    assert watch.note(own, (0, 0)) == 0
    watch.note(torch.frombuffer(bytearray(16), dtype=torch.float32), (0, 0))
    assert (capture.starts, capture.sizes) == ([own.data_ptr()], [16])
