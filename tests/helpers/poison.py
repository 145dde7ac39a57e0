"""Uninitialised memory that shows: NaN, or the largest integer, in all that sonic_ep allocates but does not write."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

ALLOCATORS = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        result = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.partition(".")[0] == "sonic_ep" and result.dtype != torch.bool:
            inexact = result.is_floating_point() or result.is_complex()
            with torch.no_grad():
                result.fill_(float("nan") if inexact else torch.iinfo(result.dtype).max)
        return result

    return poisoned


def import_dynamo() -> None:
    """Call it before torch's functions are replaced.

    torch.compile's tables name them as they are when it is first imported. A stand-in could never be compiled again in
    this process. (Not at the top of a file: it imports Triton, which reads TRITON_INTERPRET then.)
    """
    import_module("torch._dynamo")


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within it torch.empty, torch.empty_like and Tensor.new_empty give filled memory to callers in sonic_ep.

    It holds for this process: in a worker of `tests.helpers.launch`, enter it there.
    """
    import_dynamo()
    with ExitStack() as patches:
        for dst, name in ALLOCATORS:
            patches.enter_context(patch.object(dst, name, _poisoned(getattr(dst, name))))
        yield
