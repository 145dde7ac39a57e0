"""Seconds from the start of the interpreter to the first backward of an MoE layer, with empty and with filled caches.

    python benchmarks/start.py --out start.json [--shape sonic_7b] [--tokens 2048] [--repeats 3] [--only cached ...]
    torchrun --nproc-per-node 2 benchmarks/start.py --out start_2_ranks.json
    python benchmarks/start.py --device cpu --shape tiny --tokens 512

Every run is a process of its own. The caches of sonic_ep, quack, Triton, inductor and the CUDA driver are folders that
are made for it. Cases, in this order:
    import             of torch, the layer and all modules that run on the device; no kernel is compiled. It also
                       reads the files from disk that the others find in memory, and writes Python's bytecode
    empty, in turn     empty caches; every kernel is compiled where it is launched (SONIC_EP_COMPILE_PROCESSES=1)
    empty              empty caches
    cached             those that `empty` has filled

Seconds since the start, each after the device is idle; with several ranks the largest of all:
    torch              torch is imported
    sonic_ep           so are MoE and what it needs
    modules            (import) so are the modules with kernels
    process_group      (several ranks) the process group exists
    device             the device is initialized: one value was written there
    layer              the layer is built, its weights in bf16 on the device
    forward            its first forward has ended
    backward           so has its first backward
    second_step        seconds of the next step alone
after_torch is `backward` without the import of torch. gemms: compiled GEMMs in the cache afterwards; `empty` also has
the GEMMs of eval mode. slow_imports: which of Dynamo, inductor, sympy and FSDP the process has imported.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

SLOW_TO_IMPORT = ("torch._dynamo", "torch._inductor", "sympy", "torch.distributed.fsdp")
CACHES = ("SONIC_EP_CACHE_DIR", "QUACK_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
# Cases: the name of their caches, and environment variables. Those of an import are not used.
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "import": ("import", {}),
    "empty, in turn": ("in_turn", {"SONIC_EP_COMPILE_PROCESSES": "1"}),
    "empty": ("filled", {}),
    "cached": ("filled", {}),
}


class Times:
    """Seconds since the interpreter was started, by what had happened."""

    def __init__(self, start: float) -> None:
        self.start, self.of = start, {}

    def note(self, what: str) -> None:
        self.of[what] = time.monotonic() - self.start


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what one process measures of itself. It imports everything here, because the imports are measured."""
    times = Times(options.start)
    import torch

    times.note("torch")
    from sonic_ep import MoE, load_config

    times.note("sonic_ep")
    if options.case == "import":
        import_gpu_modules(options.device)
        times.note("modules")
        return {**times.of, "slow_imports": slow_imports(), "machine": machine(options.device)}
    group = joined_group(options)
    if group is not None:
        times.note("process_group")

    def wait() -> None:
        if options.device == "cuda":
            torch.cuda.synchronize()

    def note(what: str) -> None:
        wait()
        times.note(what)

    torch.zeros(1, device=options.device)
    note("device")
    config = load_config(options.shape)
    layer = MoE(config, group, seed=0, device=options.device, dtype=torch.bfloat16)
    note("layer")
    x = torch.randn(options.tokens, config.d, device=options.device, dtype=torch.bfloat16, requires_grad=True)
    for of_step in (("forward", "backward"), (None, "second")):
        y, aux_loss, _ = layer(x)
        if of_step[0]:
            note(of_step[0])
        (y.float().square().mean() + aux_loss).backward()
        note(of_step[1])
    found: dict[str, Any] = times.of
    found["second_step"] = found.pop("second") - found["backward"]
    found["after_torch"] = found["backward"] - found["torch"]
    if group is not None:
        of_ranks = group.all_gather_object(found)
        found = {key: max(each[key] for each in of_ranks) for key in found}
        torch.distributed.destroy_process_group()
    return {**found, "slow_imports": slow_imports(), "machine": machine(options.device)}


def slow_imports() -> list[str]:
    return [name for name in SLOW_TO_IMPORT if name in sys.modules]


def machine(device: str) -> dict[str, Any]:
    return import_module("runs").machine(device)


def import_gpu_modules(device: str) -> None:
    for name in ("route.fused", "route.linear.triton", "experts.grouped_gemm") if device == "cuda" else ():
        import_module(f"sonic_ep.kernels.{name}")


def joined_group(options: argparse.Namespace) -> Any:
    """The group of all ranks, or None. Every case has keys of its own in torchrun's store."""
    if "LOCAL_RANK" not in os.environ:
        return None
    import torch
    import torch.distributed as dist

    from sonic_ep import EPGroup

    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.PrefixStore(options.case, store), rank=rank, world_size=ranks)
    return EPGroup()


def run(case: str, number: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run of a case in a process of its own."""
    caches, settings = CASES[case]
    environment = os.environ | {name: str(folder / caches / name) for name in CACHES} | settings
    # All cases share Python's bytecode: pip writes it when it installs packages.
    environment |= {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    name = "import" if case == "import" else f"{case} {number}"
    arguments = [f"--{key}={getattr(options, key)}" for key in ("shape", "tokens", "device")]
    with tempfile.NamedTemporaryFile() as result:  # the first rank may delete the folder before the others are here
        arguments += [f"--case={name}", f"--out={result.name}", f"--start={time.monotonic()}"]
        subprocess.run([sys.executable, __file__, *arguments], env=environment, check=True)
        found = json.load(result)
    return found | {"gemms": len([*(folder / caches).rglob("*.o")])}


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """The same folder for all ranks of a host."""
    of_run = os.environ.get("MASTER_PORT", os.getpid())
    folder = Path(tempfile.gettempdir()) / f"sonic_ep_start_{of_run}"
    folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            shutil.rmtree(folder, ignore_errors=True)


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = {key: statistics.median(each[key] for each in runs) for key in runs[0] if key != "slow_imports"}
    return {**numbers, "runs": len(runs), "slow_imports": runs[-1]["slow_imports"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="sonic_7b")
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank")
    parser.add_argument("--repeats", type=int, default=3, help="runs with filled caches")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], help="cases; `cached` needs `empty`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help="measure this one in this process")
    parser.add_argument("--start", type=float, help="when the process was started, by the monotonic clock")
    options = parser.parse_args()
    if options.case is not None:
        options.out.write_text(json.dumps(measured(options)))
        return
    is_first, ranks = os.environ.get("RANK", "0") == "0", int(os.environ.get("WORLD_SIZE", "1"))
    results: dict[str, Any] = {"command": sys.argv, "machine": None, "ranks": ranks, "shape": options.shape}
    results |= {"tokens": options.tokens, "cases": {}}
    with temporary_folder() as folder:
        for case in options.only:
            repeats = options.repeats if case == "cached" else 1
            runs = [run(case, number, folder, options) for number in range(repeats)]
            results["machine"] = [each.pop("machine") for each in runs][-1]
            results["cases"][case] = medians(runs)
            if is_first:
                numbers = {key: round(value, 2) for key, value in medians(runs).items() if isinstance(value, float)}
                print(f"{case:16} {numbers}", flush=True)
    if is_first and options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
