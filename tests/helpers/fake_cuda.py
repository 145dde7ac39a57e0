"""Programs of a layer on a machine without a GPU: kernels and GEMMs that are never compiled, a CUDA driver that does
nothing, and symmetric memory of one process.

A layer's step is traced as on a Hopper GPU, and its programs allocate and run; only nothing is computed.
"""

import ctypes
import functools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sonic_ep import EPGroup, MoEConfig, TransportConfig
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.kernels import backend
from sonic_ep.kernels.program import native, program
from sonic_ep.kernels.program.c_library import UnavailableError, compiled_library
from sonic_ep.kernels.program.foreign import Arguments
from sonic_ep.kernels.program.mailbox import Mailbox
from sonic_ep.kernels.program.native import ITEM
from sonic_ep.kernels.program.program import Program
from sonic_ep.kernels.route.status.reference import HEADER
from sonic_ep.routing import SplitSizes
from sonic_ep.steps import programs
from sonic_ep.steps.programs import Ranks
from sonic_ep.steps.router_trace import Kind
from sonic_ep.symmetric_memory import PeerMemory
from sonic_ep.transports import GroupTransport

CUDA, HOPPER = torch.device("cuda", 0), (9, 0)
_SMS, _LAUNCH = 132, "sonic_ep.kernels.common.launch"
_MAX_TOKENS, STATIC_TOKENS = 2**14, 4096  # of a rank, on several
_nothing = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)  # C passes more arguments, which it does not read


_Dims = ctypes.POINTER(ctypes.c_int64)
_EMPTY = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_int64, _Dims, _Dims, *[ctypes.c_int32] * 3, ctypes.POINTER(ctypes.c_void_p)
)
_DELETE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
Shape = tuple[int, ...]


class Memory:
    """What programs allocate, on the CPU. live: shapes, by handle, of what no program has freed.

    on_allocate: called with a shape in front of each allocation.
    """

    def __init__(self) -> None:
        self.live: dict[int, Shape] = {}
        self.on_allocate: Callable[[Shape], object] = lambda _: None

    def functions(self) -> list[Any]:
        """Returns torch's part of the table of launch.c."""
        empty, from_blob, view, data, delete, _ = native.functions_of_torch("cpu")

        @_EMPTY
        def allocate(dims: int, sizes: Any, strides: Any, dtype: int, kind: int, device: int, result: Any) -> int:
            shape = tuple(sizes[:dims])
            self.on_allocate(shape)
            error = empty(ctypes.c_int64(dims), sizes, strides, dtype, kind, device, result)
            self.live[result[0]] = shape
            return error

        @_DELETE
        def free(handle: int) -> int:
            self.live.pop(handle, None)  # or a view
            return delete(ctypes.c_void_p(handle))

        return [allocate, from_blob, view, data, free, _nothing]


class _Function:
    """A compiled GEMM, for tvm-ffi."""

    def __chandle__(self) -> int:
        return 1


@contextmanager
def fake_cuda() -> Generator[Memory]:
    """A context with these fakes. Skips the test where a package or a C compiler is missing, and on a GPU."""
    if torch.cuda.is_available():
        pytest.skip("imitates a GPU on a machine without one")
    for package in (*backend.CUDA_MODULES, "tvm_ffi"):
        pytest.importorskip(package)
    try:
        library = ctypes.PyDLL(str(compiled_library()))
    except UnavailableError as error:
        pytest.skip(str(error))
    memory = Memory()
    of_torch = memory.functions()
    launch = native.bound(library, *[_nothing] * 7, *of_torch)
    with ExitStack() as stack:
        replace = functools.partial(_replace, stack)
        replace(torch.cuda, get_device_capability=lambda _=None: HOPPER)
        properties = SimpleNamespace(multi_processor_count=_SMS, name="imitated")
        replace(torch.cuda, get_device_properties=lambda _=None: properties)
        replace(torch.cuda, is_current_stream_capturing=lambda: False)
        replace(torch.cuda, Stream=lambda _: SimpleNamespace(cuda_stream=0))
        replace(programs, launcher=lambda: launch)
        of_cpu, counter = native.number_of_device_type("cpu"), torch.zeros(2, dtype=torch.int32)
        replace(program, launcher=lambda: launch, raw_stream=lambda _: 0, new_event=lambda: 1)
        replace(program, ensure_context=lambda _: None)
        replace(program, number_of_device_type=lambda _: of_cpu, tile_counter=lambda *_, **__: counter)
        _replace_triton(stack)
        _replace_gemms(stack)
        rows, kernels = map(import_module, ("sonic_ep.kernels.dispatch.symmetric.rows", _LAUNCH))
        for cached in (backend._router_linear_on_gpu, backend._on_gpu, rows._multiprocessors, kernels.sm_major):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        yield memory


def _replace(stack: ExitStack, target: Any, **values: Any) -> None:
    for name, value in values.items():
        stack.enter_context(patch.object(target, name, value))


