"""`round_tokens`: models of transformers round as our own layer with their weights does, in training alone."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from sonic_ep import MoE, MoEConfig, RoundingConfig, RouterConfig
from tests.helpers.hugging_face import batches, loss_of, model_of
from tests.helpers.launch import RankPool
from tests.helpers.transformers_families import FAMILIES, asks_registry, outputs_and_gradients, tiny_model

pytestmark = pytest.mark.usefixtures("registered")
Ranks = Callable[[int], RankPool]
ROUNDING = RoundingConfig(t=8, G=16)
# Weights that are no scaled scores (noise in training, a factor of each expert), or logits of more experts.
REFUSED = {
    **dict.fromkeys(("diffusion_gemma", "gemma4", "inkling", "phimoe"), "the weights of other experts are not known"),
    "zaya": "no tensor with the logits of 24 tokens and 8 experts",
}
# How the router of a tiny model of the family makes weights, as our config says it.
ROUTERS = {
    "qwen3_moe": RouterConfig(),
    "mixtral": RouterConfig(),
    "olmoe": RouterConfig(renormalize=False),
    "gpt_oss": RouterConfig(linear_bias=True),
    "deepseek_v3": RouterConfig(score="sigmoid", scale=2.5, expert_bias=True),
}


def a_model(family: str) -> Any:
    from sonic_ep.integrations.transformers.experts import uses_registry

    if family in ("qwen3_moe", "deepseek_v3"):
        model: Any = model_of(family, **({} if family == "qwen3_moe" else {"n_group": 1, "topk_group": 1}))
    elif family in FAMILIES:
        model = tiny_model(family, uses_registry)
    else:
        pytest.skip(f"this transformers has no {family}")
    model.set_experts_implementation("sonic_ep")
    return model.float().train()


def block_of(model: nn.Module) -> Any:
    from sonic_ep.integrations.transformers.experts import uses_registry

    return next(block for block in model.modules() if any(map(uses_registry, block.children())))


def router_of(block: Any) -> Any:
    return getattr(block, "gate", None) or block.router


def own_layer(block: Any, router: RouterConfig) -> MoE:
    from sonic_ep.integrations.transformers.activation import activation_of
    from sonic_ep.integrations.transformers.weights import layout_of, weights_of
    from sonic_ep.kernels.experts.activations import interleave

    weights = weights_of(block.experts, torch.float32)
    has_halves = layout_of(block.experts) == "concatenated"
    if layout_of(block.experts) == "transposed":
        weights = replace(weights, w1=weights.w1.mT, w2_eHI=weights.w2_eHI.mT)
    (E, d, n), K = weights.w2_eHI.shape, router_of(block).top_k
    activation: Any = activation_of(block.experts)
    layer = MoE(
        MoEConfig(
            d=d, n=n, E=E, K=K, router=router, rounding=ROUNDING, activation=activation, bias=block.experts.has_bias
        )
    )
    ours, theirs = layer.state_dict(), router_of(block)
    for name, value in (
        ("experts.w1", interleave(weights.w1) if has_halves else weights.w1),
        ("experts.w2", weights.w2_eHI),
        ("experts.b1", interleave(weights.b1_eJ) if has_halves and weights.b1_eJ is not None else weights.b1_eJ),
        ("experts.b2", weights.b2_eH),
        ("router.weight", theirs.weight),
        ("router.bias", getattr(theirs, "bias", None)),
        ("router.expert_bias", getattr(theirs, "e_score_correction_bias", None)),
    ):
        if name in ours:
            assert value is not None, name
            ours[name].copy_(value.detach())
    return layer.train()


def routed_output(block: Any, x: Tensor) -> Tensor:
    """The output of the block without shared experts."""
    _, weights, ids = router_of(block)(x)
    return block.experts(x, ids, weights)


def spread(block: Any) -> None:
    """Makes routing far from uniform."""
    with torch.no_grad():
        router_of(block).weight.normal_()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_rounding_holds_from_the_next_step_on(device: str) -> None:
    from sonic_ep.integrations.transformers import round_tokens

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    old, fresh = (block_of(a_model("qwen3_moe")).to(device, dtype) for _ in range(2))
    spread(old)
    fresh.load_state_dict(old.state_dict())
    results: list[Tensor] = []
    for rounding in (ROUNDING, RoundingConfig(mode="pad", t=8, G=16), RoundingConfig(t=4, G=8)):
        round_tokens(old, rounding)
        new = copy.deepcopy(fresh)
        round_tokens(new, rounding)
        for step in range(4):
            x = torch.randn(1, 64, router_of(old).weight.shape[1], generator=torch.Generator().manual_seed(step))
            outs = [routed_output(block, x.to(device, dtype).flatten(0, 1)) for block in (old, new)]
            assert torch.equal(*outs)
            results.append(outs[0])
    assert not torch.equal(results[3], results[7])  # the roundings differ on the same rows


@pytest.mark.parametrize("family", ROUTERS)
def test_a_block_rounds_as_our_layer_does(family: str) -> None:
    from sonic_ep.integrations.transformers import round_tokens

    model = a_model(family)
    block = block_of(model)
    spread(block)
    assert round_tokens(model, ROUNDING)
    layer = own_layer(block, ROUTERS[family])
    for step in range(2):
        x = torch.randn(61, layer.config.d, generator=torch.Generator().manual_seed(step))
        results = []
        for run in (lambda x: routed_output(block, x), lambda x: layer(x).y):
            own = x.clone().requires_grad_()
            block.zero_grad()
            layer.zero_grad()
            y = run(own)
            (y * torch.linspace(-1, 1, y.shape[1])).sum().backward()
            results.append([y, own.grad, router_of(block).weight.grad, layer.router.weight.grad])
        (y, dx, dweight, _), (y_own, dx_own, _, dweight_own) = results
        for theirs, ours in ((y, y_own), (dx, dx_own), (dweight, dweight_own)):
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * float(ours.detach().abs().max()))


@pytest.mark.parametrize("family", [name for name in FAMILIES if asks_registry(name)])
def test_every_family_rounds_or_says_why_not(family: str) -> None:
    from sonic_ep.integrations.transformers import check, round_tokens

    model = a_model(family)
    try:
        check(model)
    except ValueError:
        pytest.skip("test_families.py: sonic_ep does not compute its experts")
    rounded = {name: model.get_submodule(name) for name in round_tokens(model, ROUNDING)}
    if family in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[family]):
            outputs_and_gradients(model)
        return
    outputs_and_gradients(model)
    assert all(vars(experts)["_sonic_ep_rounding"] is not None for experts in rounded.values())


def test_experts_compute_multiples_of_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    from sonic_ep.integrations import framework_experts as module
    from sonic_ep.integrations.transformers import round_tokens

    routings: list[Any] = []

    def noted(x: Tensor, routing: Any, *args: Any, **named: Any) -> Tensor:
        routings.append(routing)
        return moe(x, routing, *args, **named)

    moe = module.moe
    monkeypatch.setattr(module, "moe", noted)
    model = a_model("qwen3_moe")
    round_tokens(model, ROUNDING)
    loss_of(model, torch.cat(batches(0, 4))).backward()
    assert len(routings) == 2
    for routing in routings:
        assert (routing.counts.rows_SE % 8 == 0).all()
        assert not torch.equal(routing.counts.pairs_SE, routing.counts.chosen_SE)


def test_evaluation_and_the_models_own_loss_stay_those_of_plain_topk() -> None:
    from sonic_ep.integrations.transformers import round_tokens

    model: Any = model_of("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.1)
    model.set_experts_implementation("sonic_ep")
    ids = torch.cat(batches(0, 4))
    losses = []
    for mode in ("off", "nearest", "off"):
        model.train()
        assert len(round_tokens(model, RoundingConfig(mode=mode, t=8, G=16))) == 2
        out = model(input_ids=ids, labels=ids, use_cache=False)
        model.eval()
        with torch.no_grad():
            losses.append((float(out.loss), float(out.aux_loss), float(loss_of(model, ids))))
    (plain, rounded, again) = losses
    assert plain == again
    assert rounded[0] != plain[0]
    assert rounded[2] == plain[2]


def test_the_first_layers_auxiliary_loss_counts_plain_topk() -> None:
    """A later layer's differs, because its input has gone through rounded experts."""
    from sonic_ep.integrations.transformers import round_tokens

    model: Any = model_of("qwen3_moe", output_router_logits=True, num_hidden_layers=1)
    model.set_experts_implementation("sonic_ep")
    model.train()
    ids = torch.cat(batches(0, 4))
    plain = model(input_ids=ids, labels=ids, use_cache=False).aux_loss
    round_tokens(model, ROUNDING)
    assert torch.equal(model(input_ids=ids, labels=ids, use_cache=False).aux_loss, plain)


