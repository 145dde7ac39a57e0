"""Megatron's RouterReplay, with ids that are checked: wrong ones raise on every rank, and padding may have -1.

Megatron gathers scores of whatever ids it has. On one rank alone that fails, or silently gives a token fewer experts.

Legend: O tokens with padding, T tokens on this rank, E experts, K experts per token.
"""

import functools
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction
from torch import Tensor

from sonic_ep.integrations.megatron.dispatcher import NoDispatcher
from sonic_ep.routers.given_routing import GivenRouting


def check_replays(router: Any, dispatcher: NoDispatcher) -> None:
    """Makes the RouterReplay of `router` check ids. `dispatcher` gets the problem, or what is padding by its ids."""
    replay = router.router_replay
    if replay is not None:
        replay.get_replay_topk = functools.partial(_experts_of, router, dispatcher, replay.get_replay_topk)


def _experts_of(
    router: Any, dispatcher: NoDispatcher, compute_topk: Any, scores_OE: Tensor, topk: int, *args: Any, **others: Any
) -> tuple[Any, Tensor]:
    """Returns what RouterReplay.get_replay_topk does: (O, K) scores and ids of experts."""
    if not replays(router):
        return compute_topk(scores_OE, topk, *args, **others)
    action, queue = router.router_replay.router_replay_action, router.router_replay.replay_backward_list
    is_forward = action == RouterReplayAction.REPLAY_FORWARD
    ids_OK = router.router_replay.target_topk_idx if is_forward else (queue.pop(0) if queue else None)
    given = GivenRouting.of(scores_OE, ids_OK, dispatcher.padding_O, E=scores_OE.shape[1], K=topk)
    problem = f"there are no ids for {action}; call set_replay_data" if ids_OK is None else given.problem
    ids_TK, dispatcher.is_replayed = given.expert_ids_TK, True
    # The router needs experts of every token, also of one that is not dispatched.
    chosen_OK = torch.arange(topk, device=scores_OE.device).repeat(scores_OE.shape[0], 1)
    if problem is not None or ids_TK is None:  # all ranks raise it once they have exchanged counts
        dispatcher.problem = f"RouterReplay of layer {router.layer_number}: {problem}"
    elif given.rows_T is None:
        chosen_OK = ids_TK
    else:
        is_padding_O = torch.ones(scores_OE.shape[0], dtype=torch.bool, device=scores_OE.device)
        dispatcher.padding_O = is_padding_O.index_fill(0, given.rows_T, False)
        chosen_OK = chosen_OK.index_copy(0, given.rows_T, ids_TK)
    return scores_OE.gather(1, chosen_OK), chosen_OK


def replays(router: Any) -> bool:
    """Returns True if the router is to take the ids of its RouterReplay."""
    replay = getattr(router, "router_replay", None)
    return replay is not None and replay.router_replay_action in (
        RouterReplayAction.REPLAY_FORWARD,
        RouterReplayAction.REPLAY_BACKWARD,
    )
