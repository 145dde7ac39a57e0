"""Where Triton kernels run in tests: on the GPU, else on the CPU under TRITON_INTERPRET=1."""

import os
from importlib.util import find_spec

import pytest
import torch


def triton_device() -> str:
    """The device of a test module's tensors; skips the module where its kernels cannot run. Call it while loading."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton", allow_module_level=True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)
    return "cuda"
