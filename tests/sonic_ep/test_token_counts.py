"""`update_expert_bias` counts a token once: when backward reaches the output that it was made into."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from sonic_ep import EPGroup, MoE, MoEConfig, RouterConfig, replay_contexts
from tests.helpers.launch import RankPool

CONFIG = MoEConfig(d=8, n=4, E=4, K=2, router=RouterConfig(expert_bias=True))
T = 50
Block = Callable[[Tensor], Tensor]

_reentrant: Any = partial(checkpoint, use_reentrant=True)
_other: Any = partial(checkpoint, use_reentrant=False)


def plain(block: Block, x: Tensor) -> Tensor:
    return block(x)


LOOPS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "plain": plain,
    "reentrant": _reentrant,
    "not reentrant": _other,
    "replayed": partial(_other, context_fn=replay_contexts),
    "reentrant within reentrant": lambda block, x: _reentrant(lambda y: _reentrant(block, y), x),
    "not reentrant within reentrant": lambda block, x: _reentrant(lambda y: _other(block, y), x),
    "reentrant within not reentrant": lambda block, x: _other(lambda y: _reentrant(block, y), x),
    "not reentrant within itself": lambda block, x: _other(lambda y: _other(block, y), x),
}


class Model(nn.Module):
    """Layers, with work before and after them, so that a recomputation has more to do than the layer."""

    def __init__(self, group: EPGroup | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoE(CONFIG, group, seed=seed) for seed in range(2))

    def forward(self, x: Tensor, loop: Callable[[Block, Tensor], Tensor] = plain) -> Tensor:
        for layer in self.layers:
            x = loop(lambda x, layer=layer: x + layer(x.sin()).y.cos(), x)
        return x

    def counted(self) -> list[list[int]]:
        return [layer.router._counts_since_update_E.tolist() for layer in self.layers]  # type: ignore[union-attr]


def counts_of(model: Model, x: Tensor) -> list[list[int]]:
    """The tokens of each layer's experts, without looking at what is counted. A collective."""
    found = []
    with torch.no_grad():
        for layer in model.layers:
            output = layer(x.sin())
            found.append(output.stats.counts.chosen_SE.sum(0).tolist())
            x = x + output.y.cos()
    return found


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(T, CONFIG.d, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_token_counts_once(loop: str, early_stop: bool) -> None:
    model, x = Model(), tokens()
    expected = counts_of(model, x)
    with set_checkpoint_early_stop(early_stop):
        model(x, LOOPS[loop]).sum().backward()
    assert model.counted() == expected
    assert [sum(counts) for counts in expected] == [T * CONFIG.K] * 2
    model(x, LOOPS[loop]).sum().backward()
    assert model.counted() == [[2 * count for count in counts] for counts in expected]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_a_forward_alone_counts_nothing(context: Callable[[], Any]) -> None:
    model, x = Model(), tokens()
    with context():
        model(x)
    assert model.counted() == [[0] * CONFIG.E] * 2


def test_evaluation_counts_nothing_even_with_a_backward() -> None:
    model = Model().eval()
    model(tokens()).sum().backward()
    assert model.counted() == [[0] * CONFIG.E] * 2


def test_microbatches_add_up_in_whatever_order_their_backwards_run() -> None:
    model = Model()
    batches = [tokens(seed) for seed in range(3)]
    expected = torch.tensor([counts_of(model, x) for x in batches]).sum(0).tolist()
    losses = [model(x).sum() for x in batches]
    for loss in (losses[1], losses[2], losses[0]):
        loss.backward()
    assert model.counted() == expected


def test_two_backwards_of_one_graph_count_once() -> None:
    model, x = Model(), tokens()
    expected = counts_of(model, x)
    out = model(x)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert model.counted() == expected


def test_a_frozen_router_still_counts_what_its_experts_train_on() -> None:
    model, x = Model(), tokens().detach()
    for layer in model.layers:
        layer.router.requires_grad_(False)  # type: ignore[operator, union-attr]
    expected = counts_of(model, x)
    model(x).sum().backward()
    assert model.counted() == expected


def test_a_compiled_layer_counts_where_gradients_are_enabled() -> None:
    layer, x = MoE(CONFIG, seed=0), tokens()
    run: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = run(x).stats.counts.chosen_SE[0].tolist()
    assert layer.router._counts_since_update_E.tolist() == [0] * CONFIG.E
    run(x).y.sum().backward()
    assert layer.router._counts_since_update_E.tolist() == expected
    torch._dynamo.reset()


def on_each_rank(rank: int) -> list[str]:
    model, found = Model(EPGroup()), []
    for name, loop in LOOPS.items():
        x = tokens(rank)
        expected = torch.tensor(counts_of(model, x)) + torch.tensor(model.counted())
        model(x, loop).sum().backward()
        if model.counted() != expected.tolist():
            found.append(name)
    return found


def test_a_token_counts_once_on_two_ranks(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(2).run(on_each_rank) == [[], []]


def failed_on_one_rank(rank: int) -> tuple[list[list[int]], list[list[int]]]:
    """Counts after a step that every rank refuses, then after the next one, less those of that one."""
    model = Model(EPGroup())
    with pytest.raises(ValueError, match="rank 1"):
        model(torch.randn(T, CONFIG.d - rank))
    failed = model.counted()
    x = tokens(rank)
    expected = torch.tensor(counts_of(model, x))
    model(x).sum().backward()
    return failed, (torch.tensor(model.counted()) - expected).tolist()


def test_a_step_that_fails_is_not_counted(ranks: Callable[[int], RankPool]) -> None:
    nothing = [[0] * CONFIG.E] * 2
    assert ranks(2).run(failed_on_one_rank) == [(nothing, nothing)] * 2
