"""The command `sonic-ep`.

sonic-ep compile --config qwen3_30b_a3b --arch sm_90a      fill the kernel cache, also without a GPU
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import torch

from sonic_ep.config import load_config
from sonic_ep.extras import require_extra
from sonic_ep.kernels.backend import COLUMN_MULTIPLE, CUDA_MODULES

ARCHITECTURES = {"sm_90a": "90", "sm_100a": "100"}


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with a message if the arguments are wrong or a package is missing."""
    parser = argparse.ArgumentParser(prog="sonic-ep", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    compile_command = commands.add_parser("compile", help="compile a layer's GPU kernels into the cache ahead of time")
    compile_command.add_argument("--config", required=True, help="a name from configs/ or the path of a .toml file")
    compile_command.add_argument("--arch", required=True, choices=ARCHITECTURES, help="GPU architecture")
    compile_command.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    compile_command.add_argument("--cache", help="cache folder (default: quack's, or QUACK_CACHE_DIR)")
    options = parser.parse_args(arguments)
    try:
        compile_aot(options.config, options.arch, options.dtype, options.cache)
    except (ImportError, FileNotFoundError, ValueError) as error:
        sys.exit(f"sonic-ep: error: {error}")


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


if __name__ == "__main__":
    main()
