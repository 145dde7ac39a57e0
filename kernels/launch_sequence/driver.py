"""The compiled part: driver.c, built once by the C compiler that Triton needs too, and its functions.

The library goes to `cache_folder`, under a name with a digest of its source. What another user may have written is not
loaded.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sonic_ep.kernels.common.cache import cache_folder, problem_with_access

_SOURCE = Path(__file__).with_name("driver.c")
_DRIVER = b"libcuda.so.1"
_COMPILERS = ("cc", "gcc", "clang")
_MAX_SECONDS = 120


class UnavailableError(RuntimeError):
    """Raised where sequences cannot be launched: without a C compiler, cuda.h, a driver that is new enough, or a folder
    of this user."""


def compiled_library() -> Path:
    """Returns the path of the compiled driver.c. Raises UnavailableError if it cannot be compiled."""
    return compiled("driver.c")


@functools.cache
def compiled(name: str) -> Path:
    """Returns the path of a compiled file. Raises UnavailableError if it cannot be compiled."""
    source = _SOURCE if name == "driver.c" else _SOURCE.parent.parent / "program" / name
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    path = cache_folder() / f"launch_sequence_{digest}.so"
    if (problem := problem_with_access(path.parent)) is not None:
        raise UnavailableError(problem)
    if path.exists() and problem_with_access(path) is None:
        return path
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise UnavailableError(f"none of {', '.join(_COMPILERS)} is on the PATH; install one, or set CC to one")
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    handle, written = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    command = [compiler, "-O2", "-shared", "-fPIC", f"-I{header_folder()}", str(source), "-o", written, "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_MAX_SECONDS)
        Path(written).chmod(0o755)
        Path(written).replace(path)  # at once, because other ranks may do the same
    except (OSError, subprocess.SubprocessError) as error:
        Path(written).unlink(missing_ok=True)
        reason = getattr(error, "stderr", None) or error
        raise UnavailableError(f"{' '.join(command)} failed: {reason}") from error
    return path


def header_folder() -> Path:
    """Returns the folder of cuda.h: Triton brings one, and so does a CUDA toolkit."""
    triton = find_spec("triton")
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    if triton is not None and triton.origin is not None:
        folders.insert(0, Path(triton.origin).parent / "backends" / "nvidia" / "include")
    for folder in folders:
        if (folder / "cuda.h").exists():
            return folder
    raise UnavailableError(f"cuda.h is in none of {', '.join(map(str, folders))}; install triton, or set CUDA_HOME")


@functools.cache
def library() -> Any:
    """Returns the library with typed functions, without the driver's: enough to read and relocate blocks."""
    loaded = ctypes.CDLL(str(compiled_library()))
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("sequence_initialize", ctypes.c_char_p, [ctypes.c_char_p]),
        ("sequence_captured_nodes", ctypes.c_int64, [pointer]),
        ("sequence_is_known_memory", integer, [ctypes.c_uint64]),
        ("sequence_make_stream", pointer, []),
        ("sequence_begin_capture", integer, [pointer]),
        ("sequence_end_capture", pointer, [pointer]),
        ("sequence_destroy_graph", None, [pointer]),
        ("sequence_read", ctypes.c_char_p, [pointer, ctypes.POINTER(pointer)]),
        ("sequence_free", None, [pointer]),
        ("sequence_num_nodes", integer, [pointer]),
        ("sequence_num_lanes", integer, [pointer]),
        ("sequence_name", ctypes.c_char_p, [pointer, integer]),
        ("sequence_may_be_padding", integer, [pointer, integer, ctypes.c_uint32]),
        ("sequence_may_be_address", integer, [pointer, integer, ctypes.c_uint32]),
        ("sequence_block", pointer, [pointer, integer, ctypes.POINTER(ctypes.c_uint32)]),
        ("sequence_equal_but_for_blocks", integer, [pointer, pointer]),
        ("sequence_relocate", integer, [pointer, integer, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_int64]),
        ("sequence_wait", integer, [pointer, integer, ctypes.c_int64]),
        ("sequence_launch", integer, [pointer, integer, integer, pointer, pointer]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@functools.cache
def driver() -> Any:
    """Returns the library, connected to the CUDA driver. Raises UnavailableError if that lacks a function."""
    loaded = library()
    missing = loaded.sequence_initialize(_DRIVER)
    if missing is not None:
        raise UnavailableError(f"there is no {missing.decode()}; update the CUDA driver to 12.8 or later")
    return loaded


def raw_stream(device: torch.device) -> int:
    """Returns `torch.cuda.current_stream(device).cuda_stream` in a fraction of its time. device: with an index."""
    return torch._C._cuda_getCurrentRawStream(device.index)
