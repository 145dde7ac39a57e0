"""The whole kernel matrix compiles for Hopper and Blackwell without a GPU, onto the tensor cores, without spills."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from sonic_ep.extras import missing_extra
from sonic_ep.kernels.operations import CUDA_MODULES

NVDISASM = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin" / "nvdisasm"
MISSING = missing_extra("cuda", *CUDA_MODULES)
EM_CUDA = 190  # the ELF machine number of a cubin
TENSOR_CORE = {"sm_90a": "HGMMA", "sm_100a": "UTCHMMA"}

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=str(MISSING)),
    pytest.mark.skipif(not NVDISASM.is_file(), reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm"),
]


def cubins(folder: Path) -> list[bytes]:
    """The device code inside every compiled object of a cache folder."""
    found = []
    for path in sorted(folder.rglob("*.o")):
        data = path.read_bytes()
        starts = [m.start() for m in re.finditer(b"\x7fELF", data)]
        found += [data[s:] for s in starts if int.from_bytes(data[s + 18 : s + 20], "little") == EM_CUDA]
    return found


@pytest.mark.parametrize("config", ["qwen3_30b_a3b", "sonic_7b"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_kernel_compiles(arch: str, config: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "sonic_ep.cli", "compile", "--config", config, "--arch", arch]
    run = subprocess.run([*command, "--cache", str(cache)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(run.stdout.splitlines()) == 8
    kernels = cubins(cache)
    assert len(kernels) >= 6  # operations of one tile and epilogue share a kernel
    for number, kernel in enumerate(kernels):
        file = tmp_path / f"{number}.cubin"
        file.write_bytes(kernel)
        sass = subprocess.run([str(NVDISASM), "-c", str(file)], capture_output=True, text=True, check=True).stdout
        assert TENSOR_CORE[arch] in sass
        assert not re.findall(r"\b(?:STL|LDL)\b", sass), "registers are spilled to local memory"
