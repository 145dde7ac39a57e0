"""quack's GEMMs over rows as they run on Hopper here: with all that ours change in them."""

import functools

from quack.epilogue.frontend import EpiMod

from sonic_ep.kernels.cuda.changed_mod import ChangedMod
from sonic_ep.kernels.cuda.epilogue import OneBarrierEpilogue
from sonic_ep.kernels.cuda.partial_tiles import ComputesRowsOnly


class _HopperRows(OneBarrierEpilogue, ComputesRowsOnly):
    """Before quack's kernel in the order of inheritance."""


@functools.cache
def hopper_mod(mod: EpiMod) -> EpiMod:
    """An epilogue in the kernels that Hopper gets."""
    return ChangedMod(mod, _HopperRows, "sonic_ep on Hopper")
