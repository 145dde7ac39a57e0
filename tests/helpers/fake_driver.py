"""A CUDA driver without a GPU (fake_driver.c): graphs that a test builds, and a log of what is launched on them."""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sonic_ep.kernels.launch_sequence import driver


def load(folder: Path) -> Any:
    """Compiles it into a folder and connects driver.c to it. Skips the test without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path, source = folder / "fake_driver.so", Path(__file__).with_name("fake_driver.c")
    command = [compiler, "-shared", "-fPIC", f"-I{driver.header_folder()}", str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    assert driver.library().sequence_initialize(str(path).encode()) is None
    fake = ctypes.CDLL(str(path))
    fake.fake_log.restype = ctypes.c_char_p
    return fake


class FakeGraph:
    """A captured graph, node by node."""

    def __init__(self, fake: Any) -> None:
        self._fake = fake
        self.reset()

    def reset(self) -> None:
        self._fake.fake_reset()

    def kernel(self, function: int, *words: int, after: Sequence[int] = (), edge: int = 0, cluster: int = 0) -> None:
        """words: the parameters, 8 bytes each. after: the nodes that it depends on, by edges of that type."""
        self.kernel_with_sizes(function, [8] * len(words), struct.pack(f"<{len(words)}Q", *words), after, edge, cluster)

    def kernel_with_sizes(
        self,
        function: int,
        sizes: Sequence[int],
        data: bytes,
        after: Sequence[int] = (),
        edge: int = 0,
        cluster: int = 0,
    ) -> None:
        """data: the parameters behind each other, of these sizes in bytes."""
        self._fake.fake_kernel(
            ctypes.c_ulong(function),
            len(sizes),
            (ctypes.c_uint32 * len(sizes))(*sizes),
            data,
            cluster,
            *self._dependencies(after, edge),
        )

    def operation(self, *operands: int, copy: bool, after: Sequence[int] = ()) -> None:
        """operands: of a copy destination, source, bytes and rows; of a fill destination, value, size and number."""
        self._fake.fake_operation(copy, (ctypes.c_uint64 * 4)(*operands), *self._dependencies(after, 0))

    def _dependencies(self, after: Sequence[int], edge: int) -> tuple[int, Any, Any]:
        number = len(after)
        return number, (ctypes.c_int * number)(*after), (ctypes.c_int * number)(*[edge] * number)

    def log(self) -> list[str]:
        """Returns what was launched since the last call."""
        lines = self._fake.fake_log().decode().splitlines()
        self._fake.fake_clear_log()
        return lines
