"""Hopper GEMMs that prefetch the next tile while they load this one, from a counter that they leave at zero.

Fetching a tile takes about 2 us: an atomic addition and, over rows, a search through the experts' starts and two more
reads, one after the other. quack's loading warps fetch after the last load of a tile and load nothing meanwhile. Here
gathering warps fetch once they have filled all stages. A single warp that loads by TMA fetches after two K tiles: it is
fast enough to fill the other stages afterwards.

quack's counter returns to zero by itself if the number of tiles is known at launch. Over rows it is not known, so quack
needs a separate kernel that zeroes the counter before every launch. Here a second value follows the counter: how many
clusters have fetched their last tile. The last cluster zeroes both values for the next launch on the same stream.

Every method overrides one of quack's (GemmSm90, its schedulers, quack 0.6.5) and is traced by CuTe-DSL.
"""

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.pipeline import PipelineAsync, PipelineState

from sonic_ep.kernels.experts.quack_compat import GemmSm90, VarlenMTileScheduler
from sonic_ep.kernels.experts.sm90.gather_producer import Copy, load_stage

_TMA_K_TILES_FIRST = 2  # K tiles loaded by TMA before the next tile is fetched


class KTiles(Int32):
    """The number of K tiles of an output tile, an Int32 with two more fields.

    quack's kernel (GemmSm90.kernel, quack 0.6.5) passes its loops over K only this number of a tile, and ours need two
    more values. The result of arithmetic with it is a plain Int32 without the fields.

    scheduler: the scheduler that returned the tile. rows: the number of rows of the tile, an Int32; None in weight
    gradients, which do not use it.
    """

    def __init__(self, count: Int32, scheduler: "PrefetchingScheduler", rows: Int32 = None) -> None:
        super().__init__(count)
        self.scheduler, self.rows = scheduler, rows

    @property
    def dtype(self) -> type[Int32]:
        """Returns the type of the results of arithmetic."""
        return Int32

    def __new_from_mlir_values__(self, values: list[object]) -> "KTiles":
        """CuTe-DSL calls this when it passes the value into a traced branch or loop."""
        return KTiles(values[0], self.scheduler, self.rows)


class PrefetchingScheduler:
    """Overrides for one of quack's schedulers, which must come after this class among the bases."""

    def get_split_k_tile_range(self, k_tile_total: Int32, rows: Int32 | None, **_: object) -> tuple[int, KTiles]:
        """Returns a tile's first K tile, always 0 because K is never split here, and its number of K tiles."""
        return 0, KTiles(k_tile_total, self)

    def fetch_next_tile(self, fetches: Boolean | bool) -> None:
        """Moves this warp to the next tile. With `fetches`, this warp also fetches that tile for all warps."""
        super().advance_to_next_work(is_scheduler_warp=fetches)  # type: ignore[misc]  # pyright: ignore

    def advance_to_next_work(self, is_scheduler_warp: Boolean | bool = False, **how: object) -> None:
        if is_scheduler_warp is False:
            super().advance_to_next_work(**how)  # type: ignore[misc]  # pyright: ignore
        # Else this is a loading warp, which has already called fetch_next_tile while it loaded the tile.


class VarlenPrefetchingScheduler(PrefetchingScheduler, VarlenMTileScheduler):
    """Schedules the tiles of a GEMM over rows, and resets the tile counter at the end."""

    params: Any  # VarlenMTileScheduler's; its counter may be None, which the checker does not see excluded

    @cute.jit
    def producer_tail(self) -> None:
        """The fetching warp of each cluster calls this after its last tile. The last cluster zeroes the counter."""
        VarlenMTileScheduler.producer_tail(self)
        counter = self.params.tile_count_semaphore
        if const_expr(counter is not None):
            if cute.arch.lane_idx() == 0:
                done = cute.arch.atomic_add(counter + 1, Int32(1))
                if done == cute.arch.grid_dim()[2] - 1:
                    cute.arch.store(counter, Int32(0))
                    cute.arch.store(counter + 1, Int32(0))


@cute.jit
def fetch_next_tile(gemm: GemmSm90, scheduler: PrefetchingScheduler) -> None:
    """Moves a loading warp to the next tile. All loading warps call it; one warp of the cluster fetches the tile."""
    fetches = True
    if const_expr(gemm.num_ab_load_warps > 1):
        fetches = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == gemm.ab_load_warp_id
    if const_expr(gemm.cluster_shape_mnk[0] * gemm.cluster_shape_mnk[1] > 1):
        fetches = fetches and cute.arch.block_idx_in_cluster() == 0
    scheduler.fetch_next_tile(fetches)


class TilePrefetchLoader:
    """The loading warps of a GEMM over rows: they load the K tiles of A and B and fetch the next tile in between."""

    # GemmSm90's
    ab_load_warp_id: int
    num_ab_load_warps: int
    ab_stage: int
    cluster_shape_mnk: tuple[int, int, int]

    # Method of a subclass that loads the K tiles first..end-1. `last`: K may end inside the last of them, so its copies
    # are predicated.
    load_part: Callable[..., PipelineState]

    @cute.jit
    def load_AB_gather_A(
        self,
        pipeline: PipelineAsync,
        state: PipelineState,
        copy_A: Copy,
        prefetch: None,
        copy_B: Copy,
        k_tiles: KTiles,
        varlen_m: bool = True,
    ) -> PipelineState:
        first = cutlass.min(k_tiles - 1, self.ab_stage)
        state = self.load_part(pipeline, state, copy_A, copy_B, k_tiles, Int32(0), first, False)
        fetch_next_tile(self, k_tiles.scheduler)
        return self.load_part(pipeline, state, copy_A, copy_B, k_tiles, first, k_tiles, True)

    @cute.jit
    def load_tma(
        self,
        pipeline: PipelineAsync,
        state: PipelineState,
        copy_fns: Sequence[Copy],
        k_tiles: KTiles,
        k_tile_start: int = 0,
    ) -> PipelineState:
        first = cutlass.min(k_tiles - 1, _TMA_K_TILES_FIRST)
        state = GemmSm90.load_tma(self, pipeline, state, copy_fns, first)
        fetch_next_tile(self, k_tiles.scheduler)
        return GemmSm90.load_tma(self, pipeline, state, copy_fns, k_tiles - first, first)

    @cute.jit
    def load_k_tiles(
        self,
        pipeline: PipelineAsync,
        state: PipelineState,
        copy_A: Copy,
        copy_B: Copy,
        first: Int32,
        end: Int32,
        last: cutlass.Constexpr[bool],
    ) -> PipelineState:
        """quack's loop of the warps that gather A, over the K tiles first..end-1. last: as in `load_part`."""
        free = Boolean(True)
        if first < end:
            free = pipeline.producer_try_acquire(state)
        for k_tile in cutlass.range(first, end - 1 if const_expr(last) else end, unroll=1):
            state = load_stage(self, pipeline, state, free, copy_A, copy_B, k_tile, False)
            free = Boolean(True)
            if k_tile + 1 < end:
                free = pipeline.producer_try_acquire(state)
        if const_expr(last):
            state = load_stage(self, pipeline, state, free, copy_A, copy_B, end - 1, True)
        return state
