"""Experts that are launched before the host knows how many rows they have: the same bits as after it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup
from sonic_ep.dispatch import local
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.protocol import Transport
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.functional import moe
from sonic_ep.kernels import expert_mlp
from sonic_ep.routing import Routing, SizesOnHost
from tests.dispatch.oracle import Case
from tests.helpers.launch import RankPool
from tests.helpers.poison import poisoned_empty
from tests.helpers.shared_files import shared_files
from tests.helpers.static_buffers import lists_with_room, with_spare
from tests.helpers.triton_device import triton_device

pytestmark = pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels; see test_symmetric_gpu.py")
I = 3  # noqa: E741


def step(transport: Transport, group: EPGroup, routing: Routing, H: int, E: int) -> list[Tensor]:
    """Output and gradients."""
    generator = torch.Generator().manual_seed(group.rank)
    sizes = (routing.num_tokens, H), (routing.num_tokens, H), (E // group.size, 2 * I, H), (E // group.size, H, I)
    x, dout, w1, w2 = (torch.randn(size, generator=generator) for size in sizes)
    leaves = [x.requires_grad_(), w1.requires_grad_(), w2.requires_grad_(), routing.gates_N.clone().requires_grad_()]
    y = moe(x, replace(routing, gates_N=leaves[3]), w1, w2, transport=transport, group=group)
    return [y.detach(), *torch.autograd.grad(y, leaves, dout)]


def noted(name: str, how: list[str], call: Callable[..., Any]) -> Callable[..., Any]:
    def note(*args: Any, **options: Any) -> Any:
        how[-1] += name
        return call(*args, **options)

    return note


def steps(rank: int, cases: list[Case], folder: str) -> list[str]:
    """How each step went: the order of opening, reading sizes and computing."""
    group, how = EPGroup(), []
    transport = SymmetricTransport(group, shared_files(group, folder), patience=60)
    for case in cases:
        how.append("")
        expected = step(AllToAllTransport(group), group, case.routing(rank), case.H, case.E)
        how[-1] = ""
        with (
            lists_with_room(),
            poisoned_empty(),
            patch.object(SymmetricTransport, "_open", noted("o", how, SymmetricTransport._open)),
            patch.object(SizesOnHost, "read", noted("r", how, SizesOnHost.read)),
            patch.object(expert_mlp, "forward", noted("e", how, expert_mlp.forward)),
            patch.object(SizesOnHost, "arrived", False),
        ):
            got = step(transport, group, case.routing(rank), case.H, case.E)
        assert all(map(torch.equal, got, expected)), case
    return how


# How the first rank goes through each.
CHANGING = {
    Case((13, 9), 5, 4, "all"): "roe",  # buffers are made
    Case((13, 9), 5, 4, "all", seed=1): "oer",
    Case((13, 9), 5, 4, "top2"): "oer",
    Case((13, 9), 5, 4, "top2", multiple=4): "oere",  # more rows than the experts had room for
    Case((13, 14), 5, 4, "top2"): "oeroe",  # another rank has more tokens
    Case((12, 9), 5, 4, "all", seed=2): "roe",
    Case((12, 9), 5, 4, "none"): "oer",
    Case((12, 9), 5, 4, "top2"): "oere",
}


def test_experts_are_launched_before_sizes_are_known(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    first, _ = ranks(2).run(steps, list(CHANGING), str(tmp_path))
    assert first == list(CHANGING.values())


ALONE = {
    Case((13,), 5, 4, "top2", multiple=8): "re",
    Case((13,), 5, 4, "top2", multiple=8, seed=1): "er",
    Case((13,), 5, 4, "top2", multiple=2): "er",
    Case((13,), 5, 4, "all", multiple=2): "ere",
    Case((12,), 5, 4, "all", multiple=2): "re",
    Case((12,), 5, 4, "none", multiple=2): "er",
}


def test_experts_of_one_rank_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    group, transport, how = EPGroup.alone(), LocalTransport(), []
    monkeypatch.setattr(local, "lists_take_room", lambda _: True)
    monkeypatch.setattr(SizesOnHost, "arrived", False)
    monkeypatch.setattr(SizesOnHost, "read", noted("r", how, SizesOnHost.read))
    monkeypatch.setattr(expert_mlp, "forward", noted("e", how, expert_mlp.forward))
    for case in ALONE:
        routing = case.routing(0)
        how.append("")
        with lists_with_room(), poisoned_empty():
            expected = step(LocalTransport(), group, routing, case.H, case.E)
            assert how[-1] == "re"
            how[-1] = ""
            assert routing.most_rows is not None
            got = step(transport, group, with_spare(routing, 3, most_rows=routing.most_rows + 20), case.H, case.E)
        sizes = [values.shape[0] for values in expected]
        assert all(torch.equal(a[:size], b) for a, b, size in zip(got, expected, sizes, strict=True)), case
    assert how == list(ALONE.values())
