"""What the benchmarks of whole training steps have in common: options of the command line, and the ranks' start."""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist


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
