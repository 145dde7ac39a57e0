"""What came out of a kernel compiler, read back: cubins to machine code, and what must (not) be in it."""

import os
import re
import struct
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from sonic_ep.extras import missing_extra
from sonic_ep.kernels.backend import CUDA_MODULES

NVDISASM = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "nvdisasm"
TENSOR_CORE = {"sm_90a": "HGMMA", "sm_100a": "UTCHMMA"}
_EM_CUDA = 190  # the ELF machine number of a cubin
_ACCELERATORS = 0x800  # in the flags of one: the "a" of sm_90a
_INSTRUCTION = 16  # bytes
_MISSING = missing_extra("cuda", *CUDA_MODULES)
if _MISSING is None and not NVDISASM.is_file():
    _MISSING = "nvdisasm not found; pip install nvidia-cuda-nvdisasm"

# `make test` installs all of it on Linux: in CI a missing piece fails the tests.
needs_compilers = pytest.mark.skipif(_MISSING is not None and "CI" not in os.environ, reason=str(_MISSING))


def cubin(compiled: Path) -> bytes:
    """The device code inside a compiled object; empty if there is none."""
    data = compiled.read_bytes()
    starts = [match.start() for match in re.finditer(b"\x7fELF", data)]
    device = [start for start in starts if int.from_bytes(data[start + 18 : start + 20], "little") == _EM_CUDA]
    return data[device[0] :] if device else b""


def faults(cubins: Sequence[bytes], arch: str, *, tensor_core: bool) -> list[list[str]]:
    """What is wrong with the machine code of each kernel for `arch`, with the kernel's name. All are read at once:
    the disassembler takes longer to start than to read one.
    """
    kernels = [_kernel(cubin) for cubin in cubins]
    instructions = iter(_disassembled(b"".join(code for _, code in kernels), arch))
    found = []
    for (name, code), cubin in zip(kernels, cubins, strict=True):
        own = "\n".join(islice(instructions, len(code) // _INSTRUCTION))
        spills = re.findall(r"\b(?:STL|LDL)\b", own)
        ails = {
            "no kernel in it": not own,
            f"not for {arch}": _architecture(cubin) != arch,
            f"{len(spills)} accesses to spilled registers": bool(spills),
            f"no {TENSOR_CORE[arch]}": tensor_core and TENSOR_CORE[arch] not in own,
        }
        found.append([f"{name}: {fault}" for fault, present in ails.items() if present] if cubin else ["no cubin"])
    return found


def _kernel(cubin: bytes) -> tuple[str, bytes]:
    """Name and machine code, from the sections named .text.NAME."""
    if not cubin:
        return "", b""
    (table,), (size, number, of_names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<3H", cubin, 0x3A)
    # name, type, flags, address, offset, size of each
    sections = [struct.unpack_from("<2I4Q", cubin, table + size * index) for index in range(number)]
    names_at, found = sections[of_names][4], {}
    for name_at, _, _, _, offset, length in sections:
        start = names_at + name_at
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".text."):
            found[name.removeprefix(".text.")] = cubin[offset : offset + length]
    return next(iter(found), ""), b"".join(found.values())


def _architecture(cubin: bytes) -> str | None:
    """sm_90a: of ABI 8 from the options that its compiler notes, of older ones from the ELF flags."""
    if cubin[8:9] >= b"\x08":
        noted = re.search(rb"-arch (sm_\w+)", cubin)
        return noted and noted[1].decode()
    flags = int.from_bytes(cubin[0x30:0x34], "little")
    return f"sm_{flags & 0xFF}{'a' if flags & _ACCELERATORS else ''}"


def _disassembled(code: bytes, arch: str) -> list[str]:
    if not code:
        return []
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(code)
        file.flush()
        command = [str(NVDISASM), "-b", f"SM{arch.removeprefix('sm_')}", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.+)$", text, flags=re.MULTILINE)
    assert len(lines) * _INSTRUCTION == len(code), f"{len(lines)} instructions in {len(code)} bytes"
    return lines
