"""What the host must know of decided counts, in one tensor, so that one copy brings it there.

Plain torch: the CPU path, and the oracle of kernels/dispatch/split_sizes/triton.py.

Legend: S ranks of the EP group, Q destination ranks, E experts, F fields of a table.
"""

import torch
from torch import Tensor


def pack_split_sizes(tokens_S: Tensor, rows_SE: Tensor, pairs_SE: Tensor, status_SF: Tensor | None) -> Tensor:
    """(S + 2 * S * Q + S * F,) int64: tokens of each rank, rows and then pairs from each rank to each owner, reports.

    Shapes:  tokens_S (S,), rows_SE and pairs_SE (S, E), E a multiple of S, and status_SF (S, F) int64.
    """
    S, E = rows_SE.shape
    by_dst = [values.view(S, S, E // S).sum(2).flatten() for values in (rows_SE, pairs_SE)]
    statuses = [] if status_SF is None else [status_SF.flatten()]
    return torch.cat([tokens_S, *by_dst, *statuses])
