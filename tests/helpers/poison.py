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


@contextmanager
def compiler_forgets() -> Iterator[None]:
    """Replace functions of torch within it, or torch.compile may never compile them again in this process.

    Its tables hold torch's functions as they are when a table is made: at the import of torch._dynamo, and by the first
    lookup after every init_process_group, which empties them. (Not imported at the top of a file: it imports Triton,
    which reads TRITON_INTERPRET then.)
    """
    tables = import_module("torch._dynamo").trace_rules
    try:
        yield
    finally:
        tables.clear_lru_cache()


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within it torch.empty, torch.empty_like and Tensor.new_empty give filled memory to callers in sonic_ep.

    It holds for this process: in a worker of `tests.helpers.launch`, enter it there.
    """
    with compiler_forgets(), ExitStack() as patches:
        for dst, name in ALLOCATORS:
            patches.enter_context(patch.object(dst, name, _poisoned(getattr(dst, name))))
        yield
