"""The GEMM of weight gradients, which contracts over gathered rows: quack's kernel, on Hopper with our own loader.

quack's gathering warps read the indices of a K tile's rows just before they copy the rows. Every K tile then waits for
two L2 round trips, one after the other. Here the indices are prefetched two K tiles early, alternately into two sets of
registers. Copying one set to the other would not do: the copy waits for the indices that were just read.

Experts have different numbers of rows, so CTAs with equal numbers of tiles end at different times. The tiles are
therefore fetched from a counter, each while the previous one is loaded (tile_prefetch.py). Results are the same bit for
bit as quack's.

Legend: R rows this rank receives, P rows of the pair buffer, e local experts. m, n are GEMM extents: columns of the
gathered rows and of the others.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.pipeline import PipelineAsync, PipelineState
from torch import Tensor

from sonic_ep.kernels.common.sources import sources_of
from sonic_ep.kernels.experts.quack_compat import (
    CuteTensor,
    GemmDefaultEpiMixin,
    GemmDefaultSm90,
    GemmDefaultSm100,
    RoundingMode,
    TileScheduler,
    VarlenManager,
    compile_gemm_kernel,
    get_device_capacity,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    jit_cache,
    launch_or_note,
    make_fake_gemm_tensors,
    make_fake_scheduler_args,
    make_fake_varlen_args,
    make_scheduler_args,
    make_varlen_args,
    max_active_clusters,
    require_known_methods,
    torch2cute_dtype_map,
)
from sonic_ep.kernels.experts.sm90.gather_producer import Copy, load_stage
from sonic_ep.kernels.experts.sm90.tile_prefetch import KTiles, PrefetchingScheduler, fetch_next_tile

if TYPE_CHECKING:  # only then, so that the cache key of compiled kernels does not depend on the table
    from sonic_ep.kernels.experts.tile_table import TileConfig

_PREFETCH_DISTANCE = 2  # K tiles between reading the indices of rows and copying the rows; one per register set
_Read = Callable[[Int32, cute.Tensor], None]  # of the indices of a K tile's rows
_SWIZZLE = 8  # quack's default max_swizzle_size: consecutive tiles form groups of this width, for reuse in the L2


class _WeightScheduler(PrefetchingScheduler, TileScheduler):
    """Schedules the tiles of all experts. Their number is known at launch, so quack's counter resets itself."""


