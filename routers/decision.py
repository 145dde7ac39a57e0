"""What a router decides about a batch, beside what trains: the group's agreement, then which pairs this rank sends.

Legend: T tokens on this rank, E experts, N selected pairs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig, RoundingConfig
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.kernels.operations import lists_take_room
from sonic_ep.routers.agreement import Report, agree
from sonic_ep.routers.replay import record_selection, replayed_selection
from sonic_ep.routers.rounding import keeps_choice, most_received, most_rows
from sonic_ep.routers.selection import begin_selection, chosen_pairs
from sonic_ep.routers.topk import Choice, times_chosen
from sonic_ep.routing import Counted, Counts, Selection

# Given (E,) pairs of each expert and their number: token ids, expert ids and whether the token chose the expert.
FinishLists = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a decision depends on beside the logits. dtype: of x. problem: why this rank cannot go on, if it cannot.
    exchange: how the ranks tell each other, if not by the group's own all-gather. meanwhile: what is done once, needs
    nothing of the decision, and hides the way of the counts."""

    config: MoEConfig
    group: EPGroup
    dtype: torch.dtype
    training: bool
    problem: str | None = None
    exchange: Exchange | None = None
    meanwhile: Callable[[], None] | None = None


def decide_selection(router: object, choice: Choice, counter_E: Tensor | None, situation: Situation) -> Selection:
    """The pairs of this rank. A collective, except under replay of the selections of `router`, see replay.py.

    counter_E: (E,) int64 on the device; in training the group's top-K counts are added to it, once for each decision.
    None if nobody asks for them.
    Raises ValueError for this rank's problem; those of others when the selection's `on_host` is checked, see `agree`.
    RuntimeError, see replay.py.
    """
    # Drawn under replay too, so that whatever draws after this layer repeats as well.
    draw = _draw(situation, choice.topk_ids_TK.device)
    selection = replayed_selection(router)
    if selection is not None:
        if situation.problem is not None:
            raise ValueError(situation.problem)
        if situation.meanwhile is not None:
            situation.meanwhile()
    else:
        rounding, training = situation.config.rounding, situation.training
        report, group = _report(choice, draw, situation), situation.group
        finish: FinishLists | None = None

        def beside() -> None:
            nonlocal finish
            finish = begin_lists(choice, rounding, training=training)
            if situation.meanwhile is not None:
                situation.meanwhile()

        counts, on_host, by_score_SE = agree(report, rounding, group, situation.exchange, beside)
        selection = select(choice, counts, situation.group.rank, rounding, training=training, finish=finish)
        counted = None
        if choice.by_score_TK is not None:
            counted = Counted(choice.by_score_TK, counts.chosen_SE if by_score_SE is None else by_score_SE)
        selection = replace(selection, on_host=on_host, counted=counted)
        if training and counter_E is not None:
            chosen_E = counts.chosen_SE.sum(0)
            counter_E += chosen_E
            if on_host is not None:
                on_host.on_failure(lambda: counter_E.sub_(chosen_E))
    record_selection(router, selection)
    return selection


def _draw(situation: Situation, device: torch.device) -> Tensor | None:
    stochastic = situation.training and situation.config.rounding.mode == "stochastic"
    return torch.randint(2**31 - 1, (), device=device) if stochastic else None


def _report(choice: Choice, draw: Tensor | None, situation: Situation) -> Report:
    num_tokens, problem = choice.topk_ids_TK.shape[0], situation.problem
    if problem is None and situation.training and situation.exchange is not None:
        problem = situation.exchange.problem_with(num_tokens)
    of_all_ranks = choice.by_score_TK if situation.config.router.balance == "global" else None
    return Report(
        counts_E=choice.counts_E(),
        by_score_E=None if of_all_ranks is None else times_chosen(of_all_ranks, choice.scores_TE.shape[1]),
        num_tokens=num_tokens,
        dtype=situation.dtype,
        training=situation.training,
        draw=draw,
        bad_logits=choice.bad_logits,
        problem=problem,
    )


def begin_lists(choice: Choice, rounding: RoundingConfig, *, training: bool) -> FinishLists:
    """What of this rank's lists of pairs needs no other rank: all of it, where the plain choice is kept."""
    if keeps_choice(rounding, training=training):
        lists = chosen_pairs(choice.topk_ids_TK, choice.counts_E())
        return lambda *_: lists
    return begin_selection(choice.ranking_TE, choice.topk_ids_TK, choice.allowed_TE)


def select(
    choice: Choice,
    counts: Counts,
    rank: int,
    rounding: RoundingConfig,
    *,
    training: bool,
    finish: FinishLists | None = None,
) -> Selection:
    """The pairs of this rank: for each expert exactly `counts.pairs_SE[rank]` tokens, chosen ones first.

    rounding, training: what the counts were decided by. finish: of `begin_lists`, if it was called before.
    """
    (T, K), (S, E) = choice.topk_ids_TK.shape, counts.pairs_SE.shape
    most = most_rows(rounding, T, K, E, S, training=training)
    pairs_E, room = counts.pairs_SE[rank], T * K
    if not keeps_choice(rounding, training=training):
        assert most is not None
        room = min(most, T * E) if lists_take_room(pairs_E.device) else int(pairs_E.sum())
    lists = (finish or begin_lists(choice, rounding, training=training))(pairs_E, room)
    received = most_received(rounding, T, K, training=training)
    return Selection(choice.topk_ids_TK, *lists, counts, most, received)
