"""Regions of torch's activation checkpointing, and which calls recompute which."""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from sonic_ep import EPGroup, MoE, MoEConfig, TransportConfig, replay_contexts
from sonic_ep.dispatch.checkpoint_regions import Regions, present_region
from sonic_ep.kernels.experts import mlp
from tests.helpers.launch import RankPool
from tests.helpers.static_buffers import buffers_in_files
from tests.helpers.triton_device import triton_device

Ranks = Callable[[int], RankPool]
Found = list[tuple[int, bool]]


class Block:
    """Counts its calls, and notes for each the number of the call that it repeats, or its own."""

    def __init__(self) -> None:
        self.regions, self.number, self.found = Regions[int](), 0, Found()

    def _new(self) -> int:
        self.number += 1
        return self.number

    def __call__(self, x: Tensor) -> Tensor:
        region = present_region()
        self.found.append((self._new(), False) if region is None else self.regions.call(region, self._new))
        return x.exp()


def region_of(function: Callable[[Tensor], Tensor], **more: Any) -> Callable[[Tensor], Tensor]:
    return partial(checkpoint, function, use_reentrant=False, **more)


def leaf() -> Tensor:
    return torch.zeros(3, requires_grad=True)


def test_recomputations_in_any_order() -> None:
    block = Block()
    first, second = (region_of(block)(leaf()).exp().sum() for _ in range(2))
    first.backward()
    third = region_of(block)(leaf()).exp().sum()
    third.backward()
    second.backward()
    assert block.found == [(1, False), (2, False), (1, True), (3, False), (3, True), (2, True)]


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_layer_that_runs_twice_in_a_region(early_stop: bool) -> None:
    block = Block()
    with set_checkpoint_early_stop(early_stop):
        region_of(lambda x: block(block(x)))(leaf()).sum().backward()
    assert block.found == [(1, False), (2, False), (1, True), (2, True)]


def test_a_retained_graph_is_recomputed_twice() -> None:
    block = Block()
    loss = region_of(lambda x: block(block(x)))(leaf()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert block.found == [(1, False), (2, False), *[(1, True), (2, True)] * 2]


def test_nested_regions() -> None:
    block = Block()
    region_of(lambda x: region_of(block)(block(x)).exp())(leaf()).exp().sum().backward()
    assert block.found[:2] == [(1, False), (2, False)]
    assert block.found[2] == (1, True)
    # The inner region is entered again by the outer recomputation, and what it saves then is recomputed itself.
    assert block.found[3:]
    assert all(number in (2, 3) for number, _ in block.found[3:])


def test_what_is_no_region() -> None:
    block = Block()
    block(leaf())
    with torch.autograd.graph.save_on_cpu():
        block(leaf()).sum().backward()
    checkpoint(block, leaf(), use_reentrant=True).sum().backward()
    assert block.found == [(number, False) for number in range(1, 5)]


def test_nothing_is_kept_of_a_region_that_is_gone() -> None:
    block = Block()
    region_of(block)(leaf()).sum().backward()
    gc.collect()
    assert not block.regions._calls
    assert not block.regions._next


def block_of(name: str, layer: MoE) -> Callable[[Tensor], Tensor]:
    def moe(x: Tensor) -> Tensor:
        return layer(x).y

    def given_constants(x: Tensor) -> Tensor:
        with torch.no_grad():
            constants = moe(x)
        return moe(x + constants)

    return {
        "residual": lambda x: x + moe(x),
        "saved": lambda x: moe(x).sin(),
        "twice": lambda x: moe(moe(x)),
        "given_constants": given_constants,
    }[name]


# How often the experts' outputs are made in forward and in recomputation: where nothing reads them, not again.
BLOCKS = {"residual": (1, 0), "saved": (1, 1), "twice": (2, 1), "given_constants": (2, 1)}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_outputs_that_nobody_reads_are_not_recomputed(name: str, early_stop: bool, nested: bool) -> None:
    layer = MoE(MoEConfig(d=8, n=4, E=8, K=2), seed=0)
    block, found, counts = block_of(name, layer), list[list[Tensor]](), list[int]()
    for in_region in (False, True):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        run = region_of(block) if in_region else block
        with (
            set_checkpoint_early_stop(early_stop),
            patch.object(mlp, "forward_output", wraps=mlp.forward_output) as made,
        ):
            y = (region_of(run) if nested and in_region else run)(x)
            counts.append(made.call_count)
            found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.experts.parameters()])])
            counts.append(made.call_count - counts[-1])
    assert all(map(torch.equal, *found))
    forward, again = BLOCKS[name]
    # Where it does not stop early, the outer region's recomputation runs the inner region once more.
    assert counts == [forward, 0, forward, again + (forward if nested and not early_stop else 0)]


