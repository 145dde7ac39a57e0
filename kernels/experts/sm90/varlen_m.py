"""Hopper GEMMs over rows that load and multiply only the rows that an expert's last tile has.

quack computes whole tiles. It also multiplies the missing rows behind an expert's last row. Where it gathers rows, it
fetches row 0 for each missing row, so that all SMs read the same L2 line at once. Every ragged expert ends inside a
tile, and this costs much of the time.

Here the scheduler returns the number of rows of a tile. The gathering warps fetch only these, and the tensor cores
multiply only the 64-row blocks (the rows of a WGMMA instruction) that contain any. Results are the same bit for bit:
the existing rows are summed in the same order, and the missing ones were never stored.

Every method overrides one of quack's (GemmSm90, VarlenMTileScheduler, quack 0.6.5) and is traced by CuTe-DSL.
"""

import functools
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.pipeline import PipelineAsync, PipelineState

from sonic_ep.kernels.experts.quack_compat import (
    CuteTensor,
    GemmSm90,
    VarlenManager,
    VarlenMTileScheduler,
    WorkTileInfo,
    gemm_w_idx,
    griddepcontrol_wait,
    partition_D_position_independent,
)
from sonic_ep.kernels.experts.sm90.gather_producer import Copy
from sonic_ep.kernels.experts.sm90.tile_prefetch import KTiles, TilePrefetchLoader, VarlenPrefetchingScheduler

_WGMMA_ROWS = 64  # rows of one WGMMA instruction
# Accumulators per thread from which dgated's epilogue spills registers under quack's settings. A ping-pong tile of
# 128x192 has 128 * 192 / 128 threads = 192 of them (docs/gpu_kernels.md, "What differs from quack's kernels").
_ACCUMULATORS_THAT_SPILL = 192
# Low bits of a scheduler record that hold a row count: the rows of a cluster's tiles, at most 2 * 256. The bits above
# hold the expert.
_ROW_BITS = 10


def _indices(work: WorkTileInfo) -> tuple[Int32, Int32, Int32, Int32]:
    """Returns (m tile, n tile, rows, expert)."""
    return work.tile_idx


class _RowsScheduler(VarlenPrefetchingScheduler):
    """Passes the number of rows of each tile to all warps, in tile_idx[2], which quack uses only for a split K.

    The warp that fetches tiles computes the number and writes it to shared memory, packed with the expert. If every
    warp read it from global memory, the reads would delay every tile.
    """

    @cute.jit
    def initial_work_tile_info(self, *, loc: object = None, ip: object = None) -> WorkTileInfo:
        # Every warp computes its first tile from the experts' starts, which the previous kernel may have written.
        griddepcontrol_wait()
        work = VarlenMTileScheduler.initial_work_tile_info(self, loc=loc, ip=ip)
        m, n, _, expert = _indices(work)
        rows = self._rows_from(m, expert, work.is_valid_tile, self.params.tile_shape_mn[0])
        return WorkTileInfo((m, n, rows, expert), work.is_valid_tile)

    @cute.jit
    def write_work_tile_to_smem(self, work: WorkTileInfo, *, loc: object = None, ip: object = None) -> None:
        m, n, _, expert = _indices(work)
        limit = const_expr(self.params.tile_shape_mn[0] * self.params.cluster_shape_mnk[0])
        assert limit < 2**_ROW_BITS
        record = (expert << _ROW_BITS) + self._rows_from(m, expert, work.is_valid_tile, limit)
        both = WorkTileInfo((m, n, None, record), work.is_valid_tile)
        VarlenMTileScheduler.write_work_tile_to_smem(self, both, loc=loc, ip=ip)

    @cute.jit
    def get_current_work(self, *, loc: object = None, ip: object = None) -> WorkTileInfo:
        work = VarlenMTileScheduler.get_current_work(self, loc=loc, ip=ip)
        m, n, _, record = _indices(work)
        rows = record & (2**_ROW_BITS - 1)
        cluster_m = const_expr(self.params.cluster_shape_mnk[0])
        if const_expr(cluster_m > 1):  # the record counts from the first row of the cluster
            tile_m = const_expr(self.params.tile_shape_mn[0])
            rows = cutlass.max(cutlass.min(rows - m % cluster_m * tile_m, tile_m), 0)
        return WorkTileInfo((m, n, rows, record >> _ROW_BITS), work.is_valid_tile)

    @cute.jit
    def _rows_from(self, m: Int32, expert: Int32, valid: Boolean, limit: cutlass.Constexpr[int]) -> Int32:
        rows = Int32(limit)
        if valid and m // self.params.cluster_shape_mnk[0] == self._cur_num_clusters_m - 1:
            starts = self.params.cu_seqlens_m
            left = starts[expert + 1] - starts[expert] - m * self.params.tile_shape_mn[0]
            rows = cutlass.max(cutlass.min(left, limit), 0)
        return rows

    def get_split_k_tile_range(self, k_tile_total: Int32, rows: Int32 | None, **_: object) -> tuple[int, KTiles]:
        # Branches on a value that ptxas does not know to be uniform in a warp cost more than the skipped rows save.
        return 0, KTiles(k_tile_total, self, cute.arch.make_warp_uniform(rows))


