"""How the warps that gather the first operand of a Hopper GEMM fill a stage: A by cp.async, B by TMA."""

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
    """A K tile into the stage of `state`, which is returned advanced. The warps take turns at B.

    last: may K end inside it?
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
