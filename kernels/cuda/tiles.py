"""Tile choice per (operation, shape class, architecture): a table, filled by measurement, never by tuning at run time.

A shape class is made of a GEMM's columns N and its contraction length K where that is fixed: sizes that do not change
from step to step. Row counts do, and no choice depends on them. Cluster size along M stays 1: with 2 an expert's rows
would be padded to 256.
"""

from dataclasses import dataclass
from typing import Literal

Operation = Literal["up", "down", "down_backward", "up_backward", "weight_up", "weight_down"]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One CTA's output tile, whether two tiles alternate on the tensor cores (ping-pong), and the cluster."""

    m: int
    n: int
    pingpong: bool
    cluster_m: int = 1
    cluster_n: int = 1

    def __str__(self) -> str:
        """Its name in the benchmark's records, as 128x192pc1."""
        return f"{self.m}x{self.n}{'p' if self.pingpong else ''}c{self.cluster_n}"


_PINGPONG_128 = TileConfig(128, 128, True)
_PINGPONG_192 = TileConfig(128, 192, True)
_WIDE = TileConfig(128, 256, False)
_TALL = TileConfig(256, 192, False)
# Blackwell: compiled, not measured.
_SM100 = TileConfig(128, 128, False)
# From this contraction length on, dX is faster on wide tiles.
_LONG_K = 1024


def tile_config(operation: Operation, N: int, K: int, arch: int) -> TileConfig:
    """The tile of a GEMM with N output columns and contraction length K (0 where rows are summed over).

    arch: major compute capability, 9 or 10. Raises ValueError for another.
    """
    if arch == 10:
        return _SM100
    if arch != 9:
        raise ValueError(f"no tiles for compute capability {arch}.x; supported are 9.x (Hopper) and 10.x (Blackwell)")
    return _hopper_tile(operation, N, K)


def _hopper_tile(operation: Operation, N: int, K: int) -> TileConfig:
    """Filled from benchmarks/results/grouped_gemms_h200.json (docs/gpu_kernels.md)."""
    if N < 192:
        return _PINGPONG_128
    divides = N % 192 == 0
    match operation:
        case "up":
            return _PINGPONG_192 if divides else _WIDE
        case "down":
            return _PINGPONG_192
        case "down_backward":
            return _PINGPONG_128
        case "up_backward":
            return _WIDE if K >= _LONG_K else _PINGPONG_192
        case "weight_up" | "weight_down":
            return _TALL if divides else _WIDE
