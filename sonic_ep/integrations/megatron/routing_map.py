"""Reads the map of Megatron's router: ids of experts, and the `Routing` of a map from which tokens were dropped.

Legend: T tokens on this rank, E experts, e local experts, K experts per token, N pairs this rank sends.
"""

import torch
from torch import Tensor

from sonic_ep.kernels.route.select.reference import pairs_of_mask
from sonic_ep.routers.topk_pairs import RouterCall
from sonic_ep.routing import INDEX_DTYPE, Routing


def topk_ids(routing_map_TE: Tensor, K: int) -> Tensor:
    """Returns (T, K) int64: the K experts of each token, in order."""
    chosen_TE = routing_map_TE.long()
    number_TE = chosen_TE.cumsum(1) * chosen_TE  # 1 for the first expert of a token, 0 for no expert
    numbers_K = torch.arange(1, K + 1, device=number_TE.device)
    return (number_TE[:, None] == numbers_K[:, None]).to(torch.uint8).argmax(2)


def in_parts(values_TE: Tensor, e: int, parts: int) -> Tensor:
    """Returns (T, parts * E) of a value for each pair: the same for every part of an expert.

    The columns are in the order of the ranks that hold them: for every EP rank the first part of its e experts, then
    their second, and so on.
    """
    T = values_TE.shape[0]
    return values_TE.reshape(T, -1, 1, e).expand(-1, -1, parts, -1).reshape(T, -1)


def routing_of_dropped(probs_TE: Tensor, routing_map_TE: Tensor, call: RouterCall) -> Routing:
    """Returns the routing of every pair of a map from which tokens were dropped. A collective. The host waits once.

    The combine weight of a pair is its probability, differentiable in probs.

    Shapes:    probs_TE (T, E) floating point; routing_map_TE (T, E) bool.
    """
    T, E = routing_map_TE.shape
    counts, split_sizes = call.gather(routing_map_TE.sum(0), T)
    token_ids_N, expert_ids_N = pairs_of_mask(routing_map_TE, int(counts.pairs_SE[call.group.rank].sum()))
    weights_N = probs_TE.reshape(-1).index_select(0, token_ids_N * E + expert_ids_N).float()
    return Routing(weights_N, token_ids_N.to(INDEX_DTYPE), counts, T, split_sizes=split_sizes)
