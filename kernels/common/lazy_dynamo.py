"""Imports packages that decorate with torch.compile or torch.compiler.disable, without importing Dynamo.

Both calls import torch._dynamo at once, which imports inductor, FSDP and sympy: 2 s on a fast host, 7 to 9 s on slow
ones, in a program that compiles nothing. torch offers no way to decorate with either and import Dynamo later, but for
the private `_disable_dynamo` that its own modules use. So both are replaced while such a package is imported.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FunctionType

import torch
from torch._compile import _disable_dynamo

from sonic_ep.kernels.common.replaced import replaced

_Function = Callable[..., object]


@contextmanager
def lazy_dynamo() -> Generator[None, None, None]:
    """Inside this context, functions decorated by this thread do what the decorator says from their first call on.

    This concerns torch.compile and torch.compiler.disable of plain functions; other threads, modules and classes get
    torch's own. A decorated function behaves as without this context, except that an argument that torch.compile
    refuses is refused at the first call. Both are torch's own again after the context. It does nothing if Dynamo is
    imported.
    """
    if _is_imported():
        yield
        return
    importer, compile_now, disable_now = threading.get_ident(), torch.compile, torch.compiler.disable

    def is_lazy(target: object) -> bool:
        return isinstance(target, FunctionType) and threading.get_ident() == importer

    # Callers look for the parameter `recompile_limit`, which torch.compile has since 2.13.
    def compile_later(model: object = None, *, recompile_limit: int | None = None, **options: object) -> object:
        if not is_lazy(model):
            return _compile(compile_now, model, recompile_limit, options)
        return _from_first_call(model, lambda: _compile(compile_now, model, recompile_limit, options))

    def disable_later(fn: object = None, recursive: bool = True, **options: object) -> object:
        return _disable_dynamo(fn, recursive) if is_lazy(fn) else disable_now(fn, recursive, **options)

    with replaced(torch, compile=compile_later), replaced(torch.compiler, disable=disable_later):
        yield


def _is_imported() -> bool:
    return "torch._dynamo" in sys.modules


def _compile(
    compile_now: Callable[..., _Function], model: object, recompile_limit: int | None, options: dict[str, object]
) -> _Function:
    if recompile_limit is None:
        return compile_now(model, **options)
    if "recompile_limit" in inspect.signature(compile_now).parameters:
        return compile_now(model, recompile_limit=recompile_limit, **options)
    config = torch._dynamo.config  # older torch has one limit for the process
    config.recompile_limit = max(config.recompile_limit, recompile_limit)
    return compile_now(model, **options)


def _from_first_call(function: _Function, compiled: Callable[[], _Function]) -> _Function:
    compiled = functools.cache(compiled)

    @functools.wraps(function)
    def run(*arguments: object, **named: object) -> object:
        # In a graph that is being compiled, a compiled function is inlined.
        return (function if torch.compiler.is_dynamo_compiling() else compiled())(*arguments, **named)

    return run
