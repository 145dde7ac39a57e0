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
from sonic_ep.kernels.experts import mlp
from sonic_ep.kernels.experts.activations import Activation, activation_named
from sonic_ep.kernels.experts.quack_compat import without_launches
from sonic_ep.kernels.experts.sm90.wgrad import WeightGemm
from sonic_ep.kernels.experts.tile_table import Operation
from sonic_ep.kernels.lora.low_rank import ANY_ACTIVATION

# Arbitrary: row and expert counts are symbolic in the compiled kernels.
_EXPERTS, _ROWS, _PAIRS = 2, 256, 512
_TILES = (("ragged", False), ("tile_aligned", True))


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

    def weight(out: int, size: int, kind: torch.dtype = dtype) -> Tensor:
        return meta(_EXPERTS, size, out, kind=kind) if gemms.transposed else meta(_EXPERTS, out, size, kind=kind)

    x, w1, w2, up = meta(_ROWS, d), weight(J, d), weight(d, n), None
    if gemms.transposed:
        w1, w2 = w1.mT, w2.mT
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
    for kind, tile_aligned in _TILES:
        down = partial(o.down_projection, a, w2, b2, starts, tile_aligned=tile_aligned)
        up_backward = partial(o.up_projection_backward, h, w1, starts, up, tile_aligned=tile_aligned)
        found += [
            Compilation("down", f"down_projection, {kind}", down),
            Compilation("up_backward", f"up_projection_backward{of_w1}, {kind}", up_backward),
        ]
    # Which GEMM makes a gradient depends on its layout: (e, H, J) is made as (e, H, I) is.
    gradients: tuple[Operation, Operation] = "weight_up", "weight_down"
    up_gradient, down_gradient = reversed(gradients) if gemms.transposed else gradients
    lists, transposed = mlp.RowLists(rows, starts), gemms.transposed
    weight_up = partial(mlp.backward_up_weights, o, x, h, lists, transposed=transposed)
    weight_down = partial(mlp.backward_down_weights, o, x, a, lists, transposed=transposed)
    found += [Compilation(up_gradient, weight_of_w1, partial(weight_up, split_gate_up=gemms.split_gate_up))]
    found += [Compilation(down_gradient, "weight_grad of w2", weight_down)]
    if gemms.accumulate:
        into_w1 = partial(weight_up, into=weight(J, d, torch.float32))
        into_w2 = partial(weight_down, into=weight(d, n, torch.float32))
        found += [Compilation(up_gradient, "weight_grad of w1 into fp32", into_w1)]
        found += [Compilation(down_gradient, "weight_grad of w2 into fp32", into_w2)]
    r1, r2 = gemms.ranks
    if r1:
        update = meta(_EXPERTS, r1, d), meta(_EXPERTS, J, r1)
        found += _of_up_update(x, h, meta(_PAIRS, r1), *update, rows, starts, act)
    if r2:
        update = meta(_EXPERTS, r2, n), meta(_EXPERTS, d, r2)
        found += _of_down_update(x, a, meta(_PAIRS, r2), *update, rows, starts)
    return found


def _of_up_update(
    x: Tensor, h: Tensor, thin: Tensor, a1: Tensor, b1: Tensor, rows: Tensor, starts: Tensor, act: Activation
) -> list[Compilation]:
    """Returns the GEMMs of a low-rank update of W1, as kernels/lora/low_rank.py calls them. thin: (P, r)."""
    o, dx = operations, x.new_empty(h.shape[0], x.shape[1])
    back = partial(o.up_projection_backward, h, b1, starts)
    return [
        Compilation("up", "x A1^T", lambda: o.up_projection(x, a1, None, rows, starts, ANY_ACTIVATION)),
        Compilation("accumulate", "+ B1^T", lambda: o.accumulate_up_projection(h, thin, b1.mT, starts, act)),
        *[Compilation("up_backward", f"dH B1, {name}", partial(back, tile_aligned=each)) for name, each in _TILES],
        Compilation("accumulate", "+ A1", lambda: o.accumulate_product(dx, thin, a1, starts)),
        Compilation("weight_up", "weight_grad of A1", lambda: o.weight_grad(thin, x, rows, starts)),
        Compilation("weight_down", "weight_grad of B1", lambda: o.weight_grad(thin, h, rows, starts, transposed=True)),
    ]


def _of_down_update(
    x: Tensor, a: Tensor, thin: Tensor, a2: Tensor, b2: Tensor, rows: Tensor, starts: Tensor
) -> list[Compilation]:
    """Returns the compilations of an update of W2."""
    o, y, b2_by_rows = operations, x.new_empty(a.shape[0], x.shape[1]), b2.mT.contiguous()
    down, back = partial(o.down_projection, a, a2, None, starts), partial(o.up_projection_backward, thin, a2, starts)
    return [
        *[Compilation("down", f"A A2^T, {name}", partial(down, tile_aligned=each)) for name, each in _TILES],
        Compilation("accumulate", "+ B2^T", lambda: o.accumulate_product(y, thin, b2.mT, starts)),
        Compilation("up", "dO B2", lambda: o.up_projection(x, b2_by_rows, None, rows, starts, ANY_ACTIVATION)),
        *[Compilation("up_backward", f"u A2, {name}", partial(back, tile_aligned=each)) for name, each in _TILES],
        Compilation("weight_up", "weight_grad of A2", lambda: o.weight_grad(thin, a, rows, starts)),
        Compilation("weight_down", "weight_grad of B2", lambda: o.weight_grad(thin, x, rows, starts, transposed=True)),
    ]


def variants(gemms: Gemms) -> list[Gemms]:
    """Returns all layers with these sizes, activation, dtype and bias, without transposed weights or updates."""
    has_split = activation_named(gemms.activation).gated and not gemms.bias  # `moe` takes split weights only then
    accumulating = [gemms._replace(split_gate_up=False, accumulate=accumulate) for accumulate in (True, False)]
    return accumulating + [gemms._replace(split_gate_up=True, accumulate=False)] * has_split


def compile_variants(gemms: Gemms, capability: tuple[int, int], report: Report, *, processes: int = 1) -> None:
    """Compiles every grouped GEMM of all `variants`, and notes it for `compile_process.start`; see `compile_all`.

    capability: as QUACK_ARCH and CUTE_DSL_ARCH have it.
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
