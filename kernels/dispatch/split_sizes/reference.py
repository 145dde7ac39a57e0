"""The sizes that the host must know of a step, packed into one tensor, so that one copy brings them to the host.

Plain torch: the CPU path, and the oracle of kernels/dispatch/split_sizes/triton.py.

Legend: S ranks of the EP group, Q destination ranks, E experts, F fields of a table.
"""

import torch
from torch import Tensor


def pack_split_sizes(tokens_S: Tensor, rows_SE: Tensor, pairs_SE: Tensor, status_SF: Tensor | None) -> Tensor:
    """Returns (S + 2 * S * Q + S * F,) int64: tokens_S, rows_SQ and pairs_SQ, then the rank status of every rank.

    rows_SQ and pairs_SQ count the rows and pairs from each rank to each destination rank.

    Shapes:  tokens_S (S,), rows_SE and pairs_SE (S, E) with E a multiple of S, status_SF (S, F) or None; all int64.
    Example: 2 ranks with 2 and 3 tokens, 4 experts, one field of status.

        >>> import torch
        >>> from sonic_ep.kernels.dispatch.split_sizes.reference import pack_split_sizes
        >>> pairs = torch.tensor([[2, 1, 0, 1], [3, 0, 2, 1]])
        >>> pack_split_sizes(torch.tensor([2, 3]), pairs + 1, pairs, torch.tensor([[7], [8]])).tolist()
        [2, 3, 5, 3, 5, 5, 3, 1, 3, 3, 7, 8]
    """
    S, E = rows_SE.shape
    by_dst = [values.view(S, S, E // S).sum(2).flatten() for values in (rows_SE, pairs_SE)]
    statuses = [] if status_SF is None else [status_SF.flatten()]
    return torch.cat([tokens_S, *by_dst, *statuses])
