"""Launches of Triton kernels that cost little more host time than the launch itself.

At every launch, `kernel[grid](...)` of Triton reads settings, binds arguments to names and formats a specialization
key, which takes five times as long as the launch. Here Triton makes the first launch of each *variant* of a kernel.
Later launches hand addresses and numbers to the launcher that Triton compiled for it.

A variant is what a kernel is compiled for: the device, the dtypes of its tensors, its constants, and the
numbers that Triton may specialize. Numbers that change from step to step, as row counts do, must not be: a kernel names
them in `do_not_specialize`. So no step compiles or looks up anything because a length changed.

Example: `_starts[(blocks,)](bits_RW, sums, pair_starts_R, num_rows, WORDS=1, BLOCK=256, num_warps=4)`, where num_rows
is in do_not_specialize, launches the variant (device, int32, int32, int32, 1, 256, 4).
"""

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter, or_
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction, KernelInterface

from sonic_ep.kernels.program.sizes import Size, concrete
from sonic_ep.kernels.program.trace import Variant, current_trace

# Triton specializes a kernel on pointers aligned to 16 bytes, and takes numbers below 2^31 for int32.
_ALIGNMENT, _MAX_INT32 = 16, 2**31 - 1
# The launchers that Triton compiles are private to it: these versions have the one that `Variant` calls.
_HAS_KNOWN_LAUNCHER = triton.__version__.startswith("3.6.")

_Kernel = Callable[..., None]

_current_device: Callable[[], int] = torch._C._cuda_getDevice if hasattr(torch._C, "_cuda_getDevice") else lambda: 0
_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


def fast_launch(kernel: KernelInterface[_Kernel]) -> KernelInterface[_Kernel]:
    """Decorates a Triton kernel with the launcher above. Under TRITON_INTERPRET=1 returns the kernel itself.

    Pass all run-time arguments by position, then the tl.constexpr arguments and launch options by name. Names of
    pointers end with _ptr; they get a contiguous tensor, or any other that the kernel does not access. A number that
    may exceed 32 bits and changes is annotated tl.int64.
    """
    return FastLauncher(kernel) if isinstance(kernel, JITFunction) else kernel


class FastLauncher(KernelInterface[_Kernel]):
    """One Triton kernel with its variants."""

    def __init__(self, kernel: JITFunction[_Kernel]) -> None:
        self.kernel = kernel
        self._variants: dict[tuple[object, ...], Variant] = {}
        given = [parameter for parameter in kernel.params if not parameter.is_constexpr]
        pointers = [i for i, parameter in enumerate(given) if parameter.name.endswith("_ptr")]
        changing = [i for i, parameter in enumerate(given) if parameter.do_not_specialize]
        fixed = [i for i in range(len(given)) if i not in pointers and i not in changing]
        narrow = [i for i in changing if not given[i].annotation_type]
        self._pointers, self._narrow, self._fixed = map(_items, (pointers, narrow, fixed))
        self._indices_of_fixed = fixed

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def variant(self, kinds: list[object], named: dict[str, object]) -> Variant:
        """Returns the variant for run-time arguments: kinds has dtypes or `Unaligned` for tensors, and numbers."""
        for index in self._indices_of_fixed:
            if type(kinds[index]) is Size:
                kinds[index] = _specialized(kinds[index])
        key = (_current_device(), *self._pointers(kinds), *self._fixed(kinds), *named.values())
        if key not in self._variants:
            numbers = [
                concrete(kind) if type(kind) is Size else kind for kind in kinds
            ]  # Triton takes dtypes for pointers
            self._variants[key] = self._variant(self.kernel.warmup(*numbers, grid=(1,), **named), len(kinds), named)
        return self._variants[key]

    def _launch(self, grid: tuple[int, ...], *arguments: object, **named: object) -> None:
        trace = current_trace()
        if trace is not None:
            trace.launch(self.variant, grid, arguments, named)
            return
        device = _current_device()
        dtypes = [tensor.dtype for tensor in self._pointers(arguments)]
        key = (device, *dtypes, *self._fixed(arguments), *named.values())
        variant = self._variants.get(key)
        values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        if (
            variant is None
            or functools.reduce(or_, self._pointers(values)) % _ALIGNMENT
            or max(self._narrow(values), default=0) > _MAX_INT32
        ):
            self._launch_by_triton(grid, key, arguments, named)
            return
        y, z = (*grid[1:], 1, 1)[:2]
        variant.launch(grid[0], y, z, _stream_of(device), *variant.head, *values, *variant.tail)

    def _launch_by_triton(
        self, grid: tuple[int, ...], key: tuple[object, ...], arguments: tuple[object, ...], named: dict[str, object]
    ) -> None:
        """Launches as Triton does: any variant, also for unaligned tensors and for numbers of 64 bits."""
        compiled = self.kernel[grid](*arguments, **named)
        aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in self._pointers(arguments))
        if aligned and max(self._narrow(arguments), default=0) <= _MAX_INT32:
            self._variants[key] = self._variant(compiled, len(arguments), named)

    def _variant(self, compiled: CompiledKernel, number: int, named: dict[str, object]) -> Variant:
        constants = self.kernel.params[number:]
        assert all(parameter.is_constexpr for parameter in constants), f"{self.kernel} has more run-time arguments"
        tail = tuple(named[parameter.name] for parameter in constants)
        run = compiled.run
        assert run is not None
        if not _HAS_KNOWN_LAUNCHER or run.global_scratch_size or run.profile_scratch_size:
            return Variant(_launch_compiled, (compiled,), tail)
        flags = run.launch_cooperative_grid, run.launch_pdl
        nothing = None, None, None  # metadata for hooks, and two hooks
        head = compiled.function, *flags, None, None, compiled.packed_metadata, *nothing
        passed = [i for i, kind in enumerate(compiled.src.signature.values()) if kind != "constexpr"]
        data = compiled.metadata
        assert not run.launch_cooperative_grid
        assert data.num_ctas == 1
        return Variant(
            run.launch, head, tail, compiled.function, tuple(passed), 32 * data.num_warps, data.shared, run.launch_pdl
        )


def _specialized(size: Size) -> int:
    """Returns a number for which Triton compiles the same as for this one."""
    return 1 if size == 1 else _ALIGNMENT if size % _ALIGNMENT == 0 else _ALIGNMENT + 1


def _launch_compiled(x: int, y: int, z: int, stream: int, compiled: CompiledKernel, *arguments: object) -> None:
    """Launches a compiled kernel by Triton's public interface. It takes the current stream."""
    compiled[x, y, z](*arguments)


def _items(indices: list[int]) -> Callable[[Sequence[object]], tuple[Any, ...]]:
    """Returns a function that returns these items of a sequence, as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return (lambda values: (values[indices[0]],)) if indices else (lambda _: ())


@functools.cache
def sm_major(device: torch.device) -> int:
    """Returns the major compute capability of a GPU, cached; 0 for the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
