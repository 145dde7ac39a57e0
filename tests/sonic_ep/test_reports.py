"""A rank that cannot go on is told to all by the same error, wherever the others take note of it.

The router of the bad rank raises; the others' goes on, and what they do next must learn it before they wait for a rank.
"""

from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, Routing, TransportConfig, transports
from sonic_ep.functional import moe
from sonic_ep.transports import GroupTransport
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]
CONFIG = MoEConfig(d=8, n=4, E=4, K=2, rounding=RoundingConfig(mode="off"))
T = 12


def chosen_together(group: EPGroup, config: TransportConfig, device: torch.device) -> object:
    """As on GPUs, where ranks ask whether they reach each other."""
    group.all_gather_object("where I am")
    return transports.AllToAllTransport(group)


def raised(rank: int, case: str) -> tuple[str, float]:
    """What is raised where rank 1 has a problem, and a sum of the healthy step after it."""
    group = EPGroup()
    layer = MoE(CONFIG, group, seed=0)
    transport = GroupTransport(group, TransportConfig()) if case == "transport" else layer.transport
    weights = layer.experts(None)

    def experts(x_TH: Tensor, routing: Routing, w1: Tensor) -> Tensor:
        return moe(x_TH, routing, w1, weights.w2_eHI, transport=transport, group=group)

    if case == "compiled":
        experts = torch.compile(experts, backend="eager")

    def step(x_TH: Tensor, w1: Tensor, problem: str | None = None) -> Tensor:
        exchange = None if case == "transport" else layer.transport
        routed = layer.router(x_TH, group=group, sequence_length=T, exchange=exchange, problem=problem)
        return experts(x_TH, routed.routing, w1)

    x_TH, message = torch.randn(T, 8, generator=torch.Generator().manual_seed(rank)), ""
    choice = patch.object(transports, "_choose", chosen_together) if case == "transport" else nullcontext()
    with choice, torch.no_grad():
        try:
            if rank == 1:
                step(x_TH[:0], weights.w1, "x has 3 legs")
            step(x_TH, weights.w1.double() if case == "weights" else weights.w1)
        except ValueError as error:
            message = str(error)
        return message, float(step(x_TH, weights.w1).sum())


@pytest.mark.parametrize("case", ["eager", "compiled", "weights", "transport"])
def test_all_are_told_the_same(ranks: Ranks, case: str) -> None:
    results = ranks(2).run(raised, case)
    assert [message for message, _ in results] == ["rank 1: x has 3 legs"] * 2
    assert [total for _, total in results] == [total for _, total in ranks(2).run(raised, "eager")]


def raised_again(rank: int) -> list[str]:
    """A routing is checked twice on one rank, and once on the other."""
    group, messages = EPGroup(), []
    router = MoE(CONFIG, group, seed=0).router
    try:
        routing = router(torch.ones(T, 8), group=group, sequence_length=T, problem="no" if rank == 1 else None).routing
        for _ in range(2):
            try:
                routing.check()
            except ValueError as error:
                messages.append(str(error))
    except ValueError as error:
        messages.append(str(error))
    group.all_gather_object(None)
    return messages


def test_a_second_look_at_the_reports_asks_nobody(ranks: Ranks) -> None:
    assert ranks(2).run(raised_again) == [["rank 1: no"] * 2, ["rank 1: no"]]
