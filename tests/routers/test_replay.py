"""Activation checkpointing: the recomputed forward routes as the first one did, and gradients are those without it.

Legend: T tokens on this rank, H hidden size, E experts.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, set_checkpoint_early_stop

from sonic_ep.config import MoEConfig, RoundingConfig, RouterConfig
from sonic_ep.groups import EPGroup
from sonic_ep.routers.replay import _save_own, replay_contexts
from sonic_ep.routers.router import Routed, Router
from tests.helpers.launch import RankPool

T, H = 48, 6
Block = Callable[[Tensor], Tensor]
STOCHASTIC = RoundingConfig(mode="stochastic", t=8, G=8)


def make_router(seed: int = 0, *, rounding: RoundingConfig = STOCHASTIC, **options: Any) -> Router:
    router = Router(MoEConfig(d=H, n=4, E=8, K=2, router=RouterConfig(**options), rounding=rounding)).double()
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(seed))
    return router


def block_of(router: Router, group: EPGroup | None = None) -> Block:
    """A residual block whose output depends on which pairs were selected, on their weights and on the losses."""
    members = group or EPGroup.alone()

    def block(x_TH: Tensor) -> Tensor:
        routed = router(x_TH, group=members, sequence_length=T)
        token_ids_N = routed.routing.token_ids_N.long()
        experts_N = torch.repeat_interleave(routed.routing.counts.pairs_SE[members.rank])
        rows_NH = x_TH[token_ids_N].tanh() * (1 + experts_N[:, None])
        return x_TH.index_add(0, token_ids_N, rows_NH * routed.routing.weights_N[:, None]) + routed.aux_loss

    return block


def chain(*blocks: Block) -> Block:
    def run(x_TH: Tensor) -> Tensor:
        for block in blocks:
            x_TH = block(x_TH)
        return x_TH

    return run


def checkpointed(block: Block, **options: Any) -> Block:
    return lambda x_TH: checkpoint(block, x_TH, use_reentrant=False, context_fn=replay_contexts, **options)  # type: ignore[return-value]


def watch(*routers: Router) -> list[list[list[int]]]:
    """What each router selected, call by call."""

    def saves(calls: list[list[int]]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], routed: Routed) -> None:
            calls.append(routed.routing.token_ids_N.tolist())

        return hook

    seen: list[list[list[int]]] = [[] for _ in routers]
    for calls, router in zip(seen, routers, strict=True):
        router.register_forward_hook(saves(calls))
    return seen


def gradients(block: Block, *routers: Router, seed: int = 0) -> list[Tensor]:
    """Output, then gradients of x and of the routers' weights, from one state of torch's generator."""
    x_TH = torch.randn(T, H, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    torch.manual_seed(seed)
    y_TH = block(x_TH)
    loss = (y_TH * torch.linspace(-1, 1, H, dtype=torch.float64)).square().sum()
    return [y_TH.detach(), *torch.autograd.grad(loss, [x_TH, *(router.weight for router in routers)])]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for name, mine, other in zip(("y", "dx", "dw", "dw'", "dw''"), ours, theirs, strict=False):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("preserve", [True, False], ids=["generator-kept", "generator-lost"])
def test_a_stochastic_selection_is_replayed(preserve: bool) -> None:
    router = make_router()
    block = block_of(router)
    expected = gradients(block, router)
    seen = watch(router)
    assert_same(gradients(checkpointed(block, preserve_rng_state=preserve), router), expected)
    first, again = seen[0]
    assert first == again


def test_without_replay_the_selection_would_differ() -> None:
    # The tests above prove something only if a second decision is another one.
    router = make_router()
    block, seen = block_of(router), watch(router)
    gradients(block, router, seed=1)
    gradients(block, router, seed=2)
    assert seen[0][0] != seen[0][1]


def test_jitter_repeats_with_the_generator_and_the_selection_without_it() -> None:
    router = make_router(jitter=0.3)
    block = block_of(router)
    expected = gradients(block, router)
    assert_same(gradients(checkpointed(block), router), expected)
    seen = watch(router)
    gradients(checkpointed(block, preserve_rng_state=False), router)
    first, again = seen[0]
    assert first == again


@pytest.mark.parametrize("mode", ["off", "apportion", "stochastic"])
def test_random_numbers_after_the_router_repeat_too(mode: Any) -> None:
    # A recomputation draws the same dropout mask and the next router's jitter only if the router draws equally often.
    routers = [make_router(seed, rounding=RoundingConfig(mode=mode, t=8, G=8), jitter=0.3) for seed in (0, 1)]
    block = chain(block_of(routers[0]), lambda x_TH: F.dropout(x_TH, 0.5), block_of(routers[1]))
    assert_same(gradients(checkpointed(block), *routers), gradients(block, *routers))


@pytest.mark.parametrize(
    "options",
    [
        {"check_logits": True},
        {"expert_bias": True, "num_groups": 4, "groups_per_token": 2},
        {"score": "sigmoid", "scale": 2.5},
        {"balance": "sequence", "balance_coef": 0.1, "z_loss_coef": 0.1},
    ],
    ids=["check-logits", "deepseek", "sigmoid", "losses"],
)
def test_every_kind_of_router_can_be_checkpointed(options: dict[str, Any]) -> None:
    router = make_router(**options)
    assert_same(gradients(checkpointed(block_of(router)), router), gradients(block_of(router), router))


def test_a_bias_that_moves_before_backward_changes_nothing() -> None:
    router = make_router(expert_bias=True)
    block = block_of(router)
    expected = gradients(block, router)

    class MoveBias(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y_TH: Tensor) -> Tensor:
            return y_TH.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            assert router.expert_bias is not None
            router.expert_bias.copy_(torch.arange(8.0))
            return gradients[0]

    assert_same(gradients(chain(checkpointed(block), MoveBias.apply), router), expected)


def test_a_router_called_twice_replays_in_order() -> None:
    router = make_router()
    block = chain(block_of(router), torch.sin, block_of(router))
    expected = gradients(block, router)
    seen = watch(router)
    assert_same(gradients(checkpointed(block, preserve_rng_state=False), router), expected)
    first, second, *again = seen[0]
    assert first != second
    assert [first, second][: len(again)] == again
    assert again


@pytest.mark.parametrize("early_stop", [True, False], ids=["early-stop", "to-the-end"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nested_regions(depth: int, early_stop: bool) -> None:
    routers = [make_router(seed) for seed in range(3)]
    expected = gradients(chain(*map(block_of, routers)), *routers)
    seen = watch(*routers)
    inner = block_of(routers[1])
    for _ in range(depth):
        inner = checkpointed(inner, preserve_rng_state=False)
    nested = checkpointed(chain(block_of(routers[0]), inner, block_of(routers[2])), preserve_rng_state=False)
    with set_checkpoint_early_stop(early_stop):
        assert_same(gradients(nested, *routers), expected)
    for calls in seen:
        assert len(calls) >= 2
        assert all(call == calls[0] for call in calls)
    # The regions are gone: the next forward decides for itself.
    gradients(chain(*map(block_of, routers)), *routers, seed=5)
    assert all(calls[-1] != calls[0] for calls in seen)


def test_two_backward_passes_recompute_the_same_selection() -> None:
    router = make_router()
    x_TH = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    seen = watch(router)
    loss = checkpointed(block_of(router), preserve_rng_state=False)(x_TH).square().sum()
    loss.backward(retain_graph=True)
    assert x_TH.grad is not None
    once, weight_once = x_TH.grad.clone(), router.weight.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    torch.testing.assert_close(x_TH.grad, 2 * once, rtol=1e-12, atol=0)
    torch.testing.assert_close(router.weight.grad, 2 * weight_once, rtol=1e-12, atol=0)
    assert len(seen[0]) == 3
    assert all(call == seen[0][0] for call in seen[0])


def test_two_regions_in_flight_keep_to_their_own_selections() -> None:
    router = make_router()
    x_TH = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    seen = watch(router)
    losses = [checkpointed(block_of(router), preserve_rng_state=False)(x_TH).square().sum() for _ in range(2)]
    losses[0].backward()
    losses[1].backward()
    first, second, first_again, second_again = seen[0]
    assert first == first_again != second
    assert second == second_again


def test_one_call_too_many_is_an_error_that_says_so() -> None:
    router, other = make_router(0), make_router(1)
    block, x_TH = block_of(router), torch.randn(T, H, dtype=torch.float64)
    records, replays = replay_contexts()
    with records:
        first = block(x_TH)
    for _ in range(2):  # each pass starts from the first selection
        with replays:
            assert torch.equal(block(x_TH), first)
            with pytest.raises(RuntimeError, match="2 times.* 1 times"):
                block(x_TH)
    with replays, pytest.raises(RuntimeError, match="1 times.* 0 times"):
        block_of(other)(x_TH)


def test_a_region_that_grows_between_forward_and_backward_is_an_error() -> None:
    router = make_router()
    block, calls = block_of(router), []

    def grows(x_TH: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            with torch.no_grad():  # unseen by autograd, which checks the number of saved tensors by itself
                block(x_TH)
        return block(x_TH)

    x_TH = torch.randn(T, H, dtype=torch.float64, requires_grad=True)
    y_TH = checkpointed(grows)(x_TH)
    with pytest.raises(RuntimeError, match="2 times.* 1 times"):
        y_TH.sum().backward()
    block(x_TH)  # outside again


def test_the_innermost_replaying_region_decides_and_a_recording_one_inside_keeps_it() -> None:
    router = make_router()
    block, seen = block_of(router), watch(router)
    outer, inner, saved = replay_contexts(), replay_contexts(), replay_contexts()
    x_TH = torch.randn(T, H, dtype=torch.float64)
    for region in (outer[0], inner[0]):
        with region:
            block(x_TH)
    with outer[1], inner[1], saved[0]:
        block(x_TH)
    with saved[1]:
        block(x_TH)
    of_outer, of_inner, decided, repeated = seen[0]
    assert of_outer != of_inner
    assert decided == repeated == of_inner


def test_a_region_left_by_an_error_is_left() -> None:
    router = make_router()
    seen = watch(router)
    records, replays = replay_contexts()

    def fails(x_TH: Tensor) -> Tensor:
        block_of(router)(x_TH)
        raise ZeroDivisionError

    x_TH = torch.randn(T, H, dtype=torch.float64)
    for region in (records, replays):
        with pytest.raises(ZeroDivisionError), region:
            fails(x_TH)
    block_of(router)(x_TH)
    assert seen[0][0] == seen[0][1] != seen[0][2]


class Collectives(TorchDispatchMode):
    """Counts the operations of torch.distributed, whichever function started them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "c10d" in func.namespace
        return func(*args, **(kwargs or {}))


