"""quack's GEMMs over rows as they run on Hopper here: with all that ours change in them."""

import functools

from sonic_ep.kernels.cuda.epilogue import OneBarrierEpilogue
from sonic_ep.kernels.cuda.partial_tiles import SkipsMissingRows
from sonic_ep.kernels.cuda.quack_compat import EpiMod, OverriddenEpiMod


class _HopperRows(OneBarrierEpilogue, SkipsMissingRows):
    """Before quack's kernel in the order of inheritance."""


class HopperMod(OverriddenEpiMod):
    """An epilogue in these kernels. Their dynamic schedule needs a counter of two values, and leaves them at zero."""


@functools.cache
def hopper_mod(mod: EpiMod) -> HopperMod:
    """An epilogue in the kernels that Hopper gets."""
    return HopperMod(mod, _HopperRows, "sonic_ep on Hopper")
