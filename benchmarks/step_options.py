"""What the benchmarks of whole training steps have in common: options, the ranks' start, and steps before a turn."""

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from host_time import Clock

FEW, MOST = 3, 24  # steps before a turn
ATTEMPTS = 3  # of a turn


def step_parser(
    description: str | None, *, shape: str, shapes: Iterable[str], tokens: int, seconds: float
) -> argparse.ArgumentParser:
    """Returns a parser with the options of all of them. The values are the defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=shape, choices=shapes)
    parser.add_argument("--tokens", type=int, default=tokens, help="of each rank in a forward")
    parser.add_argument("--length", type=int, default=4096, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=seconds, help="of a turn")
    parser.add_argument("--only", nargs="+", help="contestants by name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    return parser


def parsed_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if options.tokens % options.length:
        parser.error(f"--tokens {options.tokens} must be a multiple of --length {options.length}")
    return options


def start_rank(device: str) -> None:
    """Joins the other processes of torchrun, with a GPU of its own if it is to have one."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


def train_until_traced(step: Callable[[], object], num_programs: Callable[[], int], clock: Clock) -> None:
    """Trains until FEW steps behind each other have traced no program on any rank, but at most MOST steps.

    A program is traced at the first or second step of its kind. In the steps after it memory is arranged anew.
    num_programs: returns how many there are.
    """
    quiet = 0
    for _ in range(MOST):
        before = num_programs()
        step()
        new = clock.largest({"new": num_programs() - before})["new"]
        quiet = quiet + 1 if new == 0 else 0
        if quiet == FEW:
            break


def turn_without_tracing(
    step: Callable[[], object], number: int, num_programs: Callable[[], int], clock: Clock, *, untimed: int = 0
) -> tuple[float, float, float]:
    """Times steps back to back. Returns milliseconds a step, those of its calls, and how many programs are new.

    A trace takes as long as many steps of a layer, and all lengths together need a handful. So a turn with one on any
    rank is repeated, at most ATTEMPTS - 1 times.
    """
    ms, host, new, attempts = 0.0, 0.0, 1.0, 0
    while new and attempts < ATTEMPTS:
        attempts, before = attempts + 1, num_programs()
        ms, host = clock.back_to_back(step, number, untimed=untimed)
        new = clock.largest({"new": num_programs() - before})["new"]
    return ms, host, new
