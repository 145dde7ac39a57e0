"""Counts that are void unless every rank is well, so that nothing is sent by them: in plain torch.

The host hears late of a rank that cannot go on, and has launched by then what the others would send it. On the device
they all know in time. This is the CPU path, and the oracle of kernels/cuda/condition.py.

Legend: S ranks, E experts.
"""

from torch import Tensor


def void_unless(counts_SE: Tensor, conditions_S: Tensor, healthy: int) -> None:
    """Make all counts zero, in place, unless each rank's condition is `healthy`. All int64."""
    counts_SE.masked_fill_((conditions_S != healthy).any(), 0)