class _PrefetchesIndices(GemmDefaultSm90):
    """The weight-gradient GEMM of Hopper. Its methods override GemmSm90's (quack 0.6.5) and are traced by CuTe-DSL.

    One CTA computes one output tile D[expert, m tile, n tile] at a time: the sum over the expert's pairs of the outer
    products of a gathered column of A and a column of B. It reads A_mR through row_of_pair_P, B_nP and expert_starts_e,
    and writes or adds to D_emn. Grid: (cluster_m, cluster_n, clusters), persistent, with as many clusters as fit the
    device less the reserved ones, or as there are tiles if that is fewer.

    Example: expert_starts_e = [0, 3, 3], row_of_pair_P = [4, 0, 4]. D[0] is the sum of three outer products, A[:, 4]
    with B[:, 0], A[:, 0] with B[:, 1] and A[:, 4] with B[:, 2]. Expert 1 has no pair, so D[1] is zeros.
    """

    ab_stage: int  # GemmSm90's

    def get_scheduler_class(self, varlen_m: bool = False) -> type:
        assert not varlen_m
        return _WeightScheduler

    @cute.jit
    def mma(
        self,
        pipeline: PipelineAsync,
        state: PipelineState,
        mma_fn: partial[None],
        acc: cute.Tensor,
        acc_slow: None,
        k_tiles: KTiles,
        warp_group: Int32,
    ) -> PipelineState:
        # An expert without rows waits for no load, and so not for the kernel before this one, which may still read
        # memory that the caching allocator has given to this kernel's output.
        if k_tiles == 0:
            griddepcontrol_wait()
        return GemmDefaultSm90.mma(self, pipeline, state, mma_fn, acc, acc_slow, k_tiles, warp_group)

    @cute.jit
    def _make_gather_A_copy(
        self, mA: CuteTensor, sA: cute.Tensor, varlen: VarlenManager, tile_idx: tuple[Int32, ...], expert: Int32
    ) -> tuple[Copy, tuple[int, Copy]]:
        """Returns copy, (rows, read).

        copy: copies the rows of a K tile into a stage. rows: how many rows each thread copies. read: reads their
        indices.
        """
        # The next kernel may start. This warp has waited for the previous one, and a kernel that needs our results
        # waits for our end.
        griddepcontrol_launch_dependents()
        tile_m, tile_k = const_expr(self.cta_tile_shape_mnk[0]), const_expr(self.cta_tile_shape_mnk[2])
        tiled_copy = self._make_gmem_tiled_copy_A(mA.element_type, self.a_layout, self.num_ab_load_warps * 32)
        thread = tiled_copy.get_slice(cute.arch.thread_idx()[0] - cute.arch.WARP_SIZE * self.ab_load_warp_id)
        to = thread.partition_D(sA)
        at = thread.partition_S(cute.make_identity_tensor((tile_m, tile_k)))
        width, pieces, rows = (const_expr(cute.size(at, mode=[mode])) for mode in range(3))
        indices, len_k = varlen.offset_batch_AIdx(expert), varlen.len_k(expert)
        left_m = varlen.len_m(expert) - tile_idx[0] * tile_m
        row_bytes = Int32(mA.stride[1]) * (mA.element_type.width // 8)
        # Columns behind the last one are replaced by existing ones: their products are not stored.
        columns = cute.make_rmem_tensor(pieces, Int64)
        for i in cutlass.range_constexpr(pieces):
            column = tile_idx[0] * tile_m + cutlass.min(at[0, i, 0][0], left_m - width)
            columns[i] = mA[column, None].iterator.toint()

        def read(k_tile: Int32, into: cute.Tensor) -> None:
            for k in cutlass.range_constexpr(rows):
                into[k] = indices[cutlass.min(k_tile * tile_k + at[0, 0, k][1], len_k - 1)]

        def copy(row_indices: cute.Tensor, k_tile: Int32, stage: Int32, pred: bool) -> None:
            for k in cutlass.range_constexpr(rows):
                inside = None
                if const_expr(pred):  # rows behind the expert's last are filled with zeros
                    inside = cute.make_rmem_tensor(1, Boolean)
                    inside[0] = k_tile * tile_k + at[0, 0, k][1] < len_k
                for i in cutlass.range_constexpr(pieces):
                    address = columns[i] + Int64(row_indices[k]) * Int64(row_bytes)
                    values = cute.make_ptr(mA.element_type, address, mA.memspace, assumed_align=16)
                    source = cute.make_tensor(values, cute.make_layout(((width, 1),)))
                    cute.copy(thread, source, to[None, i, k, stage], pred=inside)

        return copy, (rows, read)

    @cute.jit
    def load_AB_gather_A(
        self,
        pipeline: PipelineAsync,
        state: PipelineState,
        copy_A: Copy,
        indices: tuple[int, _Read],
        copy_B: Copy,
        k_tiles: KTiles,
        varlen_m: bool = True,
    ) -> PipelineState:
        assert not varlen_m
        rows, read = indices
        even, odd = cute.make_rmem_tensor(rows, Int32), cute.make_rmem_tensor(rows, Int32)
        if k_tiles > 0:
            read(Int32(0), even)
            read(Int32(1), odd)
        whole = k_tiles - 1
        pairs = cutlass.max(whole, 0) // 2
        first = cutlass.min(pairs, const_expr((self.ab_stage + 1) // 2))  # fill the stages
        state = self._load_pairs(pipeline, state, copy_A, read, copy_B, Int32(0), first, even, odd)
        fetch_next_tile(self, k_tiles.scheduler)
        state = self._load_pairs(pipeline, state, copy_A, read, copy_B, first, pairs, even, odd)
        if k_tiles > 0:
            free = pipeline.producer_try_acquire(state)
            if whole % 2 == 1:
                state = self._load_k_tile(pipeline, state, free, copy_A, read, copy_B, whole - 1, even, False)
                free = pipeline.producer_try_acquire(state)
                for k in cutlass.range_constexpr(cute.size(even)):
                    even[k] = odd[k]
            state = self._load_k_tile(pipeline, state, free, copy_A, read, copy_B, whole, even, True)
        return state

    @cute.jit
    def _load_pairs(
        self,
        pipeline: PipelineAsync,
        state: PipelineState,
        copy_A: Copy,
        read: _Read,
        copy_B: Copy,
        first: Int32,
        end: Int32,
        even: cute.Tensor,
        odd: cute.Tensor,
    ) -> PipelineState:
        """Loads the pairs of K tiles first..end-1. The indices of a pair's two K tiles are in `even` and in `odd`."""
        for pair in cutlass.range(first, end, unroll=1):
            free = pipeline.producer_try_acquire(state)
            state = self._load_k_tile(pipeline, state, free, copy_A, read, copy_B, 2 * pair, even, False)
            free = pipeline.producer_try_acquire(state)
            state = self._load_k_tile(pipeline, state, free, copy_A, read, copy_B, 2 * pair + 1, odd, False)
        return state

    @cute.jit
    def _load_k_tile(
        self,
        pipeline: PipelineAsync,
        state: PipelineState,
        free: Boolean,
        copy_A: Copy,
        read: _Read,
        copy_B: Copy,
        k_tile: Int32,
        row_indices: cute.Tensor,
        last: cutlass.Constexpr[bool],
    ) -> PipelineState:
        """Loads a K tile into the stage of `state` and returns `state` advanced.

        Except for the last K tile, replaces row_indices by the indices of the K tile _PREFETCH_DISTANCE later.
        """
        these = cute.make_rmem_tensor_like(row_indices)
        for k in cutlass.range_constexpr(cute.size(these)):
            these[k] = row_indices[k]
        if const_expr(not last):
            read(k_tile + _PREFETCH_DISTANCE, row_indices)
        return load_stage(self, pipeline, state, free, partial(copy_A, these), copy_B, k_tile, last)


_KERNELS = {9: _PrefetchesIndices, 10: GemmDefaultSm100}
_PLAIN = GemmDefaultEpiMixin.EpilogueArguments(
    **dict.fromkeys(
        ("alpha", "beta", "mRowVecBroadcast", "mColVecBroadcast", "add_to_output", "rounding_mode", "sr_seed")
    )
)


@jit_cache
def _compile_weight_gemm(
    dtype: type[cutlass.Numeric],
    out_dtype: type[cutlass.Numeric],
    out_major: str,
    tile: "TileConfig",
    accumulate: bool,
    split_gate_up: bool,
    capacity: tuple[int, int],
    written_in: str,
) -> Callable[..., object]:
    """Compiles the kernel of a `WeightGemm`. quack caches it, in memory and on disk, by the arguments.

    written_in: a digest of our sources, only for the cache key (kernels/common/sources.py).
    """
    require_known_methods()
    kernel = _KERNELS[capacity[0]]
    A, B, D, _, _, _, P, e = make_fake_gemm_tensors(
        dtype, dtype, out_dtype, None, "m", "n", out_major, None, varlen_k=True, gather_A=True
    )
    return compile_gemm_kernel(
        kernel,
        dtype,
        (tile.m, tile.n),
        (tile.cluster_m, tile.cluster_n, 1),
        tile.pingpong,
        True,  # persistent
        True,  # gathered
        tile.dynamic,
        capacity,
        A,
        B,
        D,
        None,
        kernel.EpilogueArguments(add_to_output=accumulate, rounding_mode=RoundingMode.RN),
        make_fake_scheduler_args(tile.dynamic, False, e),
        make_fake_varlen_args(False, True, True, P),
        concat_layout=("out",) if split_gate_up else None,
    )


class WeightGemm:
    """D[expert] = A[:, rows of its pairs] @ B[:, its pairs]^T, compiled for a shape class.

    accumulate: add to D instead. split_gate_up: store the even columns of the result first, then the odd ones.
    """

    def __init__(
        self, A_mR: Tensor, D_emn: Tensor, tile: "TileConfig", *, accumulate: bool = False, split_gate_up: bool = False
    ) -> None:
        capacity = get_device_capacity(A_mR.device)
        dtypes = torch2cute_dtype_map[A_mR.dtype], torch2cute_dtype_map[D_emn.dtype]
        major = "n" if D_emn.stride(-1) == 1 else "m"
        self._compiled = _compile_weight_gemm(
            *dtypes, major, tile, accumulate, split_gate_up, capacity, sources_of(__name__)
        )
        self._schedulers: dict[tuple[int, int], object] = {}  # by the address of the counter and reserved clusters
        self.clusters = max_active_clusters(tile.cluster_m * tile.cluster_n, capacity)
        self.dynamic = tile.dynamic

    def run(
        self,
        A_mR: Tensor,
        B_nP: Tensor,
        D_emn: Tensor,
        row_of_pair_P: Tensor,
        expert_starts_e: Tensor,
        counter: Tensor | None = None,
        reserved: int = 0,
    ) -> None:
        """Launches the kernel.

        counter: for a dynamic schedule, zero before the launch and zero again after it.
        reserved: how many of the clusters that fit the device to leave to other kernels.
        """
        key = 0 if counter is None else counter.data_ptr(), reserved
        scheduler = self._schedulers.get(key)
        if scheduler is None:
            scheduler = make_scheduler_args(self.clusters - reserved, _SWIZZLE, counter, None)
            self._schedulers[key] = scheduler
        varlen = make_varlen_args(None, expert_starts_e, row_of_pair_P)
        launch_or_note(self._compiled, A_mR, B_nP, D_emn, None, _PLAIN, scheduler, varlen, None, None)
