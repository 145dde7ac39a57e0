"""Hopper GEMMs that draw their next tile amid the loads of this one, from a counter that they leave at zero.

To draw a tile takes an atomic addition and, over rows, a search through the experts' starts and two more reads, one
after the other, about 2 us. quack's loading warps do so when they are done with a tile, and load nothing meanwhile.
Here they draw as soon as they have filled the stages, or two of them where one warp loads by TMA: fast enough to fill
the others after.

quack's counter goes around to zero by itself where the number of tiles is known at the launch. Over rows it must be
zeroed before every launch, by a kernel of its own. Here it is followed by a count of the clusters that will not draw
any more, and the last one of these zeroes both, for the next launch on the same stream.

Every method overrides one of quack's (GemmSm90, its schedulers, quack 0.6.5) and is traced by CuTe-DSL.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from sonic_ep.kernels.experts.quack_compat import GemmSm90, VarlenMTileScheduler
from sonic_ep.kernels.experts.sm90.gather_producer import load_stage

_TMA_K_TILES_FIRST = 2  # K tiles loaded before the next tile is drawn


class KTiles(Int32):
    """The number of K tiles of an output tile, with two fields that loops over K need beside it.

    quack's kernel (GemmSm90.kernel, quack 0.6.5) tells its loops over K nothing of a tile but this number, so what else
    they need has to come with it. What is computed from it is a plain Int32.

    scheduler: the one that gave the tile. rows: how many rows the tile has, an Int32; None where nobody asks.
    """

    def __init__(self, count: Any, scheduler: Any, rows: Any = None) -> None:
        super().__init__(count)
        self.scheduler, self.rows = scheduler, rows

    @property
    def dtype(self) -> type[Int32]:
        """The type that arithmetic with it gives."""
        return Int32

    def __new_from_mlir_values__(self, values: Any) -> "KTiles":
        """Called where CuTe-DSL hands it into a traced branch or loop."""
        return KTiles(values[0], self.scheduler, self.rows)


class PrefetchingScheduler:
    """What changes in a scheduler of quack's, which must come after it among a class's bases."""

    def get_split_k_tile_range(self, k_tile_total: Int32, rows: Any, **_: Any) -> tuple[int, KTiles]:
        """Returns a tile's first K tile and the number of them: K is never split here."""
        return 0, KTiles(k_tile_total, self)

    def fetch_next_tile(self, fetches: Boolean | bool) -> None:
        """Draws the next tile and tells it to all warps, if this is the warp that draws."""
        super().advance_to_next_work(is_scheduler_warp=fetches)  # type: ignore[misc]  # pyright: ignore

    def advance_to_next_work(self, is_scheduler_warp: Boolean | bool = False, **how: Any) -> None:
        if is_scheduler_warp is False:
            super().advance_to_next_work(**how)  # type: ignore[misc]  # pyright: ignore
        # Else these warps are done with a tile's loads, amid which they have drawn the next one.


class VarlenPrefetchingScheduler(PrefetchingScheduler, VarlenMTileScheduler):
    """Of tiles over rows."""

    # VarlenMTileScheduler's
    params: Any

    @cute.jit
    def producer_tail(self) -> None:
        """Called by the warp that draws, after its last tile."""
        VarlenMTileScheduler.producer_tail(self)
        counter = self.params.tile_count_semaphore
        if const_expr(counter is not None):
            if cute.arch.lane_idx() == 0:
                done = cute.arch.atomic_add(counter + 1, Int32(1))
                if done == cute.arch.grid_dim()[2] - 1:
                    cute.arch.store(counter, Int32(0))
                    cute.arch.store(counter + 1, Int32(0))


@cute.jit
def fetch_next_tile(gemm: Any, scheduler: Any) -> None:
    """Called by all loading warps: the one of its cluster that draws does so."""
    fetches = True
    if const_expr(gemm.num_ab_load_warps > 1):
        fetches = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == gemm.ab_load_warp_id
    if const_expr(gemm.cluster_shape_mnk[0] * gemm.cluster_shape_mnk[1] > 1):
        fetches = fetches and cute.arch.block_idx_in_cluster() == 0
    scheduler.fetch_next_tile(fetches)


class TilePrefetchLoader:
    """The loading warps of a GEMM over rows."""

    # GemmSm90's
    ab_load_warp_id: int
    num_ab_load_warps: int
    ab_stage: int
    cluster_shape_mnk: Any

    # Loads the K tiles from `first` to `end`, behind the last of which lies what may not be read if `last`.
    load_part: Any

    @cute.jit
    def load_AB_gather_A(
        self, pipeline: Any, state: Any, copy_A: Any, prefetch: None, copy_B: Any, k_tiles: Any, varlen_m: bool = True
    ) -> Any:
        first = cutlass.min(k_tiles - 1, self.ab_stage)
        state = self.load_part(pipeline, state, copy_A, copy_B, k_tiles, Int32(0), first, False)
        fetch_next_tile(self, k_tiles.scheduler)
        return self.load_part(pipeline, state, copy_A, copy_B, k_tiles, first, k_tiles, True)

    @cute.jit
    def load_tma(self, pipeline: Any, state: Any, copy_fns: Any, k_tiles: Any, k_tile_start: int = 0) -> Any:
        first = cutlass.min(k_tiles - 1, _TMA_K_TILES_FIRST)
        state = GemmSm90.load_tma(self, pipeline, state, copy_fns, first)
        fetch_next_tile(self, k_tiles.scheduler)
        return GemmSm90.load_tma(self, pipeline, state, copy_fns, k_tiles - first, first)

    @cute.jit
    def load_k_tiles(
        self,
        pipeline: Any,
        state: Any,
        copy_A: Any,
        copy_B: Any,
        first: Int32,
        end: Int32,
        last: cutlass.Constexpr[bool],
    ) -> Any:
        """quack's loop of warps that gather A, over some K tiles."""
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
