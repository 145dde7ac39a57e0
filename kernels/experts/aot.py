"""Ahead-of-time compilation of a layer's GPU operations, also on a machine without a GPU.

The operations are called on meta tensors while launches are switched off. The compiled kernels go to quack's cache.
QUACK_ARCH and CUTE_DSL_ARCH must name the target before quack is imported; `sonic_ep.cli` sets them.

As a program it is the process that kernels/common/compile_process.py starts:

    python -m sonic_ep.kernels.experts.aot GEMMS_AS_JSON FILE_DESCRIPTOR PROCESSES
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from sonic_ep.kernels.common.compile_process import Gemms, mark_compiled, write_done, write_wanted
from sonic_ep.kernels.experts import grouped_gemm as operations
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.quack_compat import without_launches
from sonic_ep.kernels.experts.sm90.wgrad import WeightGemm
from sonic_ep.kernels.experts.tile_table import Operation

# Arbitrary: row and expert counts are symbolic in the compiled kernels.
_EXPERTS, _ROWS, _PAIRS = 2, 256, 512


class Compilation(NamedTuple):
    """One call that compiles a kernel. Two may compile the same. operation: which `wait_for` waits for it."""

    operation: Operation
    name: str
    call: Callable[[], object]


Report = Callable[[Compilation, float], None]


def compilations(gemms: Gemms) -> list[Compilation]:
    """Returns every grouped GEMM of such a layer; what is needed first and what takes longest come first.

    Raises ValueError for an unknown activation.
    """
    d, n, act = gemms.d, gemms.n, activation_named(gemms.activation)
    J = 2 * n if act.gated else n
    dtype = getattr(torch, gemms.dtype)

    def meta(*size: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=kind, device="meta")

    x, w2 = meta(_ROWS, d), meta(_EXPERTS, d, n)
    w1, up = meta(_EXPERTS, J, d), None
    b1, b2 = (meta(_EXPERTS, J), meta(_EXPERTS, d)) if gemms.bias else (None, None)
    h, a, pair_weights = meta(_PAIRS, J), meta(_PAIRS, n), meta(_PAIRS, kind=torch.float32)
    rows, starts = meta(_PAIRS, kind=torch.int32), meta(_EXPERTS + 1, kind=torch.int32)
    of_w1, weight_of_w1 = "", "weight_grad of w1"
    if gemms.split_gate_up:
        w1, up = meta(_EXPERTS, n, d), meta(_EXPERTS, n, d)
        of_w1, weight_of_w1 = " of gate and up", "weight_grad of gate and up"
    o = operations
    found = [
        Compilation("up", f"up_projection{of_w1}", lambda: o.up_projection(x, w1, b1, rows, starts, act, up)),
        Compilation(
            "down_backward",
            "down_projection_backward",
            lambda: o.down_projection_backward(x, w2, None, h, pair_weights, rows, starts, act),
        ),
    ]
    for kind, tile_aligned in (("ragged", False), ("tile_aligned", True)):
        down = partial(o.down_projection, a, w2, b2, starts, tile_aligned=tile_aligned)
        up_backward = partial(o.up_projection_backward, h, w1, starts, up, tile_aligned=tile_aligned)
        found += [
            Compilation("down", f"down_projection, {kind}", down),
            Compilation("up_backward", f"up_projection_backward{of_w1}, {kind}", up_backward),
        ]
    weight_up = partial(o.weight_grad, h, x, rows, starts, split_gate_up=gemms.split_gate_up)
    weight_down = partial(o.weight_grad, a, x, rows, starts, transposed=True)
    found += [Compilation("weight_up", weight_of_w1, weight_up)]
    found += [Compilation("weight_down", "weight_grad of w2", weight_down)]
    if gemms.accumulate:
        into = meta(_EXPERTS, J, d, kind=torch.float32), meta(_EXPERTS, d, n, kind=torch.float32)
        into_w1 = partial(o.weight_grad, h, x, rows, starts, out_eAB=into[0])
        into_w2 = partial(weight_down, out_eAB=into[1])
        found += [Compilation("weight_up", "weight_grad of w1 into fp32", into_w1)]
        found += [Compilation("weight_down", "weight_grad of w2 into fp32", into_w2)]
    return found


def variants(gemms: Gemms) -> list[Gemms]:
    """Returns all layers with these sizes, activation, dtype and bias."""
    has_split = activation_named(gemms.activation).gated and not gemms.bias  # `moe` takes split weights only then
    accumulating = [gemms._replace(split_gate_up=False, accumulate=accumulate) for accumulate in (True, False)]
    return accumulating + [gemms._replace(split_gate_up=True, accumulate=False)] * has_split


def compile_variants(gemms: Gemms, capability: tuple[int, int], report: Report, *, processes: int = 1) -> None:
    """Compiles every grouped GEMM of all `variants`, and notes it for `compile_process.start`; see `compile_all`.

    capability: that of QUACK_ARCH and CUTE_DSL_ARCH.
    """
    wanted = {each: compilations(each) for each in variants(gemms)}
    distinct = {each.name: each for of_variant in wanted.values() for each in of_variant}
    compile_all(distinct.values(), report, processes=processes)
    for variant, of_variant in wanted.items():
        mark_compiled(variant, capability, [each.operation for each in of_variant])


def compile_all(wanted: Iterable[Compilation], report: Report, *, processes: int = 1) -> None:
    """Compiles into quack's cache, and calls `report` with the seconds that each took.

    processes: how many to fork at once; with 1, compiles in this process. No thread of this process may hold a lock.
    Raises: what a compilation raises; with several processes RuntimeError, after all others, and the errors themselves
    go to standard error.
    """
    with without_launches(WeightGemm):
        if processes > 1:
            failed = _compile_in_processes(list(wanted), report, processes)
            if failed:
                raise RuntimeError(f"did not compile: {', '.join(failed)}")
            return
        for each in wanted:
            begun = time.monotonic()
            each.call()
            report(each, time.monotonic() - begun)


def _compile_in_processes(waiting: list[Compilation], report: Report, processes: int) -> list[str]:
    """Returns the names of those that failed. They, too, are reported."""
    gc.freeze()  # the collector of a new process would copy all pages
    running: dict[int, tuple[Compilation, float]] = {}
    failed: list[str] = []
    while waiting or running:
        while waiting and len(running) < processes:
            each, begun = waiting.pop(0), time.monotonic()
            process = os.fork()
            if process == 0:
                _compile_and_exit(each)
            running[process] = each, begun
        process, status = os.wait()
        each, begun = running.pop(process)
        if status != 0:
            failed.append(each.name)
        report(each, time.monotonic() - begun)
    return failed


def _compile_and_exit(compilation: Compilation) -> NoReturn:
    gc.disable()
    try:
        compilation.call()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def main(gemms: str, file: str, processes: str) -> None:
    """Compiles in forked processes and writes what is done into the progress file, which this process has locked."""
    wanted, progress = compilations(Gemms(**json.loads(gemms))), int(file)
    write_wanted(progress, [each.operation for each in wanted])
    compile_all(wanted, lambda each, _: write_done(progress, each.operation), processes=int(processes))


if __name__ == "__main__":
    main(*sys.argv[1:])
