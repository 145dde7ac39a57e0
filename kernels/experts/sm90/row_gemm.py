"""quack's GEMMs over rows as they run on Hopper here: with all that ours change in them."""

import functools

from sonic_ep.kernels.experts.quack_compat import EpiMod, OverriddenEpiMod
from sonic_ep.kernels.experts.sm90.epilogue import OneBarrierEpilogue
from sonic_ep.kernels.experts.sm90.varlen_m import SkipsMissingRows


class _HopperRows(OneBarrierEpilogue, SkipsMissingRows):
    """Before quack's kernel in the order of inheritance."""


class HopperMod(OverriddenEpiMod):
    """An epilogue in these kernels. Their dynamic schedule needs a counter of two values, and leaves them at zero."""


@functools.cache
def hopper_mod(mod: EpiMod) -> HopperMod:
    """An epilogue in the kernels that Hopper gets."""
    return HopperMod(mod, _HopperRows, "sonic_ep on Hopper")
