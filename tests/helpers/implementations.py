"""The same test for a plain function and its namesake in Triton, interpreted on the CPU or run on a GPU."""

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.helpers.triton_device import kernel_module

# Triton looks when it is imported.
_OBSTACLE = "needs triton" if find_spec("triton") is None else "needs TRITON_INTERPRET=1 when the tests start"
interpreted = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1", reason=_OBSTACLE
)


@dataclass(frozen=True)
class Implementation:
    """Functions of kernels/<operation>/reference.py or triton.py, and the device to call them on."""

    in_triton: bool
    device: torch.device

    def module(self, operation: str) -> Any:
        return (
            kernel_module(f"{operation}.triton")
            if self.in_triton
            else import_module(f"sonic_ep.kernels.{operation}.reference")
        )


PLAIN = Implementation(False, torch.device("cpu"))
INTERPRETED = Implementation(True, torch.device("cpu"))
ON_GPU = Implementation(True, torch.device("cuda"))

_KERNELS = [
    pytest.param(INTERPRETED, id="interpreted", marks=interpreted),
    pytest.param(ON_GPU, id="gpu", marks=pytest.mark.gpu),
]
of_kernels = pytest.mark.parametrize("implementation", _KERNELS)
of_all = pytest.mark.parametrize("implementation", [pytest.param(PLAIN, id="plain"), *_KERNELS])
