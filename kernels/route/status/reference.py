"""What a rank tells the others before a step, in one tensor, and counts that a bad report makes void: in plain torch.

The host hears late of a rank that cannot go on, and has launched by then what the others would send it. On the device
they all know in time. This is the CPU path, and the oracle of kernels/route/status/triton.py.

Legend: S ranks of the EP group, E experts, F fields of a table.
"""

import torch
from torch import Tensor

# The fields before the counts, and their number.
TOKENS, STATUS, SEED = range(3)
HEADER = 3
# What each logit that is not finite adds to a condition.
BAD_LOGIT = 32


def pack_rank_status(
    counts_E: Tensor, num_tokens: int, status: int, *, bad_logits: Tensor | None = None, seed: Tensor | None = None
) -> Tensor:
    """(F + E,) int64, made on the device of the int64 counts: nothing is copied there, so a CUDA graph may capture it.

    bad_logits, draw: () int64; 0 without.
    """
    header_F = counts_E.new_zeros(HEADER)
    header_F[TOKENS].fill_(num_tokens)
    header_F[STATUS].fill_(status)
    if bad_logits is not None:
        header_F[STATUS].add_(bad_logits, alpha=BAD_LOGIT)
    if seed is not None:
        header_F[SEED].copy_(seed)
    return torch.cat([header_F, counts_E])


def zero_counts_on_error(counts_SE: Tensor, status_S: Tensor, healthy: int) -> None:
    """Make all counts zero, in place, unless each rank's condition is `healthy`. All int64."""
    counts_SE.masked_fill_((status_S != healthy).any(), 0)
