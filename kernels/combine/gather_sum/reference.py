"""`gather_sum` in plain torch: the CPU path, and the twin of kernels/combine/gather_sum/triton.py.

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
    """out[i] = sum over j in starts[i]..starts[i+1]-1 of weights[items[j]] * values[items[j]], in that order.

    Shapes:  items (V,) and starts (rows + 1,) int32: a CSR list. Accumulated in fp32 at least, rounded once; an empty
             list gives zeros. Result (rows, H) in the dtype of values, in `into` if given, which is contiguous.
    beside:  a GPU's kernel begins beside the weight_grad launched just before it, and needs none of its results.
    Example: items [0, 2, 1], starts [0, 2, 2, 3] -> values[0] + values[2], 0, values[1].
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
