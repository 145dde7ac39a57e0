"""Triton kernels compiled for an architecture without a GPU, in processes of their own that interpret nothing."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple

_CAPABILITY = {"sm_90a": 90, "sm_100a": 100}


class TritonKernel(NamedTuple):
    """One specialisation of a kernel of kernels/<module>.py.

    arguments: the types of its run-time arguments in Triton's words, in order; pointers are 16-byte aligned.
    constants: its tl.constexpr arguments by name; "tl.float32" stands for that object.
    registers: the most of a thread, if its launch says so.
    """

    module: str
    function: str
    arguments: str
    constants: dict[str, object]
    num_warps: int = 4
    registers: int | None = None

    def __str__(self) -> str:
        return f"{self.function}({self.arguments}; {', '.join(map(str, self.constants.values()))})"


@contextmanager
def compiling_processes(cache: str) -> Iterator[Executor]:
    """An executor in whose processes `compile_triton` works, with a compile cache of its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, initializer=_before_triton_is_imported, initargs=(cache,)) as process:
        yield process


def _before_triton_is_imported(cache: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache


def compile_triton(kernel: TritonKernel, arch: str) -> bytes:
    """The cubin."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(import_module(f"sonic_ep.kernels.{kernel.module}"), kernel.function).kernel
    types = iter(kernel.arguments.split())
    signature = {name: "constexpr" if name in kernel.constants else next(types) for name in function.arg_names}
    assert not list(types), f"{kernel}: more types than arguments"
    constants = {
        (function.arg_names.index(name),): getattr(tl, str(value)[3:]) if str(value).startswith("tl.") else value
        for name, value in kernel.constants.items()
    }
    pointers = [number for number, kind in enumerate(signature.values()) if kind.startswith("*")]
    aligned = {(number,): [["tt.divisibility", 16]] for number in pointers}
    target = GPUTarget("cuda", _CAPABILITY[arch], 32)
    source = ASTSource(function, signature, constants, aligned)
    return triton.compile(
        source, target=target, options={"num_warps": kernel.num_warps, "maxnreg": kernel.registers}
    ).asm["cubin"]
