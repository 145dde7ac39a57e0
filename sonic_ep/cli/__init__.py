"""The command `sonic-ep`, also as `python -m sonic_ep.cli` under torchrun.

sonic-ep doctor                                             what this machine will run, and why; a self-test
sonic-ep compile --config qwen3_30b_a3b --arch sm_90a      fill the kernel cache, also without a GPU
"""

import argparse
import sys
from collections.abc import Sequence

from sonic_ep.cli.compile import ARCHITECTURES, compile_aot
from sonic_ep.cli.doctor import diagnose
from sonic_ep.kernels.common.versions import installed_version


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with a message if the arguments are wrong or a package is missing."""
    parser = argparse.ArgumentParser(prog="sonic-ep", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--version", action="version", version=f"sonic-ep {installed_version('sonic-ep')}")
    commands = parser.add_subparsers(required=True, dest="command")
    doctor_command = commands.add_parser("doctor", help="say what this machine will run and why, and test it")
    doctor_command.add_argument("--json", action="store_true", help="print the findings as JSON")
    compile_command = commands.add_parser("compile", help="compile a layer's GPU kernels into the cache ahead of time")
    compile_command.add_argument("--config", required=True, help="a name from configs/ or the path of a .toml file")
    compile_command.add_argument("--arch", required=True, choices=ARCHITECTURES, help="GPU architecture")
    compile_command.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    compile_command.add_argument("--cache", help="cache folder (default: ~/.cache/sonic_ep/quack, or QUACK_CACHE_DIR)")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        sys.exit(diagnose(as_json=options.json))
    try:
        compile_aot(options.config, options.arch, options.dtype, options.cache)
    except (ImportError, FileNotFoundError, ValueError) as error:
        sys.exit(f"sonic-ep: error: {error}")
