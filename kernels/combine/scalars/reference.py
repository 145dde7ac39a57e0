"""`values_of_pairs` in plain torch: one scalar of each pair, in the order of a routing. The twin of triton.py beside
it.

Legend: V pairs this rank receives, P rows of the pair buffer, Z partial sums of one value.
"""

import torch
from torch import Tensor


def values_of_pairs(
    parts_PZ: Tensor,
    slot_V: Tensor,
    num_pairs: Tensor,
    capacity: int,
    *,
    into: Tensor | None = None,
    overlap_previous: bool = False,
) -> Tensor:
    """(room,) the value of each received pair, in arrival order, and zeros behind them.

    parts_PN: whose rows sum to the values. slot_V: of a PairBuffer; num_pairs: (1,) how many of its entries count, V
    and `capacity` at most. into: where the values go. beside: as of gather_sum in kernels/experts/reference.py.
    """
    values_V = parts_PZ.index_select(0, slot_V[:capacity]).sum(1)
    values = torch.nn.functional.pad(values_V, (0, max(0, capacity - slot_V.shape[0])))
    values = values.where(torch.arange(capacity, device=values.device) < num_pairs, 0)
    return values if into is None else into.copy_(values)
