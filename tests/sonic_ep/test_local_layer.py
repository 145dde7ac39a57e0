"""ep_size = 1: no collective, no torch.distributed at all, through forward, backward and a checkpointed region."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from sonic_ep import MoE, MoEConfig, RoundingConfig, RouterConfig, replay_contexts
from sonic_ep.kernels import reference

CONFIG = MoEConfig(d=8, n=4, E=8, K=2, shared_n=4, rounding=RoundingConfig(t=4, G=8))


def test_one_rank_never_touches_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("torch.distributed was called")

    for name in ("all_gather", "all_gather_object", "all_reduce", "all_to_all_single", "get_rank", "get_world_size"):
        monkeypatch.setattr(dist, name, forbidden)
    layer = MoE(CONFIG, seed=0)
    y, aux, _ = layer(torch.randn(50, 8))
    (y.sum() + aux).backward()
    assert layer.experts.w1.grad is not None


def test_expert_parameters_are_marked_and_others_are_not() -> None:
    marked = {name for name, p in MoE(CONFIG, seed=0).named_parameters() if not getattr(p, "allreduce", True)}
    assert marked == {"experts.w1", "experts.w2"}


def test_a_checkpointed_layer_has_the_same_gradients() -> None:
    layer = MoE(CONFIG, seed=0)
    x = torch.randn(50, 8)

    def gradients(run: object) -> list[torch.Tensor]:
        layer.zero_grad()
        leaf = x.clone().requires_grad_(True)
        y, aux = run(leaf)  # type: ignore[operator]
        (y.square().sum() + aux).backward()
        return [leaf.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]

    plain = gradients(lambda leaf: layer(leaf)[:2])
    replayed = gradients(
        lambda leaf: checkpoint(lambda z: layer(z)[:2], leaf, use_reentrant=False, context_fn=replay_contexts)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_operations_hear_whether_rows_are_rounded(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    heard: list[bool] = []

    def listening(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, rounded: bool) -> Any:
            heard.append(rounded)
            return operation(*arguments, rounded=rounded)

        return call

    for name in ("up_projection", "down_projection", "up_projection_backward"):
        monkeypatch.setattr(reference, name, listening(getattr(reference, name)))
    for mode, training in (("apportion", True), ("apportion", False), ("off", True)):
        layer = MoE(CONFIG.replace(rounding=RoundingConfig(mode=mode, t=4, G=8)), seed=0).train(training)
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        run(torch.randn(50, 8)).y.sum().backward()
        assert heard == [mode != "off" and training] * 3, mode
        heard.clear()


def test_meta_construction_then_initialize() -> None:
    config = CONFIG.replace(bias=True, router=RouterConfig(linear_bias=True, expert_bias=True))
    layer = MoE(config, seed=0, device="meta").to_empty(device="cpu")
    for values in layer.state_dict().values():
        values.fill_(7)
    layer.initialize(0)
    wanted = MoE(config, seed=0).state_dict()
    assert layer.state_dict().keys() == wanted.keys()
    for name, got in layer.state_dict().items():
        assert torch.equal(got, wanted[name]), name


def test_no_tokens_at_all() -> None:
    layer = MoE(CONFIG, seed=0)
    x = torch.zeros(0, 8, requires_grad=True)
    y, aux, stats = layer(x)
    (y.sum() + aux).backward()
    assert y.shape == (0, 8)
    assert x.grad is not None
    assert x.grad.shape == (0, 8)
    assert layer.experts.w1.grad is not None
    assert layer.experts.w1.grad.abs().sum() == 0
    assert stats.changed_share == 0
