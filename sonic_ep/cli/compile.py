"""`sonic-ep compile`: compiles GPU kernels into the cache (AOT), also without a GPU."""

import os
import sys
from importlib import import_module

import torch

from sonic_ep.config import load_config
from sonic_ep.extras import require_extra
from sonic_ep.kernels.backend import COLUMN_MULTIPLE, CUDA_MODULES

ARCHITECTURES = {"sm_90a": "90", "sm_100a": "100"}


def compile_aot(config_name: str, arch: str, dtype: str, cache: str | None) -> None:
    """Compiles every grouped GEMM of a config for one architecture into the cache. Needs no GPU.

    Raises ImportError (an extra is missing or has another version), FileNotFoundError (unknown config), ValueError (an
    activation without a kernel, or sizes that no kernel supports).
    """
    config = load_config(config_name)
    require_extra("cuda", *CUDA_MODULES)
    # quack and CuTe-DSL read these once, when they are imported.
    os.environ["QUACK_ARCH"], os.environ["CUTE_DSL_ARCH"] = ARCHITECTURES[arch], arch
    if cache is not None:
        os.environ["QUACK_CACHE_DIR"] = cache
    if config.d % COLUMN_MULTIPLE or config.n % COLUMN_MULTIPLE:
        raise ValueError(
            f"d={config.d} and n={config.n} must be multiples of {COLUMN_MULTIPLE}: the kernels take no other "
            "sizes, such a layer runs in plain torch"
        )
    known = import_module("sonic_ep.kernels.experts.grouped_gemm").ACTIVATION_NAMES
    if config.activation not in known:
        raise ValueError(f"activation={config.activation!r} has no GPU kernel; these have: {', '.join(known)}")

    def report(operation: str, seconds: float) -> None:
        sys.stdout.write(f"{config.name} {arch} {dtype}: {operation} {seconds:.1f} s\n")
        sys.stdout.flush()

    aot = import_module("sonic_ep.kernels.experts.aot")
    kind = getattr(torch, dtype)
    aot.compile_operations(config.d, config.n, config.activation, bias=config.bias, dtype=kind, report=report)
