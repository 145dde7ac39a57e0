"""The command `sonic-ep`, also as `python -m sonic_ep.cli` under torchrun.

sonic-ep doctor                                                        what this machine will run, and why; a self-test
sonic-ep plan --config qwen3_30b_a3b --tokens 8192 --ranks 8          memory and bytes between ranks, without a GPU
sonic-ep plan ... --hosts 4 --gpus-per-host 8 --link 45               modelled times by transport, and the fastest
sonic-ep compile --config qwen3_30b_a3b --arch sm_90a                 fill the kernel cache, also without a GPU
"""

import argparse
import math
import sys
from collections.abc import Sequence

from sonic_ep.cli.compile import CAPABILITIES, compile_aot
from sonic_ep.cli.doctor import diagnose
from sonic_ep.cli.plan import print_plan
from sonic_ep.cli.plan_hosts import Cluster, print_hosts_plan
from sonic_ep.kernels.common.compile_process import num_processes
from sonic_ep.kernels.common.versions import installed_version


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with a message if the arguments are wrong or a package is missing."""
    parser = argparse.ArgumentParser(prog="sonic-ep", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--version", action="version", version=f"sonic-ep {installed_version('sonic-ep')}")
    commands = parser.add_subparsers(required=True, dest="command")
    doctor_command = commands.add_parser("doctor", help="say what this machine will run and why, and test it")
    doctor_command.add_argument("--json", action="store_true", help="print the findings as JSON")
    plan_command = commands.add_parser("plan", help="say what a layer needs: memory, bytes between ranks, rounding")
    plan_command.add_argument("--config", required=True, help="a name from configs/ or the path of a .toml file")
    plan_command.add_argument("--tokens", type=int, required=True, help="of each rank")
    plan_command.add_argument("--ranks", type=int, help="of the EP group (default: 1, or all GPUs with --hosts)")
    plan_command.add_argument("--layers", type=int, default=1, help="MoE layers of the model (default: 1)")
    plan_command.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    plan_command.add_argument("--gpu-memory", type=float, help="GiB of a GPU")
    plan_command.add_argument("--hosts", type=int, help="model the time of each transport on so many hosts")
    plan_command.add_argument("--gpus-per-host", type=int, default=8, help="with --hosts (default: 8)")
    plan_command.add_argument("--link", type=float, default=math.inf, help="GB/s that a GPU sends to other hosts")
    plan_command.add_argument(
        "--skew",
        type=float,
        default=0.35,
        help="of the experts' popularity: its deviation over its mean (default: 0.35)",
    )
    plan_command.add_argument("--json", action="store_true", help="with --hosts: print the plan as JSON")
    compile_command = commands.add_parser("compile", help="compile a layer's GPU kernels into the cache (AOT)")
    compile_command.add_argument("--config", required=True, help="a name from configs/ or the path of a .toml file")
    compile_command.add_argument("--arch", required=True, choices=CAPABILITIES, help="GPU architecture")
    compile_command.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    compile_command.add_argument("--cache", help="cache folder (default: ~/.cache/sonic_ep/quack, or QUACK_CACHE_DIR)")
    compile_command.add_argument("--processes", type=int, help="kernels to compile at once (default: number of cores)")
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        sys.exit(diagnose(as_json=options.json))
    try:
        if options.command == "plan":
            _plan(options)
            return
        processes = options.processes or num_processes()
        compile_aot(options.config, options.arch, options.dtype, options.cache, processes=processes)
    except (ImportError, FileNotFoundError, ValueError, RuntimeError) as error:
        sys.exit(f"sonic-ep: error: {error}")


def _plan(options: argparse.Namespace) -> None:
    if options.hosts is None:
        if options.json:
            raise ValueError("--json is for plans of several hosts: give --hosts")
        ranks = 1 if options.ranks is None else options.ranks
        print_plan(options.config, options.tokens, ranks, options.layers, options.dtype, options.gpu_memory)
        return
    ranks = options.hosts * options.gpus_per_host if options.ranks is None else options.ranks
    cluster = Cluster(options.hosts, options.gpus_per_host, ranks, options.link)
    memory = options.gpu_memory
    print_hosts_plan(
        options.config,
        options.tokens,
        cluster,
        options.layers,
        options.dtype,
        memory,
        options.skew,
        as_json=options.json,
    )
