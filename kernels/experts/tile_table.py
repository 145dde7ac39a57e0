"""The GEMM tile of each (operation, shape class, architecture): a measured table, without tuning at run time.

A shape class is the two sizes of a GEMM that do not change from step to step, and whether experts' row counts are
multiples of 128 (`tile_aligned`). Row counts change every step, so no tile depends on them.

Most GEMMs fetch their tiles from a counter (`dynamic`). With a static schedule each CTA computes every 132nd tile (an
H100 or H200 has 132 SMs). Ragged experts let such CTAs fall behind one another until the experts in flight no longer
fit the L2. Clusters of 2 CTAs along N, which read the same rows, diverge less: if each tile has little work (a small
K), they are faster without a counter. GEMMs over rows have no clusters of 2 along M: one of the two CTAs would idle
wherever an expert has an odd number of tiles.

Measurements: "Tiles" in docs/gpu_kernels.md.
"""

from dataclasses import dataclass, replace
from typing import Literal

from sonic_ep.kernels.common.sizes import cdiv

# M of docs/design.md: the rows of one grouped-GEMM tile. Row counts are aligned to it.
TILE_ROWS = 128

# The work on other SMs at the same time as a GEMM of backward, see `reserved_clusters`.
ReserveFor = Literal["sums", "exchange"]
# NCCL's kernel gets one of so many clusters: links need few SMs.
EXCHANGE_SHARE = 8

# up_heavy: "up" with a bias and a clamp or exact GELU. Its epilogue takes so many registers that ping-pong tiles spill.
# down_backward_heavy: "down_backward" of activations whose derivative takes more registers than SwiGLU's.
# accumulate: a product with few summands, of a low-rank update, that is added to its output.
Operation = Literal[
    "up",
    "up_heavy",
    "down",
    "down_backward",
    "down_backward_heavy",
    "up_backward",
    "accumulate",
    "weight_up",
    "weight_down",
]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The output tile of a CTA and how CTAs are scheduled.

    m, n: extents of the tile. pingpong: two warp groups compute a tile each and alternate on the tensor cores.
    cluster_m, cluster_n: CTAs of a cluster. dynamic: CTAs fetch their next tile from a counter; otherwise each computes
    every 132nd tile.
    """

    m: int
    n: int
    pingpong: bool
    cluster_m: int = 1
    cluster_n: int = 1
    dynamic: bool = False

    def __str__(self) -> str:
        """Returns the tile's name in the records of benchmarks/results/, for example 128x192pc11d."""
        flags = "p" if self.pingpong else "", "d" if self.dynamic else ""
        return f"{self.m}x{self.n}{flags[0]}c{self.cluster_m}{self.cluster_n}{flags[1]}"


# For low-rank updates, of which most columns of a wider tile would be padding.
_PINGPONG_32 = TileConfig(128, 32, True, dynamic=True)
_NARROW_64 = TileConfig(128, 64, False, dynamic=True)
_TALL_32 = TileConfig(256, 32, False, dynamic=True)
_TALL_64 = TileConfig(256, 64, False, dynamic=True)
_PINGPONG_128 = TileConfig(128, 128, True, dynamic=True)
_PINGPONG_192 = TileConfig(128, 192, True, dynamic=True)
_PINGPONG_192_PAIRS = TileConfig(128, 192, True, cluster_n=2)
_PINGPONG_192_TALL_PAIRS = TileConfig(128, 192, True, cluster_m=2, dynamic=True)
_TALL_PAIRS = TileConfig(192, 128, True, cluster_n=2)
_LARGE_PAIRS = TileConfig(256, 192, False, cluster_n=2)
_WIDE = TileConfig(128, 256, False, dynamic=True)
_WIDE_PAIRS = TileConfig(128, 256, False, cluster_m=2, dynamic=True)
# Blackwell: this tile compiles; it has not been measured.
_SM100 = TileConfig(128, 128, False)

# Limits d and n: above it (DeepSeek-V3's d = 7168, Mixtral's n = 14336) some operations are faster with other tiles,
# which at d = 4096 are slower (grouped_gemms_large_h200.json).
LARGE = 6144

# Limits K, the products summed per output element: from here on clusters of 2 in a GEMM over rows fetch their tiles
# from the counter. With a smaller K the counter costs more than it saves (grouped_gemms_drawn_h200.json).
_MIN_LONG_SUM = 1024

# One SM takes as long for the gather_sum of dX as 132 SMs take for the GEMM of dW1 if J is this number, for any number
# of pairs and any d. From grouped_gemms_left_free_h200.json.
_GEMM_COLUMNS_PER_SUM = 9216


def tile_config(operation: Operation, N: int, other_size: int, arch: int, *, tile_aligned: bool = False) -> TileConfig:
    """Returns the tile of a GEMM with N output columns.

    other_size:   the GEMM's other fixed size: K of a GEMM over rows, M of a weight gradient.
    arch:         major compute capability, 9 or 10. ValueError for any other.
    tile_aligned: whether experts usually have a multiple of 128 rows.
    """
    if arch == 10:
        return _SM100
    if arch != 9:
        raise ValueError(f"no tiles for compute capability {arch}.x; supported are 9.x (Hopper) and 10.x (Blackwell)")
    return _hopper_tile(operation, N, other_size, tile_aligned=tile_aligned)


def _hopper_tile(operation: Operation, N: int, other_size: int, *, tile_aligned: bool) -> TileConfig:
    """Measured in grouped_gemms_{tiles,large,partial*,dgated,weights,drawn}_h200.json of benchmarks/results/."""
    divides = N % 192 == 0
    match operation:
        case "down_backward" if 192 * cdiv(N, 192) <= N + N // 32:
            return _PINGPONG_192
        case "down_backward" | "down_backward_heavy":  # 128x192 would spill in the heavy one
            return _PINGPONG_128
        case "weight_up" | "weight_down" if N <= 64:
            return _TALL_32 if N <= 32 else _TALL_64
        case "weight_up" | "weight_down":
            return _PINGPONG_192_TALL_PAIRS if divides or max(N, other_size) > LARGE else _WIDE_PAIRS
        case _ if N <= 64:
            return _PINGPONG_32 if N <= 32 else _NARROW_64
        case _ if N < 192:
            return _PINGPONG_128
        case "accumulate":
            return _WIDE
        case "up":
            return _PINGPONG_192 if divides else _WIDE
        case "up_heavy":  # not timed; of "up", _WIDE costs 1 % with ragged experts and 10 % with equal ones
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


def reserved_clusters(reserve_for: ReserveFor | None, J: int, clusters: int, arch: int) -> int:
    """Returns how many clusters a GEMM of backward leaves free for what runs concurrently.

    "sums": the gather_sum of dX, with dW1. The number makes both kernels end together. The work of both is
    proportional to P and d, so it depends on J alone. Zero except on Hopper: elsewhere the GEMM is quack's kernel,
    which lets the next one start only at its end.
    "exchange": NCCL's kernel, which would otherwise start when the GEMM ends.
    clusters: how many fit the device.
    """
    if reserve_for == "exchange":
        return clusters // EXCHANGE_SHARE
    if reserve_for is None or arch != 9:
        return 0
    # Half of a device already saturates memory: the sums are no faster on more SMs.
    return min(round(clusters * _GEMM_COLUMNS_PER_SUM / (132 * J)), clusters // 2)