def count_collectives(rank: int, preserve: bool) -> dict[str, Any]:
    """Collectives of a checkpointed forward and of its backward; and both selections."""
    router = make_router()
    seen = watch(router)
    x_TH = torch.randn(T, H, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    with Collectives() as collectives:
        y_TH = checkpointed(block_of(router, EPGroup()), preserve_rng_state=preserve)(x_TH)
        in_forward = collectives.count
        y_TH.square().sum().backward()
    return {"forward": in_forward, "backward": collectives.count - in_forward, "seen": seen[0]}


@pytest.mark.parametrize("preserve", [True, False], ids=["generator-kept", "generator-lost"])
def test_a_recomputation_takes_no_collective(ranks: Callable[[int], RankPool], preserve: bool) -> None:
    for result in ranks(2).run(count_collectives, preserve):
        assert result["forward"] == 1
        assert result["backward"] == 0
        first, again = result["seen"]
        assert first == again


@pytest.mark.parametrize(
    ("namespace", "name", "policy"),
    [
        ("sonic_ep", "moe_layer", CheckpointPolicy.MUST_SAVE),
        ("aten", "add", CheckpointPolicy.PREFER_RECOMPUTE),
    ],
)
def test_a_traced_checkpoint_saves_what_layers_have_computed(
    namespace: str, name: str, policy: CheckpointPolicy
) -> None:
    operation: Any = SimpleNamespace(namespace=namespace, _opname=name)
    assert _save_own(None, operation) == policy
