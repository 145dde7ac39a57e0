"""`gather_sum` in plain torch: the CPU path, and the oracle of kernels/combine/gather_sum/triton.py.

Legend: P rows of the pair buffer, H hidden size, V pairs this rank receives.
"""

import torch
from torch import Tensor

from sonic_ep.kernels.experts.reference import compute_dtype


def gather_sum(
    values_PH: Tensor,
    items: Tensor,
    starts: Tensor,
    weights_P: Tensor | None = None,
    *,
    into: Tensor | None = None,
    overlap_previous: bool = False,
) -> Tensor:
    """Returns out[i] = sum of weights[items[j]] * values[items[j]] over starts[i] <= j < starts[i+1], in that order.

    The sums accumulate in fp32, or float64 for float64 operands, and are rounded once. An empty list gives zeros.

    Shapes:  values_PH (P, H); items (V,) and starts (rows + 1,) int32, a CSR list; weights_P (P,), or None for
             weights of 1. Result (rows, H) in the dtype of values. into: a contiguous tensor for it.
    overlap_previous: The GPU kernel overlaps the kernel launched just before it by PDL (see pdl.py), and must need none
             of its results. The CPU ignores it.
    Example: row 0 sums values 0 and 2, row 1 nothing, row 2 value 1.

        >>> import torch
        >>> from sonic_ep.kernels.combine.gather_sum.reference import gather_sum
        >>> values, weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([1.0, 0.5, 2.0])
        >>> items, starts = torch.tensor([0, 2, 1], dtype=torch.int32), torch.tensor([0, 2, 2, 3], dtype=torch.int32)
        >>> gather_sum(values, items, starts).tolist(), gather_sum(values, items, starts, weights).tolist()
        ([[6.0, 8.0], [0.0, 0.0], [3.0, 4.0]], [[11.0, 14.0], [0.0, 0.0], [1.5, 2.0]])
    """
    counts = starts.diff().long()
    target_V = torch.repeat_interleave(counts, output_size=items.shape[0])
    gathered = _upcast(values_PH.index_select(0, items))
    if weights_P is not None:
        gathered = gathered * _upcast(weights_P.index_select(0, items))[:, None]
    sums = gathered.new_zeros(counts.shape[0], values_PH.shape[1]).index_add_(0, target_V, gathered)
    return sums.to(values_PH.dtype) if into is None else into.copy_(sums)


def _upcast(values: Tensor) -> Tensor:
    return values.to(compute_dtype(values.dtype))
