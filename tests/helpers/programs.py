"""Programs of this repo in processes that find each other as torchrun's do, without its agent.

They are forked from the server of tests.helpers.launch, which has imported torch and the frameworks in use: of a tiny
program imports are nearly all of its time.
"""

import os
import runpy
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch

from tests.helpers.free_port import free_port
from tests.helpers.launch import fork_server

ROOT = Path(__file__).resolve().parents[2]


def run_program(path: str, *flags: str, processes: int | None = None, timeout: float = 300.0) -> list[str]:
    """Runs a program on CPUs, its path relative to the root of the repo, in the root. Returns the lines that the first
    process wrote. processes: None for one that is not told of others, as without torchrun.

    Raises RuntimeError, with what all of them wrote, as soon as one fails, or after `timeout` seconds.
    """
    context = fork_server()
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world |= {name: str(processes) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(processes or 1)]
        running = []
        for rank, output in enumerate(outputs):
            environment = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes else {}
            process = context.Process(target=_run, args=(path, flags, environment, output), name=f"{path} {rank}")
            process.start()
            running.append(process)
        waiting, deadline = list(running), time.monotonic() + timeout
        try:
            while waiting and all(process.exitcode in (None, 0) for process in running):
                if not wait([process.sentinel for process in waiting], max(0.0, deadline - time.monotonic())):
                    break
                waiting = [process for process in waiting if process.exitcode is None]
            codes = [process.exitcode for process in running]  # None: still running
        finally:
            for process in running:
                process.kill()
                process.join()
        if any(code != 0 for code in codes):
            texts = "\n".join(output.read_text() for output in outputs if output.exists())
            raise RuntimeError(f"{path} {' '.join(flags)} ended with {codes}, by rank:\n{texts}")
        return outputs[0].read_text().splitlines()


def _run(path: str, flags: tuple[str, ...], environment: dict[str, str], output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    os.chdir(ROOT)
    torch.set_num_threads(1)
    program = ROOT / path
    sys.argv[:] = [str(program), *flags]
    sys.path[:0] = [str(program.parent), str(ROOT)]
    runpy.run_path(str(program), run_name="__main__")
