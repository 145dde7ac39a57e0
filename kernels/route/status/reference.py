"""Packs a rank's status and counts before a step, and drops all counts if any rank has an error: in plain torch.

The host learns late that a peer cannot continue. By then it has launched kernels that send rows to that peer. The
devices have the gathered statuses in time: on an error each device goes on with counts of zero, so no rank sends rows
or waits for any. This is the CPU path and the twin of triton.py.

Legend: S ranks of the EP group, E experts, F fields of a table.
"""

import torch
from torch import Tensor

# The header fields, which precede the counts, and their number F.
TOKENS, STATUS, SEED, ORDER = range(4)
HEADER = 4
# The SEED field holds a seed, below 2^31. Without one it may hold this plus the number of updates of the expert bias.
NO_UPDATES = 2**32
# A status word is code + BAD_LOGIT * (non-finite logits) + LAYER * (number of the layer, 0 if it has none). The code is
# below BAD_LOGIT, and the number below MAX_LAYER, so that words are positive.
BAD_LOGIT, LAYER, MAX_LAYER = 32, 2**48, 2**15


def pack_rank_status(
    counts_E: Tensor,
    num_tokens: int,
    status: int,
    order: int,
    *,
    bad_logits: Tensor | None = None,
    seed: Tensor | None = None,
    width: int = 0,
) -> Tensor:
    """Returns (F + E,) int64: num_tokens, status word, seed, order, then counts_E. The status word includes the bad
    logits.

    No host memory is copied to the device, so a CUDA graph may capture it. order: of the backwards, see
    sonic_ep/groups/order.py. width: the least size of the result, whose last integers are then anything.

    Shapes:  counts_E (E,) int64; the result is on its device. bad_logits (number of non-finite logits) and seed: ()
             int64, 0 if None.
    Example: 2 tokens, status 7, order 6, one bad logit, seed 5 -> status word 7 + 32.

        >>> import torch
        >>> from sonic_ep.kernels.route.status.reference import pack_rank_status
        >>> packed = pack_rank_status(torch.tensor([3, 1]), 2, 7, 6, bad_logits=torch.tensor(1), seed=torch.tensor(5))
        >>> packed.tolist()
        [2, 39, 5, 6, 3, 1]
    """
    header_F = counts_E.new_zeros(HEADER)
    header_F[TOKENS].fill_(num_tokens)
    header_F[STATUS].fill_(status)
    header_F[ORDER].fill_(order)
    if bad_logits is not None:
        header_F[STATUS].add_(bad_logits, alpha=BAD_LOGIT)
    if seed is not None:
        header_F[SEED].copy_(seed)
    spare = max(0, width - HEADER - counts_E.shape[0])
    return torch.cat([header_F, counts_E, counts_E.new_empty(spare)])


def zero_counts_on_error(counts_SE: Tensor, header_SF: Tensor, healthy: int) -> Tensor:
    """Returns the counts, contiguous, or zeros unless every rank's status word equals `healthy`, the layer aside.

    Layers must be the same too, except on ranks without a number, and so must the orders.

    Shapes:  counts_SE (S, E) and header_SF (S, F) int64, columns of what was gathered.
    Example: rank 1 has a status other than 7.

        >>> import torch
        >>> from sonic_ep.kernels.route.status.reference import zero_counts_on_error
        >>> headers = torch.tensor([[4, 7, 0, 6], [4, 16, 0, 6]])
        >>> zero_counts_on_error(torch.tensor([[3, 1], [2, 2]]), headers, healthy=7).tolist()
        [[0, 0], [0, 0]]
    """
    status_S, order_S = header_SF[:, STATUS], header_SF[:, ORDER]
    layer_S = status_S // LAYER
    # amax: selective checkpoints save results of aten.max, and the order of a recomputation is another.
    other_layer_S = (layer_S != 0) & (layer_S != layer_S.amax())
    is_other_S = (status_S % LAYER != healthy) | other_layer_S | (order_S != order_S.amax())
    return counts_SE.contiguous().masked_fill(is_other_S.any(), 0)
