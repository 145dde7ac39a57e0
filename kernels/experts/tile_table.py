"""Tile choice per (operation, shape class, architecture): a table, filled by measurement, never by tuning at run time.

A shape class is the two sizes of a GEMM that do not change from step to step, and whether experts' rows are rounded to
whole tiles of 128. Nothing depends on row counts, which change.
Most GEMMs draw their tiles from a counter: with ragged experts, CTAs that take every 132nd tile drift apart until the
experts in flight no longer fit the L2. Pairs of them that share the rows which they read drift less: those with little
to do for a tile are better off without a counter. The cluster of a GEMM over rows stays 1 along M: with 2 a CTA idles
where an expert has an odd number of tiles.
"""

from dataclasses import dataclass, replace
from typing import Literal

from sonic_ep.kernels.common.sizes import cdiv

# M: rows of one grouped-GEMM tile, and what everything is aligned to (docs/design.md).
TILE_ROWS = 128

# up_clamped: "up" under a bias and gpt-oss's clamp, an epilogue of so many registers that ping-pong tiles would spill.
# down_backward_heavy: "down_backward" of activations whose derivative takes more registers than SwiGLU's.
Operation = Literal[
    "up", "up_clamped", "down", "down_backward", "down_backward_heavy", "up_backward", "weight_up", "weight_down"
]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One CTA's output tile, whether two tiles alternate on the tensor cores (ping-pong), the cluster, and whether CTAs
    draw their next tile from a counter (dynamic) or take every 132nd."""

    m: int
    n: int
    pingpong: bool
    cluster_m: int = 1
    cluster_n: int = 1
    dynamic: bool = False

    def __str__(self) -> str:
        """Its name in the benchmark's records, as 128x192pc11d."""
        flags = "p" if self.pingpong else "", "d" if self.dynamic else ""
        return f"{self.m}x{self.n}{flags[0]}c{self.cluster_m}{self.cluster_n}{flags[1]}"


_PINGPONG_128 = TileConfig(128, 128, True, dynamic=True)
_PINGPONG_192 = TileConfig(128, 192, True, dynamic=True)
_PINGPONG_192_PAIRS = TileConfig(128, 192, True, cluster_n=2)
_PINGPONG_192_TALL_PAIRS = TileConfig(128, 192, True, cluster_m=2, dynamic=True)
_TALL_PAIRS = TileConfig(192, 128, True, cluster_n=2)
_LARGE_PAIRS = TileConfig(256, 192, False, cluster_n=2)
_WIDE = TileConfig(128, 256, False, dynamic=True)
_WIDE_PAIRS = TileConfig(128, 256, False, cluster_m=2, dynamic=True)
# Blackwell: compiled, not measured.
_SM100 = TileConfig(128, 128, False)

# Sizes above this, as DeepSeek-V3's d of 7168 and Mixtral's n of 14336, want other tiles in some operations.
LARGE = 6144

# From so many products of an element on, pairs of a GEMM over rows draw their tiles.
_MIN_LONG_SUM = 1024

# Sums of rows on one multiprocessor take as long as a GEMM that contracts these rows with so many columns on 132.
_GEMM_COLUMNS_PER_SUM = 9216


def tile_config(operation: Operation, N: int, other_size: int, arch: int, *, tile_aligned: bool = False) -> TileConfig:
    """The tile of a GEMM with N output columns.

    other: the GEMM's other fixed size, K over rows, M of weight gradients. arch: major compute capability, 9 or 10.
    Raises ValueError for another. rounded: is an expert's number of rows a multiple of 128, as a rule?
    """
    if arch == 10:
        return _SM100
    if arch != 9:
        raise ValueError(f"no tiles for compute capability {arch}.x; supported are 9.x (Hopper) and 10.x (Blackwell)")
    return _hopper_tile(operation, N, other_size, tile_aligned=tile_aligned)


def _hopper_tile(operation: Operation, N: int, other_size: int, *, tile_aligned: bool) -> TileConfig:
    """Filled from grouped_gemms_{tiles,large,partial*,dgated,weights,drawn}_h200.json of benchmarks/results/."""
    divides = N % 192 == 0
    match operation:
        case "down_backward" if 192 * cdiv(N, 192) <= N + N // 32:
            return _PINGPONG_192
        case "down_backward" | "down_backward_heavy":  # 128x192 would spill registers in the latter
            return _PINGPONG_128
        case "weight_up" | "weight_down":
            return _PINGPONG_192_TALL_PAIRS if divides or max(N, other_size) > LARGE else _WIDE_PAIRS
        case _ if N < 192:
            return _PINGPONG_128
        case "up":
            return _PINGPONG_192 if divides else _WIDE
        case "up_clamped":  # not timed itself; without the clamp _WIDE costs 1 % on ragged experts, 10 % on even ones
            return _WIDE
        case "down" | "up_backward":
            if not (tile_aligned or divides):
                pairs = _TALL_PAIRS
            elif not tile_aligned and other_size > LARGE:
                pairs = _LARGE_PAIRS
            elif cdiv(N, 192) % 2 == 0:
                pairs = _PINGPONG_192_PAIRS
            else:
                return _PINGPONG_192
            return replace(pairs, dynamic=other_size >= _MIN_LONG_SUM)


def reserved_clusters(J: int, clusters: int, arch: int) -> int:
    """Of the clusters that fit a device, those that the GEMM of dW1 leaves to the sums of dX beside it.

    As many as make both end together: the work of either is proportional to P and d, so J decides alone
    (grouped_gemms_left_free_h200.json). On other devices than Hopper quack's kernel lets nothing begin beside it.
    """
    if arch != 9:
        return 0
    # On more than half of a device sums are no faster: the memory is busy.
    return min(round(clusters * _GEMM_COLUMNS_PER_SUM / (132 * J)), clusters // 2)
