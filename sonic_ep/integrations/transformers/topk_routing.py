"""Makes a `Routing` of the top-K experts and weights that a model's own router returns.

Legend: T tokens on this rank, K experts per token, E experts, N pairs this rank sends.
"""

import torch
from torch import Tensor

from sonic_ep.config import RoundingConfig
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.kernels.backend import allows_spare_capacity
from sonic_ep.routers.count_exchange import RankStatus, gather_counts
from sonic_ep.routing import INDEX_DTYPE, Routing, unrounded

_OFF = RoundingConfig(mode="off")


def routing_of_topk(
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    *,
    E: int,
    group: EPGroup,
    exchange: Exchange,
    dtype: torch.dtype,
    training: bool,
    has_sentinels: bool = False,
) -> Routing:
    """Returns the routing of every (token, expert) pair. A collective: with several ranks, one all-gather of counts.

    Shapes:    topk_ids_TK (T, K) integers, distinct in each row; topk_weights_TK (T, K) floating point, differentiable.
    dtype:     of the experts' input. training: of the module. Both must be equal on all ranks.
    exchange:  see `gather_counts`.
    has_sentinels: ids of E and more are no pairs: experts of other ranks (`AllReduceEP` of transformers). Their weights
               get gradients of zero. On the CPU the host reads the number of pairs.
    """
    T, K = topk_ids_TK.shape
    ids_N, order_N = topk_ids_TK.flatten().to(INDEX_DTYPE).sort(stable=True)  # by expert, then token
    bins_N = ids_N.clamp(max=E).long()
    counts_E = torch.zeros(E + 1, dtype=torch.int64, device=ids_N.device)
    counts_E = counts_E.scatter_add_(0, bins_N, torch.ones_like(bins_N))[:E]
    if group.size == 1:
        # In operations that torch.compile can trace.
        counts, split_sizes = unrounded(counts_E[None], counts_E.new_full((1,), T)), None
    else:
        status = RankStatus(counts_E=counts_E, num_tokens=T, dtype=dtype, training=training)
        counts, split_sizes, _ = gather_counts(status, _OFF, group, exchange)
    max_rows = T * K if has_sentinels and allows_spare_capacity(ids_N) else None
    if has_sentinels and max_rows is None:
        order_N = order_N[: int(counts_E.sum())]
    weights_N = topk_weights_TK.flatten().index_select(0, order_N)
    token_ids_N = (order_N // max(K, 1)).to(INDEX_DTYPE)
    return Routing(weights_N, token_ids_N, counts, T, max_rows=max_rows, split_sizes=split_sizes)
