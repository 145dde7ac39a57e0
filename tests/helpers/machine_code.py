"""What came out of a kernel compiler, read back: cubins to machine code, and what must (not) be in it."""

import os
import re
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

from sonic_ep.extras import missing_extra
from sonic_ep.kernels.operations import CUDA_MODULES

NVDISASM = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "nvdisasm"
TENSOR_CORE = {"sm_90a": "HGMMA", "sm_100a": "UTCHMMA"}
_EM_CUDA = 190  # the ELF machine number of a cubin
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


def faults(cubin: bytes, arch: str, *, tensor_core: bool) -> list[str]:
    """What is wrong with a kernel's machine code for `arch`, each with the kernel's name."""
    if not cubin:
        return ["no cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = subprocess.run([str(NVDISASM), "-c", file.name], capture_output=True, text=True, check=True).stdout
    kernel = re.search(r"^\.text\.(\w+):$", code, flags=re.MULTILINE)
    spills = re.findall(r"\b(?:STL|LDL)\b", code)
    found = {
        "no kernel in it": kernel is None,
        f"not for {arch}": re.search(rf"\.target\t{arch}$|EF_CUDA_SM{arch[3:-1]}\b", code[:500], re.MULTILINE) is None,
        f"{len(spills)} accesses to spilled registers": bool(spills),
        f"no {TENSOR_CORE[arch]}": tensor_core and TENSOR_CORE[arch] not in code,
    }
    return [f"{kernel and kernel[1]}: {fault}" for fault, present in found.items() if present]
