"""Launches of Triton kernels that take the host a fraction of the time of Triton's own.

`kernel[grid](...)` reads settings, binds arguments to names and makes a text of what they are, at every launch; a layer
has 40 launches a step. Here the first launch with arguments of some kind is Triton's; later ones go straight to the
compiled kernel that it returned, as `kernel.warmup(...)[grid](...)` does in Triton's tutorials.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction, KernelInterface

_ALIGNMENT = 16  # bytes of addresses, and what sizes may be multiples of: Triton compiles apart what is


def fast_launch(kernel: KernelInterface[Any]) -> KernelInterface[Any]:
    """A kernel to be launched with run-time arguments in order, then tl.constexpr and options by name.

    Under TRITON_INTERPRET=1 the kernel itself.
    """
    return FastLauncher(kernel) if isinstance(kernel, JITFunction) else kernel


class FastLauncher(KernelInterface[Any]):
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
        """What follows the run-time arguments when a compiled kernel is launched, in order."""
        constants = self.kernel.params[number:]
        assert all(parameter.is_constexpr for parameter in constants), f"{self.kernel} has more run-time arguments"
        return tuple(named[parameter.name] for parameter in constants)


@functools.cache
def sm_major(device: torch.device) -> int:
    """Major compute capability of a GPU, asked for once; 0 of the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def specialization_key(argument: object) -> object:
    """Equal for run-time arguments that Triton compiles alike."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    if type(argument) is int:
        return argument == 1, argument % _ALIGNMENT == 0, -(1 << 31) <= argument < 1 << 31, argument < 1 << 63
    if argument is None or type(argument) in (bool, float):
        return type(argument)
    raise TypeError(f"a kernel was given {argument!r}, wanted a tensor or a number")
