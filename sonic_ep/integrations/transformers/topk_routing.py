"""Makes a `Routing` of the top-K experts and weights that a model's own router returns.

Legend: T tokens on this rank, K experts per token, E experts, N pairs this rank sends.
"""

import torch
from torch import Tensor

from sonic_ep.config import RoundingConfig
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.kernels.backend import allows_spare_capacity, chosen_pairs
from sonic_ep.kernels.route.topk.reference import times_chosen
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
    if has_sentinels or torch.compiler.is_compiling():  # in operations that torch.compile can trace
        ids_N, order_N = topk_ids_TK.flatten().to(INDEX_DTYPE).sort(stable=True)  # by expert, then token
        counts_E = times_chosen(ids_N.clamp(max=E).long(), E + 1)[:E]
    else:
        topk_ids_TK = topk_ids_TK.long()
        counts_E = times_chosen(topk_ids_TK, E)
        order_N = _order_of_pairs(topk_ids_TK, counts_E)
    if group.size == 1:
        counts, split_sizes = unrounded(counts_E[None], counts_E.new_full((1,), T)), None
    else:
        status = RankStatus(counts_E=counts_E, num_tokens=T, dtype=dtype, training=training)
        counts, split_sizes, _ = gather_counts(status, _OFF, group, exchange)
    max_rows = T * K if has_sentinels and allows_spare_capacity(topk_ids_TK) else None
    if has_sentinels and max_rows is None:
        order_N = order_N[: int(counts_E.sum())]
    weights_N = topk_weights_TK.flatten().index_select(0, order_N)
    token_ids_N = (order_N // max(K, 1)).to(INDEX_DTYPE)
    return Routing(weights_N, token_ids_N, counts, T, max_rows=max_rows, split_sizes=split_sizes)


def _order_of_pairs(topk_ids_TK: Tensor, counts_E: Tensor) -> Tensor:
    """Returns where the pairs are in the flattened table, by expert, then token: (N,) int64.

    By a kernel of ours on GPUs. torch's sort there allocates memory that a recording cannot see.
    """
    token_ids_N, expert_ids_N, _ = chosen_pairs(topk_ids_TK, counts_E)
    token_ids_N = token_ids_N.long()
    slot_N = (topk_ids_TK.index_select(0, token_ids_N) == expert_ids_N[:, None]).to(torch.uint8).argmax(1)
    return token_ids_N * topk_ids_TK.shape[1] + slot_N
