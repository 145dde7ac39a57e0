"""Tile choice per (operation, shape class, architecture): a table, filled by measurement, never by tuning at run time.

A shape class is the GEMM's number of columns N: it does not change from step to step. Row counts do, and no choice
depends on them. Cluster size along M stays 1: with 2 an expert's rows would be padded to 256.
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


# Hopper. Starting points from docs/gpu_kernels.md; a narrow N takes a tile that divides it.
_SM90: dict[Operation, tuple[TileConfig, TileConfig]] = {
    # (N >= 192, narrower)
    "up": (TileConfig(128, 192, True), TileConfig(128, 128, True)),
    "down": (TileConfig(128, 192, True), TileConfig(128, 128, True)),
    "down_backward": (TileConfig(128, 128, True), TileConfig(128, 128, True)),
    "up_backward": (TileConfig(128, 256, False), TileConfig(128, 128, True)),
    "weight_up": (TileConfig(256, 192, False), TileConfig(256, 128, False)),
    "weight_down": (TileConfig(256, 192, False), TileConfig(256, 128, False)),
}
# Blackwell: compiled, not measured.
_SM100 = TileConfig(128, 128, False)


def tile_config(operation: Operation, N: int, arch: int) -> TileConfig:
    """The tile of a GEMM whose output has N columns, on an architecture's major number (9 or 10)."""
    if arch == 9:
        wide, narrow = _SM90[operation]
        return wide if N >= 192 and (N % wide.n == 0 or N > 2 * wide.n) else narrow
    if arch == 10:
        return _SM100
    raise ValueError(f"no tiles for compute capability {arch}.x; supported are 9.x (Hopper) and 10.x (Blackwell)")
