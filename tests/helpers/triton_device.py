"""Where Triton kernels run in tests: on the GPU, else on the CPU under TRITON_INTERPRET=1."""

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.helpers.triton_interpreter import quicken_interpreter


def triton_device() -> str:
    """The device of a test module's tensors; skips the module where its kernels cannot run. Call it while loading."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton", allow_module_level=True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        quicken_interpreter()
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)
    return "cuda"


def kernel_module(name: str) -> Any:
    """kernels/<name>.py, for helpers that are loaded where there is no Triton too."""
    quicken_interpreter()
    return import_module(f"sonic_ep.kernels.{name}")
