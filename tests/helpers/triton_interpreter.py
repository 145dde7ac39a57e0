"""Triton's interpreter without what it does again and again: before a launch it replaces the language's functions, and
once more for each function that a kernel calls, to whom nothing is left to replace."""

import functools
import inspect
from importlib import import_module
from typing import Any


@functools.cache
def quicken_interpreter() -> None:
    """In this process, from here on."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    language = import_module("triton.language")
    replace = interpreter._patch_lang

    def unless_replaced(function: Any) -> Any:
        known = (language, language.core)
        names = [module for module in function.__globals__.values() if inspect.ismodule(module) and module in known]
        replaced = bool(names) and not any(language.core.is_builtin(module.load) for module in names)
        return interpreter._LangPatchScope() if replaced else replace(function)

    interpreter._patch_lang = unless_replaced
