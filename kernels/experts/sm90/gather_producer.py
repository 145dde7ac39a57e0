"""Fills one pipeline stage of a Hopper GEMM that gathers its first operand: A by cp.async, B by TMA."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.pipeline import PipelineState

from sonic_ep.kernels.experts.quack_compat import GemmSm90, PipelineTmaCpAsync

Copy = Callable[..., None]  # of a tile into a stage, traced; by numbers of the tile and of the stage


@cute.jit
def load_stage(
    gemm: GemmSm90,
    pipeline: PipelineTmaCpAsync,
    state: PipelineState,
    free: Boolean,
    copy_A: Copy,
    copy_B: Copy,
    k_tile: Int32,
    last: cutlass.Constexpr[bool],
) -> PipelineState:
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
