"""The epilogue of Hopper GEMMs over rows: one barrier and one fence where quack has two of each.

An output tile is stored in pieces: from registers to a buffer in shared memory, and from there by TMA, which one warp
issues. There are two or four buffers.

quack synchronises all warps twice per piece: before they write a buffer, because its previous store must have read it,
and after, because the store may start only then. It also releases the buffer of what was loaded for the piece (H, in
dgated) through a fence and an mbarrier. quack's ping-pong dgated spends two fifths of its epilogue in these waits.

Here the storing warp waits for the next buffers before the barrier that follows the writes. So this one barrier says
three things: the writes are done, the loaded operand has been read, and the next buffers are free. With four buffers
there is one barrier per two pieces.

Overrides GemmBase.epilogue (quack 0.6.5) and is traced by CuTe-DSL. Results are the same bit for bit.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.pipeline import NamedBarrier, PipelineAsync, PipelineState

from sonic_ep.kernels.experts.quack_compat import (
    DStore,
    TileScheduler,
    VarlenManager,
    require_no_dropped_hooks,
)
from sonic_ep.kernels.experts.sm90.gather_producer import Copy


class OneBarrierEpilogue:
    """Applies the epilogue to one output tile and stores it, piece by piece.

    A CTA (in ping-pong, a warp group) reads the tile's accumulators and, if there is a C, the tile of C. It writes the
    tile of D and of each further output of the epilogue. It has the grid of the GEMM, see row_gemm.py.
    """

    # Attributes of quack's kernel class
    cta_tile_shape_mnk: tuple[int, int, int]
    epi_stage: int
    epi_c_stage: int
    epi_m_major: bool
    epi_setup_aux_out: Callable[..., tuple]
    epi_begin: Callable[..., tuple[object, ...]]
    epi_begin_loop: Callable[..., dict[str, object]]
    epi_visit_subtile: Callable[..., tuple[cute.Tensor, ...]]
    epi_end_loop: Callable[..., None]
    epi_end: Callable[..., None]

    @cute.jit
    def epilogue(
        self,
        params: object,
        epi_smem_tensors: dict[str, cute.Tensor],
        epi_pipeline: PipelineAsync,
        epi_store_pipeline: PipelineAsync,
        epi_read_state: PipelineState,
        epi_producer_state: PipelineState,
        epi_tile: cute.Tile,
        load_acc_subtile: Callable[[cute.Tensor, cute.Coord], None],
        tRS_rD: cute.Tensor,
        tRS_rC: cute.Tensor | None,
        tiled_copy_t2r: cute.TiledCopy | None,
        tiled_copy_r2s: cute.TiledCopy,
        tRS_sD: cute.Tensor,
        tiled_copy_s2r: cute.ThrCopy | None,
        tSR_rC: cute.Tensor | None,
        tSR_sC: cute.Tensor,  # without a C it is None, as are the pipeline of C and its copies
        copy_D: Copy,
        copy_C: Copy | None,
        tile_coord_mnkl: tuple[Int32, ...],
        varlen_manager: VarlenManager,
        epilogue_barrier: NamedBarrier,
        tile_scheduler: TileScheduler,
        tidx: Int32,
        is_tma_warp: Boolean,
    ) -> tuple[PipelineState, PipelineState]:
        tile = (tile_coord_mnkl, varlen_manager, tidx)
        copies = (tiled_copy_t2r, tiled_copy_r2s)
        stores = self.epi_setup_aux_out(params, epi_smem_tensors, tiled_copy_r2s, tiled_copy_t2r, *tile)
        stores = ((DStore(), None, tiled_copy_r2s, tRS_sD, copy_D, None), *stores)
        require_no_dropped_hooks(self)
        assert copy_D is not None
        assert all(quantized is None and condition is None for _, quantized, _, _, _, condition in stores)
        shape = cute.zipped_divide(cute.make_layout(self.cta_tile_shape_mnk[:2]), epi_tile).shape[1]
        order = (0, 1) if const_expr(self.epi_m_major) else (1, 0)
        layout = cute.make_ordered_layout(shape, order=order)
        pieces = cute.size(shape)
        before = tile_scheduler.num_tiles_executed * pieces
        loads = const_expr(copy_C is not None)
        # Pieces per barrier: with four buffers two are written while the other two are stored.
        together = 2 if const_expr(self.epi_stage >= 4) else 1
        assert self.epi_stage > 1
        assert pieces % together == 0

        tensors = self.epi_begin(
            params,
            epi_smem_tensors,
            epi_tile,
            *copies,
            tile_coord_mnkl,
            varlen_manager,
            epilogue_barrier,
            tidx,
            tRS_rD.layout,
        )
        loaded = 0
        if const_expr(loads):
            loaded = min(pieces, self.epi_c_stage)
            self._load_pieces(epi_pipeline, epi_producer_state, copy_C, is_tma_warp, layout, 0, loaded)

        for piece in cutlass.range_constexpr(pieces):
            coord = layout.get_hier_coord(piece)
            load_acc_subtile(tRS_rD, coord)
            if const_expr(loads):
                epi_pipeline.consumer_wait(epi_read_state)
                cute.copy(tiled_copy_s2r, tSR_sC[None, None, None, epi_read_state.index], tSR_rC)
                epi_read_state.advance()
            loop_tensors = self.epi_begin_loop(params, tensors, coord)
            others = self.epi_visit_subtile(params, loop_tensors, tRS_rD, tRS_rC)
            self.epi_end_loop(params, tensors, coord, tRS_rD, epi_tile, *copies, tile_coord_mnkl, varlen_manager, tidx)
            outs = [
                store[0].store_convert(self, values, loop_tensors.get("sr_seed"), tidx, tile_coord_mnkl, before, piece)
                for store, values in zip(stores, (tRS_rD, *others), strict=True)
            ]
            for (op, _, copy, to, _, _), out in zip(stores, outs, strict=True):
                op.store_r2s(self, copy, out, to[None, None, None, (before + piece) % self.epi_stage], tidx)
            if const_expr((piece + 1) % together == 0):
                cute.arch.fence_view_async_shared()
                if is_tma_warp:  # wait until the stores have read the buffers of the next pieces
                    cute.arch.cp_async_bulk_wait_group(self.epi_stage // together - 2, read=True)
                epilogue_barrier.arrive_and_wait()
                if is_tma_warp:
                    for done in cutlass.range_constexpr(piece + 1 - together, piece + 1):
                        for _, _, _, _, copy_out, _ in stores:
                            copy_out(src_idx=(before + done) % self.epi_stage, dst_idx=layout.get_hier_coord(done))
                    epi_store_pipeline.producer_commit()
                if const_expr(loads):
                    upto = min(pieces, piece + 1 + self.epi_c_stage)
                    self._load_pieces(epi_pipeline, epi_producer_state, copy_C, is_tma_warp, layout, loaded, upto)
                    loaded = upto

        self.epi_end(params, tensors, epi_tile, *copies, *tile)
        return epi_read_state, epi_producer_state

    @cute.jit
    def _load_pieces(
        self,
        pipeline: PipelineAsync,
        state: PipelineState,
        copy_C: Copy,
        is_tma_warp: Boolean,
        layout: cute.Layout,
        first: cutlass.Constexpr[int],
        end: cutlass.Constexpr[int],
    ) -> None:
        """Loads C for the pieces first..end-1. Their buffers are free: a barrier follows every read of one."""
        for piece in cutlass.range_constexpr(first, end):
            if is_tma_warp:
                pipeline.producer_acquire(state, Boolean(True))
                copy_C(src_idx=layout.get_hier_coord(piece), producer_state=state)
                pipeline.producer_commit(state)
            state.advance()