def test_a_model_trains_under_gradient_checkpointing() -> None:
    from sonic_ep.integrations.transformers import round_tokens

    found = []
    for checkpointing in (False, True):
        model = a_model("qwen3_moe")
        round_tokens(model, ROUNDING)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss_of(model, torch.cat(batches(0, 4))).backward()
        found.append([each.grad for each in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


def test_logits_of_zero_decide_no_rule() -> None:
    """Softmax and sigmoid are alike there. The rule is found once they differ."""
    from sonic_ep.integrations.transformers import round_tokens

    model = a_model("deepseek_v3")
    block = block_of(model)
    router_of(block).weight.data.zero_()
    round_tokens(model, ROUNDING)
    x = torch.randn(50, block.experts.down_proj.shape[1])
    routed_output(block, x)
    spread(block)
    torch.testing.assert_close(routed_output(block, x), own_layer(block, ROUTERS["deepseek_v3"])(x).y)


def test_errors() -> None:
    from sonic_ep.integrations.transformers import round_tokens

    with pytest.raises(ValueError, match="there is nothing to round"):
        round_tokens(nn.Linear(2, 2), ROUNDING)
    with pytest.raises(ValueError, match="some of 4 groups"):
        round_tokens(model_of("deepseek_v3"), ROUNDING)
    assert round_tokens(model_of("deepseek_v3"), RoundingConfig(mode="off"))
    model = a_model("qwen3_moe")
    block = block_of(model)
    spread(block)
    round_tokens(model, ROUNDING)
    x = torch.randn(50, 32)
    _, weights, ids = router_of(block)(x)
    block.experts(x, ids, weights)
    with pytest.raises(ValueError, match="router was not called before"):
        block.experts(x, ids, weights)
    round_tokens(model, ROUNDING)
    router_of(block)(x)
    with pytest.raises(ValueError, match=r"differ by .* from scaled"):
        block.experts(x, ids, weights * torch.rand_like(weights))
    router_of(block)(x[:40])
    with pytest.raises(ValueError, match="no tensor with the logits of 50 tokens and 8 experts"):
        block.experts(x, ids, weights)


def test_a_block_without_a_router_is_refused() -> None:
    from sonic_ep.integrations.transformers import round_tokens

    block = block_of(a_model("qwen3_moe"))
    block.other = block.gate
    del block.gate
    with pytest.raises(ValueError, match="no module called gate or router"):
        round_tokens(nn.Sequential(block), ROUNDING)


def trained(rank: int, path: Path, tp_size: int) -> Any:
    from sonic_ep.integrations.transformers import round_tokens
    from tests.integrations.transformers.test_expert_parallel import Layout, load, quiet, train

    with quiet():
        layout = Layout(fsdp_size=2 // tp_size, tp_size=tp_size, ep_size=2)
        results = []
        for rounding in (RoundingConfig(mode="off"), ROUNDING):
            model = load(path, layout, "sonic_ep")
            round_tokens(model, rounding)
            results.append(train(model, rank // tp_size, 3))
        return results


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parallel_registry
def test_two_ranks(tp_size: int, ranks: Ranks, tmp_path: Path) -> None:
    model_of("qwen3_moe", num_key_value_heads=2).save_pretrained(tmp_path)  # type: ignore[operator]
    for plain, rounded in ranks(2).run(trained, tmp_path, tp_size):
        assert rounded.losses != plain.losses
        assert rounded.losses == pytest.approx(plain.losses, rel=0.2)
        assert torch.isfinite(rounded.logits).all()


def stock_all_reduce(rank: int, path: Path) -> None:
    from sonic_ep.integrations.transformers import round_tokens
    from tests.integrations.transformers.test_expert_parallel import Layout, load, quiet

    with quiet():
        model = load(path, Layout(tp_size=2, ep_size=2), "all_reduce", "sonic_ep")
        with pytest.raises(ValueError, match="ep_implementation='all_reduce'"):
            round_tokens(model, ROUNDING)


@pytest.mark.parallel_registry
def test_all_reduce_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    model_of("qwen3_moe", num_key_value_heads=2).save_pretrained(tmp_path)  # type: ignore[operator]
    ranks(2).run(stock_all_reduce, tmp_path)
