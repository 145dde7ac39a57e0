"""A cached launcher for Triton kernels, which takes a fraction of the host time of Triton's own.

At every launch, `kernel[grid](...)` reads settings, binds arguments to names and formats a specialization key. A layer
has 40 launches per step. Here Triton makes the first launch for each specialization key. Later launches call the
compiled kernel directly, as `kernel.warmup(...)[grid](...)` does in Triton's tutorials.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction, KernelInterface

# Triton specializes a kernel on pointers aligned to 16 bytes and on integers divisible by 16.
_ALIGNMENT = 16


def fast_launch(kernel: KernelInterface[Any]) -> KernelInterface[Any]:
    """Decorates a Triton kernel with the cached launcher. Under TRITON_INTERPRET=1 returns the kernel itself.

    Pass all run-time arguments by position, then the tl.constexpr arguments and launch options by name.
    """
    return FastLauncher(kernel) if isinstance(kernel, JITFunction) else kernel


class FastLauncher(KernelInterface[Any]):
    """One Triton kernel with its compiled versions, by device, specialization keys of the arguments and constants."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel
        self._compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: object, **named: object) -> None:
        key = (torch.cuda.current_device(), *map(specialization_key, arguments), *named.items())
        known = self._compiled.get(key)
        if known is None:
            compiled = self.kernel[grid](*arguments, **named)
            self._compiled[key] = compiled, self._constants(len(arguments), named)
        else:
            compiled, constants = known
            compiled[*grid, 1, 1](*arguments, *constants)

    def _constants(self, number: int, named: dict[str, object]) -> tuple[object, ...]:
        """Returns the constexpr values in parameter order. A compiled kernel takes them after the run-time values."""
        constants = self.kernel.params[number:]
        assert all(parameter.is_constexpr for parameter in constants), f"{self.kernel} has more run-time arguments"
        return tuple(named[parameter.name] for parameter in constants)


@functools.cache
def sm_major(device: torch.device) -> int:
    """Returns the major compute capability of a GPU, cached; 0 for the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def specialization_key(argument: object) -> object:
    """Returns a key that is equal for run-time arguments for which Triton compiles the same kernel.

    Raises: TypeError unless the argument is a tensor, a number, a bool or None.
    """
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    if type(argument) is int:
        return argument == 1, argument % _ALIGNMENT == 0, -(1 << 31) <= argument < 1 << 31, argument < 1 << 63
    if argument is None or type(argument) in (bool, float):
        return type(argument)
    raise TypeError(f"a kernel was given {argument!r}, wanted a tensor or a number")
