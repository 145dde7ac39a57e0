"""The selection's kernels compile for Hopper without a GPU, in every variant a call can launch, without spills."""

import os
import re
import subprocess
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled under TRITON_INTERPRET=1", allow_module_level=True)

CUOBJDUMP = Path(str(import_module("triton.backends.nvidia").__file__)).parent / "bin" / "cuobjdump"
pytestmark = pytest.mark.skipif(not CUOBJDUMP.is_file(), reason="this Triton brings no cuobjdump")
POINTERS = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}


class Launches:
    """Stands for a kernel: keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: self.calls.append((args, kwargs))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = import_module("sonic_ep.kernels.route.select.triton")
    for name in ("_transpose", "_list"):
        monkeypatch.setattr(module, name, Launches(getattr(module, name).kernel))
    return module


def resources(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path) -> str:
    """cuobjdump's account of the kernel, compiled as Triton would for these arguments."""
    compiler = import_module("triton.compiler")
    target = import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    num_warps = kwargs.pop("num_warps")
    special = {p.name for p in kernel.params if not p.do_not_specialize}
    signature, constants, attributes = {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        value = kwargs[name] if name in kwargs else args[position]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        elif name in kwargs or (name in special and value == 1):
            signature[name] = "constexpr"
            constants[(position,)] = value
            continue
        else:
            signature[name] = "i32"
        # Known multiples of 16: addresses, and integers that Triton specialises.
        if isinstance(value, torch.Tensor) or (name in special and value % 16 == 0):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = compiler.compile(source, target=target, options={"num_warps": num_warps})
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [str(CUOBJDUMP), "--dump-resource-usage", str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("variant", ["choice", "float32", "float64", "allowed"])
@pytest.mark.parametrize(("E", "K"), [(1, 1), (128, 8), (500, 10), (4096, 16)])
def test_compiles_without_spills(
    E: int, K: int, variant: str, index_dtype: torch.dtype, module: ModuleType, tmp_path: Path
) -> None:
    T = 1000
    ids_TK = torch.empty(T, K, dtype=index_dtype, device="meta")
    pairs_E = torch.empty(E, dtype=index_dtype, device="meta")
    if variant == "choice":
        module.chosen_pairs(ids_TK, pairs_E)
    else:
        scores_TE = torch.empty(T, E, dtype=torch.float64 if variant == "float64" else torch.float32, device="meta")
        allowed_TE = torch.empty(T, E, dtype=torch.bool, device="meta") if variant == "allowed" else None
        module.start_selection(scores_TE, ids_TK, allowed_TE)(pairs_E, T * K)
    for launches in (module._transpose, module._list):
        ((args, kwargs),) = launches.calls
        usage = resources(launches.kernel, args, kwargs, tmp_path)
        assert re.search(r"REG:\d+ STACK:0 .*LOCAL:0\b", usage), usage
