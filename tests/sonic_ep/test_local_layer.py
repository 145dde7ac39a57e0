"""ep_size = 1: no collective, no torch.distributed at all, through forward, backward and a checkpointed region."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from sonic_ep import MoE, MoEConfig, RoundingConfig, RouterConfig, replay_contexts
from sonic_ep.kernels.experts import reference

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


def from_meta() -> MoE:
    return MoE(CONFIG, seed=0, device="meta").to_empty(device="cpu")


def assigned() -> MoE:
    layer = MoE(CONFIG, seed=0, device="meta")
    layer.load_state_dict(MoE(CONFIG, seed=1).state_dict(), assign=True)
    return layer


def unpickled() -> MoE:
    buffer = io.BytesIO()
    torch.save(MoE(CONFIG, seed=0), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


MAKERS: dict[str, Callable[[], MoE]] = {
    "built": lambda: MoE(CONFIG, seed=0),
    "to_empty": from_meta,
    "deepcopy": lambda: copy.deepcopy(MoE(CONFIG, seed=0)),
    "assigned": assigned,
    "unpickled": unpickled,
    "half": lambda: MoE(CONFIG, seed=0).bfloat16(),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_expert_parameters_are_marked_and_others_are_not(make: Callable[[], MoE]) -> None:
    marked = {name for name, p in make().named_parameters() if not getattr(p, "allreduce", True)}
    assert marked == {"experts.w1", "experts.w2"}


def test_counts_of_a_layer_that_was_assigned_its_weights() -> None:
    config = CONFIG.replace(router=RouterConfig(expert_bias=True))
    layer = MoE(config, seed=0, device="meta")
    layer.load_state_dict(MoE(config, seed=1).state_dict(), assign=True)
    layer(torch.randn(50, 8)).y.sum().backward()
    layer.update_expert_bias()
    assert layer.router.expert_bias is not None
    assert layer.router.expert_bias.abs().sum() > 0


def test_default_dtype_and_device_change_no_router_and_no_seed() -> None:
    config = CONFIG.replace(router=RouterConfig(expert_bias=True, linear_bias=True))
    wanted = MoE(config, seed=3, dtype=torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = MoE(config, seed=3, dtype=torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, value in wanted.state_dict().items():
        if not name.startswith("shared"):
            torch.testing.assert_close(layer.state_dict()[name], value, rtol=0, atol=0)
    with torch.device("meta"):
        elsewhere = MoE(config, device="cpu")
    y, _, _ = elsewhere(torch.randn(9, 8))
    assert y.isfinite().all()


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
        def call(*arguments: Any, tile_aligned: bool, **options: Any) -> Any:
            heard.append(tile_aligned)
            return operation(*arguments, tile_aligned=tile_aligned, **options)

        return call

    for name in ("down_projection", "up_projection_backward"):
        monkeypatch.setattr(reference, name, listening(getattr(reference, name)))
    for mode, training in (("apportion", True), ("apportion", False), ("off", True)):
        layer = MoE(CONFIG.replace(rounding=RoundingConfig(mode=mode, t=4, G=8)), seed=0).train(training)
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        run(torch.randn(50, 8)).y.sum().backward()
        assert heard == [mode != "off" and training] * 2, mode
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
