"""What each change to quack's kernels for Hopper gains: the local experts, forward and backward, without one of them.

    python benchmarks/overrides.py --out overrides.json [--shape qwen3_30b_a3b_ragged ...] [--rounds 20]

The changes are those of docs/gpu_kernels.md, "What differs from quack's kernels". All have the same tokens and weights
and take turns; that the bits are ours is checked first. Times are medians over CUDA events, in milliseconds, launches
hidden. gain is how much longer forward and backward take without the change: 0.02 for 2 %.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from grouped_gemms import SHAPES, Problem
from other_kernels import OURS, WITHOUT, within
from runs import new_record, parser_of, write
from sonic_ep import load_config
from sonic_ep.kernels.common.compile_process import Gemms
from sonic_ep.kernels.experts.aot import compilations, compile_all
from timing import BACKLOG, medians_ms

DEFAULT = [
    *("sonic_7b_ragged", "qwen3_30b_a3b_ragged", "qwen3_next_80b_a3b_ragged", "deepseek_v3_ep8_ragged"),
    *("qwen3_30b_a3b_short_ragged", "qwen3_30b_a3b"),
]


def compile_kernels(name: str, shapes: Sequence[str]) -> None:
    """Compiles one contestant's kernels into quack's cache."""
    with WITHOUT[name]():
        for config in {SHAPES[shape][0] for shape in shapes}:
            sizes = load_config(config)
            found = compilations(Gemms(sizes.d, sizes.n, "swiglu", "bfloat16"))
            compile_all(found, lambda each, seconds: print(f"  {name}: {each.name} {seconds:.0f} s", flush=True))


def compile_all_kernels(names: Sequence[str], shapes: Sequence[str]) -> None:
    """Likewise for all these contestants, each in a process of its own."""
    environment = os.environ | {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a"}
    command = [sys.executable, str(Path(__file__)), "--shape", *shapes, "--compile"]
    running = [subprocess.Popen([*command, name], env=environment) for name in names]
    failed = [name for name, process in zip(names, running, strict=True) if process.wait() != 0]
    if failed:
        raise RuntimeError(f"the kernels of {failed} did not compile")


def results_of(problem: Problem) -> list[Tensor]:
    """Copies of the outputs of every GEMM. NaN is left in their memory, which the next call gets."""
    found = list[Tensor]()
    for call, _ in problem.calls().values():
        result = call()
        for each in [result] if isinstance(result, Tensor) else result:
            found.append(each.cpu())
            each.fill_(torch.nan)
    return found


def gains(problem: Problem, names: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of forward and backward by what is left out, and what that costs."""
    forward, backward = problem.kernels()
    expected = results_of(problem)
    calls = dict[str, Callable[[], object]]()
    for name in names:
        kernels = WITHOUT[name]
        with kernels():
            if not all(torch.equal(a, b) for a, b in zip(results_of(problem), expected, strict=True)):
                raise RuntimeError(f"other bits without: {name}")
        for what, call in (("forward", forward), ("backward", backward)):
            calls[f"{name}, {what}"] = within(kernels, call)
    times = medians_ms(calls, rounds, backlog=BACKLOG)
    rows = {name: {what: times[f"{name}, {what}"] for what in ("forward", "backward")} for name in names}
    ours = sum(rows[OURS].values())
    return {name: {**row, "gain": sum(row.values()) / ours - 1} for name, row in rows.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=DEFAULT)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=WITHOUT, nargs="+", default=list(WITHOUT), help="beside ours")
    parser.add_argument("--compile", choices=WITHOUT, help="only compile the kernels of this one, without a GPU")
    options = parser.parse_args()
    if options.compile:
        return compile_kernels(options.compile, options.shape)
    names = list(dict.fromkeys((OURS, *options.only)))
    compile_all_kernels(names, options.shape)
    record = new_record(shapes={})
    for shape in options.shape:
        torch.manual_seed(0)
        problem = Problem(shape)
        record["shapes"][shape] = gains(problem, names, options.rounds)
        for name, row in record["shapes"][shape].items():
            print(f"{shape:28} {name:44} {row['forward']:.3f} {row['backward']:.3f} {row['gain']:+.3f}", flush=True)
        if options.out:
            write(record, options.out)
        del problem
        torch.cuda.empty_cache()
    return None


if __name__ == "__main__":
    main()
