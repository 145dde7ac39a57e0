"""Triton's interpreter without what it does again and again.

* Before a launch it replaces the language's functions, after it puts them back, and in between it replaces them once
  more for each function that a kernel calls. A process that interprets compiles nothing: here they stay replaced.
* For every value it makes the type of a block, its shape and the shape's type anew, though a kernel has few of them:
  here each is made once and shared.
* For every operation it finds out anew how its operands are converted and broadcast, which follows from their types:
  here it is remembered for a pair of types. A number's tensor is kept, too.
* Every sum of integers it repeats with more bits, to compare the two and forget the result unless it debugs.

It also mends an error of Triton 3.6, see `_widen_integers`.
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
    _remember_conversions(interpreter, core, import_module("triton.language.semantic"))
    _widen_integers(interpreter, core)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _replace_the_language_once(interpreter: Any, core: Any) -> None:
    replace, known = interpreter._patch_lang, (import_module("triton.language"), core)
    replace_methods = interpreter._patch_lang_tensor
    demands_semantic = core.builtin(lambda: None).__code__

    @functools.cache
    def languages_of(function: Any) -> list[ModuleType]:
        return [value for value in function.__globals__.values() if inspect.ismodule(value) and value in known]

    def unless_replaced(function: Any) -> Any:
        languages = languages_of(function)
        replaced = bool(languages) and not any(core.is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if replaced else replace(function)

    def replace_builtin(dst: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = member.__wrapped__ if member.__code__ is demands_semantic else member
        semantic = interpreter.TritonSemantic(builder)

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(dst, name, interpreted)

    def replace_methods_and_index(tensor: Any, scope: Any) -> None:
        replace_methods(tensor, scope)
        # Bounds of ranges: Triton 3.6 takes int() of arrays of one element, which NumPy 2.4 refuses.
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang = unless_replaced
    interpreter._patch_attr = replace_builtin
    interpreter._patch_lang_tensor = replace_methods_and_index
    interpreter._LangPatchScope.restore = lambda self: None


def _share_types(interpreter: Any, core: Any) -> None:
    make_block_type, numpy_dtype = core.block_type.__init__, interpreter._get_np_dtype
    block_types: dict[Any, Any] = {}
    dtypes: dict[str, Any] = {}

    @functools.cache
    def shape_and_numel_of_tensors(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def shared_block_type(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = shape.value if isinstance(shape, core.constexpr) else shape
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in sizes])
        key = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        known = block_types.get(key)
        if known is None:
            known = object.__new__(cls)
            make_block_type(known, element_ty, list(sizes))
            known.of_tensors = shape_and_numel_of_tensors(sizes)
            block_types[key] = known
        return known

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else shape_and_numel_of_tensors(())

    def shared_numpy_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(dtype)
        return dtypes[name]

    core.block_type.__new__ = shared_block_type
    core.block_type.__init__ = lambda self, element_ty, shape: None
    core.tensor.__init__ = tensor
    interpreter._get_np_dtype = shared_numpy_dtype


def _remember_conversions(interpreter: Any, core: Any, semantic: Any) -> None:
    """What the first operation on operands of two types has found out, for later ones: only where an operand stayed as
    it was, or was but broadcast, or is a number."""
    tensor, Handle, builder = core.tensor, interpreter.TensorHandle, interpreter.interpreter_builder

    def kind(operand: Any) -> Any:
        """Equal for operands that are converted alike. Shared types are never forgotten."""
        if isinstance(operand, tensor):
            type = operand.type
            return id(type) if type.is_block() else (type.name, getattr(type, "address_space", None))
        return operand.__class__, repr(operand)

    def way(before: Any, after: Any) -> Any:
        """How the operand got there: False if it stayed, its type and data if it is a number, its type alone if it was
        broadcast; None if this is not to be told from the types."""
        if after is before:
            return False
        if not isinstance(before, tensor):
            after.handle.data.flags.writeable = False
            return after.type, after.handle.data
        if after.type.is_block() and before.type.scalar == after.type.scalar:
            return after.type, None
        return None

    def take(operand: Any, how: Any) -> Any:
        if how is False:
            return operand
        type, data = how
        if data is not None:
            return tensor(Handle(data, type.scalar), type)
        handle = operand.handle
        splat = handle.data.size == 1
        return tensor(
            builder.create_splat(type, handle) if splat else builder.create_broadcast(handle, type.shape), type
        )

    def remembering(convert: Any) -> Any:
        ways: dict[Any, tuple[Any, Any]] = {}

        def converted(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> tuple[Any, Any]:
            key = (kind(lhs), kind(rhs), flags, *named.items())
            known = ways.get(key)
            if known is not None:
                return take(lhs, known[0]), take(rhs, known[1])
            left, right = convert(self, lhs, rhs, *flags, **named)
            found = way(lhs, left), way(rhs, right)
            if None not in found:
                ways[key] = found
            return left, right

        return converted

    for name in ("binary_op_type_checking_impl", "broadcast_impl_value"):
        setattr(semantic.TritonSemantic, name, remembering(getattr(semantic.TritonSemantic, name)))


def _widen_integers(interpreter: Any, core: Any) -> None:
    """An argument of a kernel between 2^31 and 2^32 is of type int64, but has 4 bytes: a store of it copies 4 bytes of
    other memory too."""
    convert = interpreter._implicit_cvt

    def widened(value: Any) -> Any:
        if isinstance(value, int) and 2**31 <= value < 2**32:
            return core.tensor(interpreter.interpreter_builder.get_int64(value), core.int64)
        return convert(value)

    interpreter._implicit_cvt = widened
