"""Triton's interpreter without what it does again and again.

Before a launch it replaces the language's functions, and once more for each function that a kernel calls, to whom
nothing is left to replace. For every value it makes the type of a block, its shape and the shape's type anew, though a
kernel has few of them: here each is made once and shared. Every sum of integers it repeats with more bits, to compare
the two and forget the result unless it debugs.
"""

import dataclasses
import functools
import inspect
import math
import os
from importlib import import_module
from types import ModuleType
from typing import Any


@functools.cache
def quicken_interpreter() -> None:
    """In this process, from here on, if it interprets kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter: Any = import_module("triton.runtime.interpreter")
    core: Any = import_module("triton.language.core")
    _replace_the_language_once(interpreter, core)
    _share_types(interpreter, core)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _replace_the_language_once(interpreter: Any, core: Any) -> None:
    replace, known = interpreter._patch_lang, (import_module("triton.language"), core)

    @functools.cache
    def languages_of(function: Any) -> list[ModuleType]:
        return [value for value in function.__globals__.values() if inspect.ismodule(value) and value in known]

    def unless_replaced(function: Any) -> Any:
        languages = languages_of(function)
        replaced = bool(languages) and not any(core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if replaced else replace(function)

    @functools.cache
    def builtins_of(owner: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(owner) if core.is_builtin(member)]

    def replace_builtins(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(owner):
            interpreter._patch_attr(owner, name, member, builder, scope)

    interpreter._patch_lang = unless_replaced
    interpreter._patch_builtin = replace_builtins


def _share_types(interpreter: Any, core: Any) -> None:
    make_block_type, equal, numpy_dtype = core.block_type.__init__, core.tuple.__eq__, interpreter._get_np_dtype
    same = core.constexpr(True)
    block_types: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    @functools.cache
    def shape_of_type(sizes: tuple[int, ...]) -> Any:
        return core.tuple(sizes)

    @functools.cache
    def shape_and_numel_of_tensors(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.value if isinstance(shape, core.constexpr) else shape
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in sizes])
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        if key not in block_types:
            make_block_type(self, element_ty, list(sizes))
            self.shape = shape_of_type(sizes)
            block_types[key] = {**vars(self), "of_tensors": shape_and_numel_of_tensors(sizes)}
        vars(self).update(block_types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else shape_and_numel_of_tensors(())

    def equal_if_shared(self: Any, other: Any) -> Any:
        return same if other is self else equal(self, other)

    def shared_numpy_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(dtype)
        return dtypes[name]

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    core.tuple.__eq__ = equal_if_shared
    interpreter._get_np_dtype = shared_numpy_dtype
