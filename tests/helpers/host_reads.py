"""What a CUDA graph cannot have, without a GPU: reads of tensors' values by the host, and launches that change.

On the CPU nothing waits for a device, so the calls themselves are noted. Left out is what stands for a GPU kernel: an
interpreted Triton kernel, and the experts' GEMMs in plain torch.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_METHODS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__")
# Operations that return a value, or a tensor with a shape that depends on values.
_OPERATIONS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim")
_KERNELS = ("triton/runtime/interpreter.py", "kernels/experts/reference.py")
_SEEN_BY_CAPTURES = (
    *("async_d2h", "routers.count_exchange", "dispatch.symmetric"),
    *("integrations.framework_experts", "integrations.transformers.router_outputs"),
)


class Step(TorchDispatchMode):
    """reads: for each read of a value its name and the lines of code that asked for it, the last first. launches: of
    every operation its name and the shapes of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.launches: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1])
        if name in _OPERATIONS or masks:
            self.note(name)
        results = func(*args, **(kwargs or {}))
        if not _in_kernel(_callers()):
            shapes = [tuple(each.shape) for each in tree_leaves(results) if isinstance(each, Tensor)]
            self.launches.append(f"{name} {shapes}")
        return results

    def note(self, name: str) -> None:
        callers = _callers()
        if not _in_kernel(callers):
            self.reads.append(f"{name} by " + " < ".join(callers[:4]))


@contextmanager
def noted_step() -> Iterator[Step]:
    """A context that notes what the code in it does, forward and backward."""
    step = Step()
    with ExitStack() as patches, step:
        for name in _METHODS:  # not by a TorchFunctionMode, which is off in the backward of an autograd.Function
            patches.enter_context(patch.object(Tensor, name, _noting(name, step)))
        yield step


@contextmanager
def as_if_captured() -> Iterator[None]:
    """A context in which our code runs as while a CUDA graph is captured."""
    with ExitStack() as patches:
        for name in _SEEN_BY_CAPTURES:
            patches.enter_context(patch(f"sonic_ep.{name}.host_may_wait", lambda _: False))
        yield


def _noting(name: str, step: Step) -> Any:
    stock = getattr(Tensor, name)

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        step.note(name)
        return stock(self, *args, **kwargs)

    return method


def _callers() -> list[str]:
    """Files and lines, from the innermost on, without torch's and this file's."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path != __file__:
            found.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _in_kernel(callers: list[str]) -> bool:
    return any(caller.rpartition(":")[0].endswith(_KERNELS) for caller in callers)
