"""Compiles the grouped GEMMs of a layer in other processes, while this one starts, and shows how far they are.

A GEMM takes seconds to compile, half of them in Python code and all of them under Python's lock, so threads would gain
nothing. `start` starts one process, sonic_ep.kernels.experts.aot, which imports quack and then forks a process for each
GEMM. They fill quack's cache, and `wait_for` returns once a GEMM is in it. Forking this process instead would save the
imports, but it may have threads and has used CUDA.

Of all ranks on a host, the first to lock the progress file starts the process, which holds the lock as long as it or a
process of its own lives. The file names the operations to compile, then those that are done. If all are, the next start
finds the file complete and starts nothing. The file lies in quack's cache folder, so that the two are deleted together.

A GEMM that is not in the cache after the wait, because a process has failed, say, is compiled where it is launched, as
all are if `num_processes` is less than 2.
"""

import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sonic_ep.kernels.common.cache import problem_with_quack_cache, quack_cache_folder
from sonic_ep.kernels.common.sources import sources_of
from sonic_ep.kernels.common.versions import SUPPORTED, installed_version

_LOG = logging.getLogger("sonic_ep.kernels")
_MODULE = "sonic_ep.kernels.experts.aot"
# quack's and CuTe-DSL's names of the GPUs that we have kernels for.
ARCHITECTURES = {(9, 0): ("90", "sm_90a"), (10, 0): ("100", "sm_100a")}
CAPABILITIES = {cute_arch: capability for capability, (_, cute_arch) in ARCHITECTURES.items()}
# Seconds: until a process that hangs is given up; between two looks at the file; until a line is worth printing.
_TIMEOUT, _INTERVAL, _NOTICEABLE = 300.0, 0.02, 2.0
_PROGRESS_FOLDER = "sonic_ep"


class Gemms(NamedTuple):
    """All that the grouped GEMMs of a layer depend on, besides the GPU.

    d, n: hidden size and expert width. dtype: "bfloat16" or "float16". split_gate_up: gate and up are two tensors.
    accumulate: gradients of weights are added to fp32 buffers. transposed: weights are (e, H, J) and (e, I, H).
    ranks: of the low-rank updates of W1 and W2; 0 for none.
    """

    d: int
    n: int
    activation: str
    dtype: str
    bias: bool = False
    split_gate_up: bool = False
    accumulate: bool = False
    transposed: bool = False
    ranks: tuple[int, int] = (0, 0)


class Progress(NamedTuple):
    """A progress file: the operations to compile, and those that are done. None are known to begin with."""

    wanted: tuple[str, ...] = ()
    done: tuple[str, ...] = ()

    def has(self, operation: str) -> bool:
        return bool(self.wanted) and self.done.count(operation) >= self.wanted.count(operation)

    @property
    def complete(self) -> bool:
        return bool(self.wanted) and len(self.done) >= len(self.wanted)


def num_processes() -> int:
    """Returns how many GEMMs to compile at once: SONIC_EP_COMPILE_PROCESSES, by default the number of cores."""
    chosen = os.environ.get("SONIC_EP_COMPILE_PROCESSES", "")
    if chosen.isdecimal():
        return int(chosen)
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def write_wanted(file: int, operations: list[str]) -> None:
    """Writes which operations will be compiled; the first line of a progress file."""
    os.write(file, f"{' '.join(operations)}\n".encode())


def write_done(file: int, operation: str) -> None:
    """Writes that an operation was compiled, or cannot be compiled here."""
    os.write(file, f"{operation}\n".encode())


def read_progress(path: Path) -> Progress:
    """Returns what the file says. A line without its end is being written."""
    first, *lines = path.read_text(encoding="utf-8").split("\n")
    return Progress(tuple(first.split()), tuple(lines[:-1])) if lines else Progress()


@functools.cache
def start(gemms: Gemms, capability: tuple[int, int]) -> None:
    """Starts to compile these GEMMs, unless all were compiled before or another process compiles them.

    Returns at once. capability: of the GPU, (major, minor). A failure is logged, and no error.
    """
    if sys.platform != "linux" or not sys.executable or num_processes() < 2 or capability not in ARCHITECTURES:
        return
    if _has_another_cache():
        return
    try:
        path = _progress_file(gemms, capability)
        if not (path.exists() and read_progress(path).complete):
            _compilations.append(_Compilation(path, gemms, capability))
    except OSError as error:
        _LOG.info("GEMMs are compiled one after the other: %s", error)


def mark_compiled(gemms: Gemms, capability: tuple[int, int], operations: list[str]) -> None:
    """Makes the next `start` find that these GEMMs were compiled. operations: theirs."""
    lines = [" ".join(operations), *operations, ""]
    _progress_file(gemms, capability).write_text("\n".join(lines), encoding="utf-8")


