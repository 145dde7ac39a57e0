"""Ahead-of-time compilation of a layer's GPU operations, also on a machine without a GPU.

The operations are called on meta tensors while launches are switched off. The compiled kernels go to quack's cache.
QUACK_ARCH and CUTE_DSL_ARCH must name the target before quack is imported; `sonic_ep.cli` sets them.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sonic_ep.kernels.experts import grouped_gemm as operations
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.quack_compat import without_launches
from sonic_ep.kernels.experts.sm90.wgrad import WeightGemm

# Arbitrary: row and expert counts are symbolic in the compiled kernels.
_EXPERTS, _ROWS, _PAIRS = 2, 256, 512


def compile_operations(
    d: int, n: int, activation: str, *, bias: bool, dtype: torch.dtype, report: Callable[[str, float], None]
) -> None:
    """Compiles every grouped GEMM of a layer with hidden size d and expert width n.

    After each operation it calls `report` with the operation's name and the seconds that it took. Raises ValueError for
    an unknown activation.
    """
    act = activation_named(activation)
    J = 2 * n if act.gated else n

    def meta(*size: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=kind, device="meta")

    x, w1, w2 = meta(_ROWS, d), meta(_EXPERTS, J, d), meta(_EXPERTS, d, n)
    gate, up = meta(_EXPERTS, n, d), meta(_EXPERTS, n, d)
    b1, b2 = (meta(_EXPERTS, J), meta(_EXPERTS, d)) if bias else (None, None)
    h, a, pair_weights = meta(_PAIRS, J), meta(_PAIRS, n), meta(_PAIRS, kind=torch.float32)
    rows, starts = meta(_PAIRS, kind=torch.int32), meta(_EXPERTS + 1, kind=torch.int32)
    o = operations
    calls: dict[str, Callable[[], object]] = {
        "up_projection": lambda: o.up_projection(x, w1, b1, rows, starts, act),
        "down_projection_backward": lambda: o.down_projection_backward(x, w2, None, h, pair_weights, rows, starts, act),
        "weight_grad of w1": lambda: o.weight_grad(h, x, rows, starts),
        "weight_grad of w2": lambda: o.weight_grad(a, x, rows, starts, transposed=True),
        "weight_grad of w1 into fp32": lambda: o.weight_grad(
            h, x, rows, starts, out_eAB=meta(_EXPERTS, J, d, kind=torch.float32)
        ),
        "weight_grad of w2 into fp32": lambda: o.weight_grad(
            a, x, rows, starts, transposed=True, out_eAB=meta(_EXPERTS, d, n, kind=torch.float32)
        ),
    }
    gate_and_up = act.gated and not bias  # `moe` takes split gate/up weights only then
    if gate_and_up:
        calls |= {
            "up_projection of gate and up": lambda: o.up_projection(x, gate, None, rows, starts, act, up),
            "weight_grad of gate and up": lambda: o.weight_grad(h, x, rows, starts, split_gate_up=True),
        }
    for kind, tile_aligned in (("ragged", False), ("tile_aligned", True)):
        down = partial(o.down_projection, tile_aligned=tile_aligned)
        up_backward = partial(o.up_projection_backward, tile_aligned=tile_aligned)
        calls |= {
            f"down_projection, {kind}": partial(down, a, w2, b2, starts),
            f"up_projection_backward, {kind}": partial(up_backward, h, w1, starts),
        }
        if gate_and_up:
            calls[f"up_projection_backward of gate and up, {kind}"] = partial(up_backward, h, gate, starts, up)
    with without_launches(WeightGemm):
        for name, call in calls.items():
            begun = time.monotonic()
            call()
            report(name, time.monotonic() - begun)
