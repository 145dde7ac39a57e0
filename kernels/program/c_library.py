"""launch.c, built once by the C compiler that Triton needs too.

The library goes to `cache_folder`, under a name with a digest of its source. A file that another user may have
written is not loaded.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

from sonic_ep.kernels.common.cache import cache_folder, problem_with_access

_SOURCE = Path(__file__).with_name("launch.c")
_COMPILERS = ("cc", "gcc", "clang")
_MAX_SECONDS = 120


class UnavailableError(RuntimeError):
    """Raised where launch.c cannot be compiled: without a C compiler, cuda.h, or a folder of this user."""


@functools.cache
def compiled_library() -> Path:
    """Returns the path of the compiled launch.c. Raises UnavailableError if it cannot be compiled."""
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    path = cache_folder() / f"launch_{digest}.so"
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
    command = [compiler, "-O2", "-shared", "-fPIC", f"-I{header_folder()}", str(_SOURCE), "-o", written]
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