def wait_for(operation: str) -> None:
    """Returns once the operation was compiled by what `start` started, or that has ended.

    operation: a name of tile_table.py's Operation, for all GEMMs of that name.
    """
    for compilation in [*_compilations]:
        compilation.wait_for(operation)


def _has_another_cache() -> bool:
    """Whether this process does not read the cache that another would fill."""
    is_off = os.environ.get("QUACK_CACHE_ENABLED", "1") != "1" or problem_with_quack_cache() is not None
    # Our own import of quack says which folder it uses.
    return is_off or ("quack" in sys.modules and "sonic_ep.kernels.experts.quack_compat" not in sys.modules)


def _progress_file(gemms: Gemms, capability: tuple[int, int]) -> Path:
    """Returns a path that is another one whenever compiled GEMMs of the cache would not be found."""
    versions = [installed_version(package) for package in (*SUPPORTED, "apache-tvm-ffi")]
    key = repr((gemms, capability, sys.version_info[:2], versions, sources_of(_MODULE)))
    folder = quack_cache_folder() / _PROGRESS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.txt"


class _Compilation:
    """A process that compiles, of this rank or of another one, seen through its progress file."""

    def __init__(self, path: Path, gemms: Gemms, capability: tuple[int, int]) -> None:
        import fcntl  # Unix alone has it

        self._path, self._arch, self._begun = path, ARCHITECTURES[capability][1], time.monotonic()
        self._progress, self._line = Progress(), None
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another rank's
        else:
            os.truncate(file, 0)
            self._line = _Line()
            _spawn(gemms, capability, file)
        finally:
            os.close(file)  # the lock is the new process's now

    def wait_for(self, operation: str) -> None:
        while not self._ended() and not self._progress.has(operation):
            if self._line is not None:
                self._line.show(self._text(), time.monotonic() - self._begun)
            time.sleep(_INTERVAL)
        if self._line is not None:
            self._line.erase()

    def _ended(self) -> bool:
        """Looks at the file. Once there is nothing more to wait for, nothing waits for it again."""
        try:
            locked = _is_locked(self._path)  # in this order: what is written before the end is read
            self._progress = read_progress(self._path)
        except OSError:  # the cache is being deleted, say
            locked, self._progress = False, Progress()
        is_late = time.monotonic() - self._begun > _TIMEOUT
        if locked and not self._progress.complete and not is_late:
            return False
        with suppress(ValueError):  # another thread has seen it
            _compilations.remove(self)
            if not self._progress.complete:
                _LOG.warning("%s; it has %s, the rest is compiled here", self._text(), "hung" if is_late else "ended")
            elif self._line is not None:
                _LOG.info("%s", self._text())
        return True

    def _text(self) -> str:
        wanted, done = map(len, self._progress)
        folder = str(self._path.parent.parent).replace(str(Path.home()), "~", 1)
        return (
            f"sonic_ep: compiling {wanted or 'the'} kernels for {self._arch} (once, into {folder}): "
            f"{f'{done}/{wanted}' if wanted else 'starting'}, {time.monotonic() - self._begun:.0f} s"
        )


_compilations: list[_Compilation] = []


def _is_locked(path: Path) -> bool:
    """Whether a process holds the lock of `_Compilation`."""
    import fcntl

    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _spawn(gemms: Gemms, capability: tuple[int, int], file: int) -> None:
    quack_arch, cute_arch = ARCHITECTURES[capability]
    environment = {"QUACK_ARCH": quack_arch, "CUTE_DSL_ARCH": cute_arch} | os.environ
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",  # it compiles without a GPU, and must not ask for one
        "OMP_NUM_THREADS": "1",  # no library may start a thread before the fork
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(path) or os.getcwd() for path in sys.path),
        "QUACK_CACHE_DIR": str(quack_cache_folder()),
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, json.dumps(gemms._asdict()), str(file), str(num_processes())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        pass_fds=(file,),
    )
    threading.Thread(target=process.wait, name="sonic_ep compiles", daemon=True).start()  # so that it leaves no zombie


class _Line:
    """A line on standard error: rewritten on a terminal, elsewhere printed once and only after a while."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str, seconds: float) -> None:
        if _is_terminal():
            if text != self._shown:
                _write(f"\r\x1b[K{text}")
                self._shown = text
        elif seconds > _NOTICEABLE and not self._shown:
            _write(f"{text}\n")
            self._shown = text

    def erase(self) -> None:
        """Clears the line of a terminal, so that the program's own output does not follow it."""
        if self._shown and _is_terminal():
            _write("\r\x1b[K")
            self._shown = ""


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _write(text: str) -> None:
    if sys.stderr is not None:  # as in a process without a console
        sys.stderr.write(text)
        sys.stderr.flush()