@pytest.mark.parametrize("early_stop", [True, False])
def test_selective_checkpointing_recomputes_all(early_stop: bool) -> None:
    """It counts the operations of both passes, and takes results of forward by their numbers."""
    layer, found = MoE(MoEConfig(d=8, n=4, E=8, K=2), seed=0), list[list[Tensor]]()
    selective = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.sin.default])
    for contexts in ({}, {"context_fn": selective}):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with set_checkpoint_early_stop(early_stop):
            y = region_of(lambda x: x.sin() + layer(x).y, **contexts)(x)
            found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.experts.parameters()])])
    assert all(map(torch.equal, *found))


def gradients(layer: MoE, step: int, *, checkpointed: bool) -> list[Tensor]:
    """Of two microbatches, the second longer than any before: their backwards begin when the bound has grown."""
    generator, losses, leaves = torch.Generator().manual_seed(step), [], []
    for part in range(2):
        x = torch.randn(8 * step + 4 * part + layer.group.rank, layer.config.d, generator=generator).requires_grad_()
        y = region_of(lambda x: layer(x).y)(x) if checkpointed else layer(x).y
        losses.append(y.square().sum())
        leaves.append(x)
    layer.zero_grad()
    torch.stack(losses).sum().backward()
    return [value.grad.clone() for value in (*leaves, *layer.parameters()) if value.grad is not None]


def steps_in_regions(rank: int, folder: str) -> list[bool]:
    """Whether each step has the gradients of a layer without checkpoints."""
    config = MoEConfig(d=8, n=4, E=8, K=2, transport=TransportConfig(timeout=20))
    layer = MoE(config, EPGroup(), seed=0)
    with buffers_in_files(layer.transport, folder, static=False):  # pyright: ignore[reportArgumentType]
        wanted = [gradients(layer, step, checkpointed=False) for step in range(1, 4)]
        # A layer of its own, which knows no sizes at first.
        other = MoE(config, layer.group, seed=0)
        other.transport = layer.transport
        found = [gradients(other, step, checkpointed=True) for step in range(1, 4)]
    return [all(map(torch.equal, a, b)) and len(a) == len(b) for a, b in zip(wanted, found, strict=True)]


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels; see test_ranks_as_programs.py")
def test_regions_across_ranks_while_the_bound_grows(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(steps_in_regions, str(tmp_path)) == [[True] * 3] * 2


def behind_the_last_layer(
    rank: int, folder: str, alone: bool, detached: bool, replays: bool = False
) -> tuple[str, int]:
    """What is raised where one rank looks at an output, and how often this one makes outputs in two steps."""
    layer = MoE(MoEConfig(d=8, n=4, E=8, K=2, transport=TransportConfig(timeout=20)), EPGroup(), seed=0)

    def block(x: Tensor) -> Tensor:
        y = layer(x).y
        if rank == 0 or not alone:
            (y.detach() if detached else y).norm()  # which saves y for a backward
        return y

    with (
        buffers_in_files(layer.transport, folder, static=False),  # pyright: ignore[reportArgumentType]
        patch.object(mlp, "forward_output", wraps=mlp.forward_output) as made,
    ):
        for step in range(2):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2 * step + rank)).requires_grad_()
            more = {"context_fn": replay_contexts} if replays else {}
            try:
                region_of(block, **more)(x).square().sum().backward()
            except ValueError as error:
                return str(error), made.call_count
    return "", made.call_count


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels; see test_ranks_as_programs.py")
@pytest.mark.parametrize(
    ("alone", "detached", "count"), [(False, False, 4), (False, True, 2), (True, True, 2)], ids=["read", "not", "one"]
)
def test_ranks_leave_out_outputs_together(
    ranks: Ranks, tmp_path: Path, alone: bool, detached: bool, count: int
) -> None:
    assert ranks(2).run(behind_the_last_layer, str(tmp_path), alone, detached) == [("", count)] * 2


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels")
def test_ranks_that_disagree_what_is_behind_a_layer(ranks: Ranks, tmp_path: Path) -> None:
    for message, _ in ranks(2).run(behind_the_last_layer, str(tmp_path), True, False):
        assert "disagree what a checkpointed block does behind its MoE layers" in message
        assert "on rank 0, a forward of layer" in message
        assert "saved nothing behind its MoE layers on rank 1" in message


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels; see test_ranks_as_programs.py")
def test_where_routing_is_replayed_ranks_need_not_agree(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(behind_the_last_layer, str(tmp_path), True, False, True) == [("", 4)] * 2
