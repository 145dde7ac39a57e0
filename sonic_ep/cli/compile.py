"""`sonic-ep compile`: compiles GPU kernels into the cache (AOT), also without a GPU."""

import os
import sys
from importlib import import_module
from typing import Any

from sonic_ep.config import MoEConfig
from sonic_ep.extras import require_extra
from sonic_ep.kernels.backend import COLUMN_MULTIPLE, CUDA_MODULES
from sonic_ep.kernels.common.cache import problem_with_quack_cache
from sonic_ep.kernels.common.compile_process import ARCHITECTURES, CAPABILITIES, Gemms


def compile_aot(config: MoEConfig, arch: str, dtype: str, cache: str | None, *, processes: int = 1) -> None:
    """Compiles every grouped GEMM of a config for one architecture into the cache. Needs no GPU.

    processes: how many GEMMs to compile at once, in a process each if more than one.
    Raises ImportError (an extra is missing or has another version), ValueError (an activation without a kernel, sizes
    that no kernel supports, or a cache that another user may write), RuntimeError (some did not compile in a process).
    """
    require_extra("cuda", *CUDA_MODULES)
    # quack and CuTe-DSL read these once, when they are imported.
    os.environ["QUACK_ARCH"], os.environ["CUTE_DSL_ARCH"] = ARCHITECTURES[CAPABILITIES[arch]]
    if cache is not None:
        os.environ["QUACK_CACHE_DIR"] = cache
    if (problem := problem_with_quack_cache()) is not None:
        raise ValueError(problem)
    if config.d % COLUMN_MULTIPLE or config.n % COLUMN_MULTIPLE:
        raise ValueError(
            f"d={config.d} and n={config.n} must be multiples of {COLUMN_MULTIPLE}: the kernels take no other "
            "sizes, such a layer runs in plain torch"
        )
    known = import_module("sonic_ep.kernels.experts.grouped_gemm").ACTIVATION_NAMES
    if config.activation not in known:
        raise ValueError(f"activation={config.activation!r} has no GPU kernel; these have: {', '.join(known)}")

    aot = import_module("sonic_ep.kernels.experts.aot")

    def report(compilation: Any, seconds: float) -> None:
        sys.stdout.write(f"{config.name} {arch} {dtype}: {compilation.name} {seconds:.1f} s\n")
        sys.stdout.flush()

    gemms = Gemms(config.d, config.n, config.activation, dtype, bias=config.bias)
    aot.compile_variants(gemms, CAPABILITIES[arch], report, processes=processes)
