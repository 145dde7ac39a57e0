"""launch.c: compiled once by the C compiler that Triton needs too, and called without giving up Python's lock."""

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sonic_ep.kernels.program.c_library import compiled_library

ITEM = struct.Struct("PP2I3I3I2I")  # an Item of launch.c
KERNEL, SET, COPY, RECORD, WAIT, CALL, ALLOCATE, FREE, VIEW, ADDMM = range(10)  # its kinds
MAX_ARGUMENTS, MAX_DIMS = 64, 4  # of a kernel, and of what is allocated


@functools.cache
def launcher() -> Callable[..., int]:
    """Returns a function of the address of the first item, the number of items, the addresses of arguments and values,
    the streams by lane, a type of devices and a device. It runs them and returns CUDA's error, -1 - the number of an
    item that failed, or 0.
    """
    import tvm_ffi

    library = ctypes.PyDLL(str(compiled_library()))
    driver, ffi = _driver(), tvm_ffi.LIB
    return bound(
        library,
        driver.cuLaunchKernelEx,
        driver.cuMemsetD8Async,
        driver.cuMemcpyAsync,
        driver.cuEventRecord,
        driver.cuStreamWaitEvent,
        ffi.TVMFFIFunctionCall,
        ffi.TVMFFIEnvSetStream,
        *functions_of_torch("cuda"),
    )


def functions_of_torch(device_type: str) -> list[Callable[..., int]]:
    """Returns torch's last functions of the table in launch.c."""
    names = "empty_strided create_tensor_from_blob _reinterpret_tensor get_data_ptr delete_tensor_object".split()
    addmm = _library_of_torch(device_type)[f"aoti_torch_{device_type}_addmm_out"]
    return [*[_library_of_torch("cpu")[f"aoti_torch_{name}"] for name in names], addmm]


@functools.cache
def number_of_dtype(dtype: torch.dtype) -> int:
    """Returns torch's number of a dtype."""
    return _library_of_torch("cpu")["aoti_torch_dtype_" + str(dtype).removeprefix("torch.")]()


def number_of_device_type(device_type: str) -> int:
    """Returns torch's number of a type of devices."""
    return _library_of_torch("cpu")[f"aoti_torch_device_type_{device_type}"]()


def tensor_at(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: tuple[int, int]
) -> Tensor:
    """Returns a tensor in memory that somebody else owns. device: torch's number of its type, and its index."""
    dims, handle = len(shape), ctypes.c_void_p()
    numbers, create = _numbers_of(dims), _create_tensor()
    sizes, steps = numbers(*shape), numbers(*strides)
    error = create(address, dims, sizes, steps, 0, number_of_dtype(dtype), *device, ctypes.byref(handle))
    if error or handle.value is None:
        raise RuntimeError(f"torch made no tensor of shape {tuple(shape)} and dtype {dtype} on {device}")
    return tensors_of([handle.value])[0]


@functools.cache
def _create_tensor() -> Callable[..., int]:
    function = _library_of_torch("cpu")["aoti_torch_create_tensor_from_blob"]
    pointer, number, kind = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    function.argtypes = [pointer, number, pointer, pointer, number, kind, kind, kind, pointer]
    return function


@functools.cache
def _numbers_of(count: int) -> "type[ctypes.Array[ctypes.c_int64]]":
    return ctypes.c_int64 * count


@functools.cache
def _library_of_torch(device_type: str) -> ctypes.PyDLL:
    return ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_{device_type}.so"))


def tensors_of(handles: Iterable[int]) -> list[Tensor]:
    """Returns the tensors that items allocated, and takes them over: nobody else may use the handles any more."""
    tensors_of_pointers = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs  # pyright: ignore[reportAttributeAccessIssue]
    return tensors_of_pointers([_new_capsule(each, None, None) for each in handles])


_new_capsule: Callable[..., object] = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3  # type: ignore[attr-defined]


def bound(library: ctypes.PyDLL, *functions: Callable[..., int]) -> Callable[..., int]:
    """Returns `program_launch` of the library, with these functions of CUDA's driver and of tvm-ffi."""
    pointer = ctypes.c_void_p
    table = (pointer * len(functions))(*[ctypes.cast(each, pointer) for each in functions])
    function = library.program_launch
    function.restype = ctypes.c_int
    function.argtypes = [pointer, ctypes.c_int, pointer, pointer, pointer, ctypes.c_int, ctypes.c_int, pointer]

    def launch(items: int, number: int, arguments: int, values: int, streams: int, kind: int, device: int) -> int:
        return function(items, number, arguments, values, streams, kind, device, table)

    return launch


def address_of(memory: ctypes.Array | ctypes.Structure) -> int:
    """Returns the address of a ctypes object."""
    return ctypes.addressof(memory)


def new_event() -> int:
    """Returns a CUDA event without timing. It is never destroyed: programs live as long as their layer's config."""
    event = ctypes.c_void_p()
    error = _driver().cuEventCreate(ctypes.byref(event), 2)  # CU_EVENT_DISABLE_TIMING
    if error or event.value is None:
        raise RuntimeError(f"CUDA returned error {error} for an event")
    return event.value


def wait_for_event(event: int) -> None:
    """Blocks until the device has come to where the event was recorded last. Raises RuntimeError if it has failed."""
    error = _driver().cuEventSynchronize(ctypes.c_void_p(event))
    if error:
        torch.cuda.synchronize()  # raises, with all that CUDA says
        raise RuntimeError(f"CUDA returned error {error} for an event")


def event_has_passed(event: int) -> bool:
    """Returns False while the device has not come to where the event was recorded last."""
    return _driver().cuEventQuery(ctypes.c_void_p(event)) != 600  # CUDA_ERROR_NOT_READY; others: `wait_for_event`


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def raw_stream(device: torch.device) -> int:
    """Returns `torch.cuda.current_stream(device).cuda_stream` in a fraction of its time. device: with an index."""
    return torch._C._cuda_getCurrentRawStream(device.index)


class _Thread(threading.local):
    has_context = False


_THREAD = _Thread()


def ensure_context(device: torch.device) -> None:
    """Makes a CUDA context current on this thread. A thread of autograd has none in its first backward, where torch
    warns of it as soon as it runs cuBLAS."""
    if _THREAD.has_context:
        return
    context, driver = ctypes.c_void_p(), _driver()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if context.value is None:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index)
        driver.cuCtxSetCurrent(context)
    _THREAD.has_context = True
