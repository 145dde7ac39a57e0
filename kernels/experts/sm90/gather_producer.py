"""Fills one pipeline stage of a Hopper GEMM that gathers its first operand: A by cp.async, B by TMA."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32


@cute.jit
def load_stage(
    gemm: Any,
    pipeline: Any,
    state: Any,
    free: Boolean,
    copy_A: Any,
    copy_B: Any,
    k_tile: Int32,
    last: cutlass.Constexpr[bool],
) -> Any:
    """Loads a K tile into the stage of `state` and returns `state` advanced. The loading warps take turns with B.

    free: whether the stage is already known to be free. last: whether K may end inside this K tile.
    """
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    loads_B = warp == gemm.ab_load_warp_id + k_tile % gemm.num_ab_load_warps
    pipeline.producer_acquire(state, free, loads_B)
    if loads_B:
        copy_B(k_tile, state.index, tma_bar_ptr=pipeline.producer_get_barrier(state))
    copy_A(k_tile, state.index, pred=last)
    pipeline.producer_cpasync_commit(state)
    state.advance()
    return state
