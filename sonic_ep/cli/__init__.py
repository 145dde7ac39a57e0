"""The command `sonic-ep`, also as `python -m sonic_ep.cli` under torchrun.

sonic-ep doctor                                                        what this machine will run, and why; a self-test
sonic-ep plan --config qwen3_30b_a3b --tokens 8192 --ranks 8          memory and bytes between ranks, without a GPU
sonic-ep plan ... --hosts 4 --gpus-per-host 8 --link 45               modelled times by transport, and the fastest
sonic-ep compile --config qwen3_30b_a3b --arch sm_90a                 fill the kernel cache, also without a GPU

A command imports torch, which takes seconds, once its arguments and config are known to be right.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Sequence

from sonic_ep.config import MoEConfig, load_config
from sonic_ep.kernels.common.compile_process import CAPABILITIES, num_processes
from sonic_ep.kernels.common.versions import installed_version

# The least and the most of a number, and what it is. The popularity of 4096 experts deviates by 64 means at most.
_LIMITS = {
    "gpu_memory": (1e-3, 1_000_000, "the GiB of a GPU"),
    "link": (1e-3, 1_000_000, "the GB/s that a GPU sends to other hosts: some 45 at 400 Gb/s"),
    "skew": (0, 64, "the standard deviation of the experts' popularity over its mean"),
    "processes": (1, 4096, "how many kernels are compiled at once"),
}
_OF_HOSTS = {"gpus_per_host": 8, "link": math.inf, "skew": 0.35, "json": False}  # options that need --hosts


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
    plan_command.add_argument("--gpus-per-host", type=int, default=argparse.SUPPRESS, help="with --hosts (default: 8)")
    plan_command.add_argument(
        "--link", type=float, default=argparse.SUPPRESS, help="with --hosts: GB/s that a GPU sends to other hosts"
    )
    plan_command.add_argument(
        "--skew",
        type=float,
        default=argparse.SUPPRESS,
        help="with --hosts: of the experts' popularity, its deviation over its mean (default: 0.35)",
    )
    plan_command.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="with --hosts: print the plan as JSON"
    )
    compile_command = commands.add_parser("compile", help="compile a layer's GPU kernels into the cache (AOT)")
    compile_command.add_argument("--config", required=True, help="a name from configs/ or the path of a .toml file")
    compile_command.add_argument("--arch", required=True, choices=CAPABILITIES, help="GPU architecture")
    compile_command.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    compile_command.add_argument("--cache", help="cache folder (default: ~/.cache/sonic_ep/quack, or QUACK_CACHE_DIR)")
    compile_command.add_argument("--processes", type=int, help="kernels to compile at once (default: number of cores)")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # of torch; the commands do without numpy
    if options.command == "doctor":
        from sonic_ep.cli.doctor import diagnose

        sys.exit(diagnose(as_json=options.json))
    try:
        _check_numbers(options)
        config = load_config(options.config)
        if options.command == "plan":
            _plan(config, options)
            return
        from sonic_ep.cli.compile import compile_aot

        processes = options.processes or num_processes()
        compile_aot(config, options.arch, options.dtype, options.cache, processes=processes)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        sys.exit(f"sonic-ep: error: {error}")


def _check_numbers(options: argparse.Namespace) -> None:
    for name, (least, most, what) in _LIMITS.items():
        value = getattr(options, name, None)
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} {value:g} must be {least:,} to {most:,}, {what}")


def _plan(config: MoEConfig, options: argparse.Namespace) -> None:
    if options.hosts is None:
        if given := sorted(_OF_HOSTS.keys() & vars(options)):
            raise ValueError(f"--{given[0].replace('_', '-')} is for plans of several hosts: give --hosts")
        from sonic_ep.cli.plan import print_plan

        ranks = 1 if options.ranks is None else options.ranks
        print_plan(config, options.tokens, ranks, options.layers, options.dtype, options.gpu_memory)
        return
    from sonic_ep.cli.plan_hosts import Cluster, print_hosts_plan

    gpus_per_host, link, skew, as_json = ((_OF_HOSTS | vars(options))[name] for name in _OF_HOSTS)
    ranks = options.hosts * gpus_per_host if options.ranks is None else options.ranks
    cluster = Cluster(options.hosts, gpus_per_host, ranks, link)
    memory = options.gpu_memory
    print_hosts_plan(config, options.tokens, cluster, options.layers, options.dtype, memory, skew, as_json=as_json)
