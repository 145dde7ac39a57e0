"""`values_of_pairs` in plain torch: one scalar per received pair, in arrival order.

The CPU path, and the oracle of kernels/combine/scalars/triton.py.

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
    """Returns (capacity,): the scalar of each received pair, in arrival order, then zeros.

    Shapes:  parts_PZ (P, Z), partial sums, which are added. slot_V of a PairBuffer, int32. num_pairs (1,) int32, how
             many entries of slot_V are pairs: at most V and at most `capacity`. into: a tensor for the result.
    overlap_previous: As in `gather_sum`, kernels/combine/gather_sum/reference.py.
    Example: 2 pairs in rows 2 and 0 of the pair buffer, and a third entry that is spare capacity.

        >>> import torch
        >>> from sonic_ep.kernels.combine.scalars.reference import values_of_pairs
        >>> parts, slot = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([2, 0, 0], dtype=torch.int32)
        >>> values_of_pairs(parts, slot, num_pairs=torch.tensor([2]), capacity=4).tolist()
        [11.0, 3.0, 0.0, 0.0]
    """
    values_V = parts_PZ.index_select(0, slot_V[:capacity]).sum(1)
    values = torch.nn.functional.pad(values_V, (0, max(0, capacity - slot_V.shape[0])))
    values = values.where(torch.arange(capacity, device=values.device) < num_pairs, 0)
    return values if into is None else into.copy_(values)
