"""quack's GEMMs over rows with all of our overrides for Hopper."""

import functools

from sonic_ep.kernels.experts.quack_compat import EpiMod, OverriddenEpiMod
from sonic_ep.kernels.experts.sm90.epilogue import OneBarrierEpilogue
from sonic_ep.kernels.experts.sm90.varlen_m import SkipsMissingRows


class _HopperRows(OneBarrierEpilogue, SkipsMissingRows):
    """Our overrides, which precede quack's kernel class in the method resolution order.

    One CTA computes one output tile at a time: the products of the tile's rows with their expert's weights, then the
    epilogue. It reads A (gathered by A_idx or not), B and the epilogue's operands (C, bias, combine weights). It writes
    D and the epilogue's other outputs. Grid: (cluster_m, cluster_n, clusters), persistent, with as many clusters as fit
    the device, or as the rows can fill if that is fewer.

    Example: two experts with 200 and 40 rows, tiles of 128 rows. Expert 0 has two tiles, of 128 and of 72 rows, and
    expert 1 has one of 40. In blocks of 64 rows the tensor cores multiply 2, 2 and 1. Of the last tile the gathering
    warps fetch 40 rows, and 40 rows of D are stored.
    """


class HopperMod(OverriddenEpiMod):
    """A quack epilogue in these kernels. A dynamic schedule needs a counter of two zeros and leaves them at zero."""


@functools.cache
def hopper_mod(mod: EpiMod) -> HopperMod:
    """Returns the epilogue `mod` in the kernels for Hopper."""
    return HopperMod(mod, _HopperRows, "sonic_ep on Hopper")