def _replace_triton(stack: ExitStack) -> None:
    """Launches are noted also where kernels are interpreted, and a variant of a kernel is no code."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    launch: Any = import_module(_LAUNCH)

    @functools.cache
    def compiled_twin(kernel: Any) -> Any:
        return launch.FastLauncher(JITFunction(kernel.fn, **kernel.kwargs))

    def variant(self: Any, code: Any, number: int, named: Any) -> Any:
        return launch.Variant(print, (), (), 1, tuple(range(number)), 128)

    stack.enter_context(
        patch.object(InterpretedFunction, "__getitem__", lambda self, grid: compiled_twin(self)[grid], create=True)
    )
    _replace(stack, JITFunction, warmup=lambda *_, **__: None)
    _replace(stack, launch.FastLauncher, _variant=variant)
    _replace(stack, launch, _current_device=lambda: -1)  # nobody else finds the variants


def _replace_gemms(stack: ExitStack) -> None:
    gemms: Any = import_module("sonic_ep.kernels.experts.grouped_gemm")
    weights: Any = import_module("sonic_ep.kernels.experts.sm90.wgrad")

    def launcher(operation: str, mod: Any, tile: Any, tensors: Any, reserve_for: Any, operands: Any) -> Any:
        made: Any = gemms.EpiLauncher.__new__(gemms.EpiLauncher)
        made._order, made._epilogue, made._launch = list(range(len(operands))), tuple, _Function()
        made.needs_counter, made._schedulers = True, {}
        made._gemm = SimpleNamespace(max_active_clusters=_SMS, max_swizzle_size=8)
        return made

    for module in (gemms, weights):
        _replace(stack, module, get_device_capacity=lambda _: HOPPER)
    _replace(stack, gemms, _compiled=launcher, _of_kind=lambda slot: slot, wait_for=lambda _: None)
    _replace(stack, weights, _compile_weight_gemm=lambda *_: _Function(), max_active_clusters=lambda *_: _SMS)
    for known in (gemms._LAUNCHERS, gemms._WEIGHT_GEMMS):
        stack.enter_context(patch.dict(known, clear=True))


def kind_of(
    config: MoEConfig, num_ranks: int = 1, *, training: bool = True, dtype: torch.dtype = torch.bfloat16
) -> Kind:
    """The step of a layer on such a GPU, of which everything needs gradients in training."""
    ranks = None if num_ranks == 1 else ranks_of(num_ranks, config.d, config.E, config.K, dtype=dtype)
    biases = config.router.linear_bias, config.bias, config.bias
    present = True, biases[0], True, True, *biases[1:]
    needs, router = (training,) * (1 + sum(present)), (torch.float32,) * (1 + biases[0])
    return Kind(config, training, needs, present, dtype, router, CUDA, ranks)


def ranks_of(
    size: int, d: int, E: int, K: int, *, dtype: torch.dtype = torch.bfloat16, is_static: bool = False
) -> Ranks:
    """Ranks of which only the first exists: all have its memory."""
    group: Any = EPGroup.alone()
    group.size, group.name, group._watch = size, "imitated", SimpleNamespace(layer=0)

    def allocate(num_bytes: int) -> PeerMemory:
        own = torch.empty(num_bytes, dtype=torch.uint8)
        return PeerMemory(own, torch.zeros(size, dtype=torch.int64), [own] * size)

    symmetric = SymmetricTransport(group, allocate, timeout=60, static=is_static)
    symmetric._buffers.rows(d * dtype.itemsize, _MAX_TOKENS)
    symmetric._buffers.lists(2 * K * _MAX_TOKENS)
    symmetric._buffers.counts(16 * E)
    symmetric._tokens = STATIC_TOKENS if is_static else None
    symmetric._signal_pad()
    transport: Any = GroupTransport.__new__(GroupTransport)
    transport.group, transport.config, transport._chosen = group, TransportConfig(), {CUDA.type: symmetric}
    return Ranks(group, transport, symmetric, is_static, 1, mailbox(size))


def mailbox(num_ranks: int) -> Mailbox:
    made: Any = Mailbox.__new__(Mailbox)
    made.values, made._event = torch.zeros(SplitSizes.num_values(num_ranks, HEADER), dtype=torch.int64), 1
    return made


def _function(call: Any) -> object:
    function = call.function
    return (function.func, *function.args) if isinstance(function, functools.partial) else function


def described(program: Program, sizes: tuple[int, ...]) -> dict[str, object]:
    """All that a run with these sizes depends on, but for what is at another address in each program."""
    native: Any = program._native[2]
    items, arguments, held = native
    return {
        "values": program._values_for(sizes),
        "segments": [
            (*where, [(_function(call), *call[1:]) for call in calls], dropped)
            for *where, calls, dropped in program._segments
        ],
        "items": [each[2:] for each in ITEM.iter_unpack(items.raw)],
        "arguments": [*arguments],
        "GEMMs": [(each._bytes, each._pointers, each.patches) for each in held if isinstance(each, Arguments)],
        "outputs": (program._outputs, program.extra, [getattr(each, "text", each) for each in program.in_block]),
    }