class SkipsMissingRows(TilePrefetchLoader):
    """Loads and multiplies only the existing rows of each tile. Inputs, outputs and the grid: see row_gemm.py."""

    # Attributes of GemmSm90
    cta_tile_shape_mnk: tuple[int, int, int]
    atom_layout_mnk: tuple[int, int, int]
    a_layout: cute.ComposedLayout
    _make_gmem_tiled_copy_A: Callable[..., cute.TiledCopy]
    gather_A: bool
    num_regs_load: int
    num_regs_mma: int

    def get_scheduler_class(self, varlen_m: bool = False) -> type:
        assert varlen_m
        return _RowsScheduler

    def _compute_tile_shape_or_override(
        self,
        tile: tuple[int, int, int],
        atoms: tuple[int, int, int],
        element: type[cutlass.Numeric] | None = None,
        epi_tile: tuple[int, int] | None = None,
    ) -> tuple[int, int]:
        """Returns the shape of an epilogue piece, and sets the registers per thread if the epilogue would spill."""
        accumulators = tile[0] * tile[1] // (atoms[0] * atoms[1] * 128)
        if self.gather_A and accumulators >= _ACCUMULATORS_THAT_SPILL and element is not None and element.width == 32:
            # dgated, whose 32-bit elements are pairs of 16-bit values. Pieces are 16 columns instead of 32, and each
            # MMA thread gets 8 more registers (quack: 224), which the loading warps do not need (quack: 56).
            self.num_regs_load, self.num_regs_mma = 40, 232
            return 64, 16
        return GemmSm90._compute_tile_shape_or_override(tile, atoms, element, epi_tile)

    @cute.jit
    def _make_gather_A_copy(
        self, mA: CuteTensor, sA: cute.Tensor, varlen: VarlenManager, tile_idx: tuple[Int32, ...], expert: Int32
    ) -> tuple[tuple[Copy, Copy], None]:
        """Returns two functions that copy the tile's rows of one K tile into a stage, 16 bytes per thread and row.

        The first is for whole tiles. The second skips missing rows.
        """
        tile_m, tile_k = const_expr(self.cta_tile_shape_mnk[0]), const_expr(self.cta_tile_shape_mnk[2])
        tiled_copy = self._make_gmem_tiled_copy_A(mA.element_type, self.a_layout, self.num_ab_load_warps * 32)
        thread = tiled_copy.get_slice(cute.arch.thread_idx()[0] - cute.arch.WARP_SIZE * self.ab_load_warp_id)
        to = partition_D_position_independent(thread, sA)
        at = thread.partition_S(cute.make_identity_tensor((tile_m, tile_k)))
        count, width = const_expr(cute.size(at, mode=[1])), const_expr(cute.size(at, mode=[0]))
        assert cute.size(at, mode=[2]) == 1
        rows_m = cute.local_tile(varlen.offset_batch_AIdx(expert), (tile_m,), (tile_idx[0],))
        left_m = varlen.len_m(expert) - tile_idx[0] * tile_m
        left_k = varlen.len_k(expert) - at[0, 0, 0][1]
        # The indices are read before the branch between the two functions. A missing row gets the expert's last row.
        # Addresses advance from K tile to K tile. Recomputing them takes 5 to 12 instructions per row, while a stage is
        # already free.
        address = cute.make_rmem_tensor(count, Int64)
        for i in cutlass.range_constexpr(count):
            row = rows_m[cutlass.min(at[0, i, 0][0], left_m - 1)]
            address[i] = (mA[row, None].iterator + at[0, 0, 0][1]).toint()

        def copy(whole: bool, k_tile: Int32, stage: Int32, pred: bool = False) -> None:
            inside = None
            if const_expr(pred):
                inside = cute.make_rmem_tensor(1, Boolean)
                inside[0] = k_tile * tile_k < left_k
            for i in cutlass.range_constexpr(count):
                if const_expr(whole) or at[0, i, 0][0] < left_m:
                    values = cute.make_ptr(mA.element_type, address[i], mA.memspace, assumed_align=16)
                    source = cute.make_tensor(values, cute.make_layout(((width, 1),)))
                    cute.copy(thread, source, to[None, i, 0, stage], pred=inside)
                address[i] += tile_k * mA.element_type.width // 8

        return (functools.partial(copy, True), functools.partial(copy, False)), None

    @cute.jit
    def load_part(
        self,
        pipeline: PipelineAsync,
        state: PipelineState,
        copy_A: tuple[Copy, Copy],
        copy_B: Copy,
        k_tiles: KTiles,
        first: Int32,
        end: Int32,
        last: cutlass.Constexpr[bool],
    ) -> PipelineState:
        # Whole tiles have their own loop: a condition on the row makes the loop up to 20 % slower.
        copy_whole, copy_fewer = copy_A
        after = state
        if k_tiles.rows >= self.cta_tile_shape_mnk[0]:
            after = self.load_k_tiles(pipeline, state, copy_whole, copy_B, first, end, last)
        else:
            after = self.load_k_tiles(pipeline, state, copy_fewer, copy_B, first, end, last)
        return after

    @cute.jit
    def mma(
        self,
        pipeline: PipelineAsync,
        state: PipelineState,
        mma_fn: functools.partial[None],
        acc: CuteTensor,
        acc_slow: None,
        k_tiles: KTiles,
        warp_group: Int32,
    ) -> PipelineState:
        # Warp groups that share a tile take turns with its blocks. In ping-pong each warp group has its own tile.
        sharing = const_expr(self.atom_layout_mnk[0])
        blocks = (k_tiles.rows + (_WGMMA_ROWS - 1)) // _WGMMA_ROWS
        if const_expr(sharing > 1):
            blocks = (blocks - warp_group + (sharing - 1)) // sharing
        least = const_expr(0 if sharing * self.cluster_shape_mnk[0] > 1 else 1)
        limit = const_expr(cute.size(acc, mode=[1]))
        # There is always a K tile, but the compiler does not know it. If the loop over K could be empty, the previous
        # tile's accumulators would stay live through the epilogue and occupy registers that it needs.
        k_tiles = cutlass.max(k_tiles, 1)
        return self._multiply(pipeline, state, mma_fn, acc, k_tiles, warp_group, blocks, limit, least)

    @cute.jit
    def _multiply(
        self,
        pipeline: PipelineAsync,
        state: PipelineState,
        mma_fn: functools.partial[None],
        acc: CuteTensor,
        k_tiles: KTiles,
        warp_group: Int32,
        blocks: Int32,
        limit: cutlass.Constexpr[int],
        least: cutlass.Constexpr[int],
    ) -> PipelineState:
        """Multiplies a warp group's first `blocks` blocks of rows, of which there are `least` to `limit`.

        Traced recursively: each possible number of blocks has its own loop over K.
        """
        after = state
        if const_expr(limit == least) or blocks >= limit:
            fewer = _of_first_blocks(mma_fn, limit)
            for block in cutlass.range_constexpr(limit, cute.size(acc, mode=[1])):
                acc[None, block, None].fill(0.0)  # these are not stored; filling them ends their live range, see mma
            after = GemmSm90.mma(self, pipeline, state, fewer, acc, None, k_tiles, warp_group)
        else:
            after = self._multiply(pipeline, state, mma_fn, acc, k_tiles, warp_group, blocks, limit - 1, least)
        return after


def _of_first_blocks(mma_fn: functools.partial[None], count: int) -> Copy:
    """Returns quack's function for the products of one K tile, restricted to the first `count` blocks of rows."""
    tiled_mma, acc, tCrA, tCrB = mma_fn.args
    if count == 0:
        return lambda **_: None
    return functools.partial(gemm_w_idx, tiled_mma, _first(acc, count), _first(tCrA, count), tCrB)


def _first(tensor: CuteTensor, count: int) -> cute.Tensor:
    shape = (tensor.shape[0], count, *tensor.shape[2:])
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=tensor.layout.stride))
