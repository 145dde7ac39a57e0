"""One MoE of torchtitan's models, its experts computed here, beside torchtitan's own and beside our own layer."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("torchtitan")

# isort: off
from tests.helpers.torchtitan_cpu import (  # before torchtitan
    DIM,
    EXPERTS,
    MODELS,
    ROUNDED,
    draw_weights,
    experts_in_own_dtype,
    moe_config,
)

# isort: on

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.moe import MoE, RoutedExperts
from torchtitan.protocols.module import Module

from sonic_ep import MoE as OwnMoE
from sonic_ep import MoEConfig, RoundingConfig, RouterConfig
from sonic_ep.kernels.experts.activations import interleave_split
from tests.helpers.tolerances import assert_near

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast")  # the gate's, in fp32
KINDS = ("qwen3", "deepseek_v3", "gpt_oss")
# How the routers of these models make weights, as our config says it.
ROUTERS = {
    "qwen3": RouterConfig(expert_bias=True),
    "deepseek_v3": RouterConfig(score="sigmoid", scale=2.5, expert_bias=True, num_groups=4, groups_per_token=2),
}


class Tree(Module):
    """A config tree with a MoE in it, for overrides."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        moe: MoE.Config


def with_override(config: MoE.Config, *imports: Any) -> MoE.Config:
    tree = Tree.Config(moe=config)
    assert len(apply_overrides(OverrideConfig(imports=[*imports]), tree)) == len(imports)
    return tree.moe


def build(kind: str, *imports: Any, dtype: torch.dtype = torch.float64) -> Any:
    config = moe_config(kind)
    moe = (with_override(config, *imports) if imports else config).build().to(dtype)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.3)
        moe.expert_bias_E.normal_(std=0.05)
    return moe.train()


def step(moe: Any, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The output, the gradients, and the counts of one step."""
    torch.manual_seed(2)
    x_BLD = torch.randn(3, 16, DIM, dtype=dtype, requires_grad=True)
    out_BLD = moe(x_BLD)
    out_BLD.backward(torch.randn(out_BLD.shape, dtype=dtype))
    found: dict[str, Any] = {"out": out_BLD.detach(), "dx": x_BLD.grad, "counts": moe.tokens_per_expert_E}
    return found | {f"d {name}": parameter.grad for name, parameter in moe.named_parameters()}


def assert_equal_steps(ours: dict[str, Tensor], theirs: dict[str, Tensor], share: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        assert_near(ours[name], wanted, share=share, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_gradients_and_counts_equal_torchtitans(kind: str) -> None:
    with experts_in_own_dtype():
        theirs = step(build(kind))
    # torchtitan weights the rows of experts in fp32.
    assert_equal_steps(step(build(kind, EXPERTS)), theirs, share=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_differs_by_rounding_alone(kind: str) -> None:
    theirs, ours = (step(build(kind, *imports, dtype=torch.bfloat16), torch.bfloat16) for imports in ((), (EXPERTS,)))
    assert_equal_steps(ours, theirs, share=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_have_torchtitans_names_and_values(kind: str) -> None:
    ours, theirs = build(kind, EXPERTS), build(kind)
    assert {name: value.shape for name, value in ours.state_dict().items()} == {
        name: value.shape for name, value in theirs.state_dict().items()
    }
    with torch.no_grad():
        for value in ours.state_dict().values():
            value.mul_(1.5)
    theirs.load_state_dict(ours.state_dict())
    with experts_in_own_dtype():
        wanted = step(theirs)
    assert_equal_steps(step(ours), wanted, share=1e-6)


def test_the_class_of_moe_stays() -> None:
    config = moe_config("gpt_oss")
    assert type(with_override(config, EXPERTS)) is type(config)
    assert type(with_override(moe_config("gpt_oss"), ROUNDED)) is type(config)


def own_layer(moe: Any, router: RouterConfig, rounding: RoundingConfig) -> OwnMoE:
    """Our own layer with the weights of a MoE of torchtitan."""
    experts = moe.routed_experts.inner_experts
    (E, d, n), K = experts.w2_EDF.shape, moe.router.top_k
    layer = OwnMoE(MoEConfig(d=d, n=n, E=E, K=K, router=router, rounding=rounding)).double()
    values = {
        "router.weight": moe.router.gate.weight,
        "router.expert_bias": moe.expert_bias_E,
        "experts.w1": interleave_split(experts.w1_EFD, experts.w3_EFD),
        "experts.w2": experts.w2_EDF,
    }
    ours = layer.state_dict()
    with torch.no_grad():
        for name, value in values.items():
            ours[name].copy_(value)
    return layer.train()


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("mode", ["apportion", "pad", "off"])
def test_rounded_steps_equal_our_own_layers(kind: str, mode: Any) -> None:
    rounding = {"mode": mode, "G": 8, "t": 4, "capacity_factor": 1.5}
    ours = build(kind, (ROUNDED, {"rounding": rounding}))
    ours.shared_experts = None
    layer = own_layer(ours, ROUTERS[kind], RoundingConfig(**rounding))
    torch.manual_seed(2)
    x_TH = torch.randn(3 * 16, DIM, dtype=torch.float64, requires_grad=True)
    out_TH = layer(x_TH).y
    out_TH.backward(torch.randn(3, 16, DIM, dtype=torch.float64).view(-1, DIM))
    found = step(ours)
    assert_near(found["out"].view(-1, DIM), out_TH.detach(), share=1e-6)
    assert_near(found["dx"].view(-1, DIM), x_TH.grad, share=1e-6)
    grads = dict(layer.named_parameters())
    assert_near(found["d router.gate.weight"], grads["router.weight"].grad, share=1e-6)
    assert_near(found["d routed_experts.inner_experts.w2_EDF"], grads["experts.w2"].grad, share=1e-6)


def test_rounding_changes_training_alone() -> None:
    rounded, plain = build("qwen3", (ROUNDED, {"rounding": {"G": 8, "t": 8}})), build("qwen3", EXPERTS)
    assert not torch.equal(step(rounded)["out"], step(plain)["out"])
    x_BLD = torch.randn(3, 16, DIM, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(rounded.eval()(x_BLD), plain.eval()(x_BLD))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("override", [EXPERTS, (ROUNDED, {"rounding": {"G": 8, "t": 4}})], ids=["exact", "rounded"])
def test_a_compiled_moe_computes_the_same(override: Any, kind: str) -> None:
    plain, compiled = build(kind, override), build(kind, override)
    compiled.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert_equal_steps(step(compiled), step(plain), share=1e-9)


def test_a_compiled_moe_is_copied() -> None:
    moe = build("qwen3", EXPERTS)
    moe.compile(backend="aot_eager", fullgraph=True)
    wanted, copied = step(moe), copy.deepcopy(moe)
    del moe
    copied.compile(backend="aot_eager", fullgraph=True)  # torch copies no compiled call
    copied.zero_grad()
    copied.tokens_per_expert_E.zero_()
    assert_equal_steps(step(copied), wanted, share=1e-9)


def refused(config: MoE.Config, entry: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as raised:
        with_override(config, entry)
    return str(raised.value)


def test_what_is_not_supported_is_refused() -> None:
    from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher
    from torchtitan.overrides.fused_swiglu import FusedGroupedExperts

    other = moe_config("qwen3")
    other.routed_experts.token_dispatcher = HybridEPTokenDispatcher.Config(num_experts=8, top_k=2)
    assert "HybridEPTokenDispatcher.Config, which sonic_ep replaces; set moe_comm_backend='standard'" in refused(
        other, EXPERTS
    )
    fused = moe_config("qwen3")
    fused.routed_experts.inner_experts = FusedGroupedExperts.Config(dim=DIM, hidden_dim=16, num_experts=8)
    assert "inner_experts is a FusedGroupedExperts.Config" in refused(fused, EXPERTS)
    gpt_oss: Any = moe_config("gpt_oss")
    gpt_oss.routed_experts.inner_experts.swiglu_limit = 5.0
    assert "swiglu_limit=5.0 is not supported; set it to 7.0" in refused(gpt_oss, EXPERTS)
    assert "rounding.mode='no'" in refused(moe_config("qwen3"), (ROUNDED, {"rounding": {"mode": "no"}}))
    assert "capacity_factor" in refused(moe_config("qwen3"), (EXPERTS, {"transport": {"buffers": "static"}}))
    assert "rounding" in refused(moe_config("qwen3"), (EXPERTS, {"rounding": {}}))


def test_an_override_of_the_shared_experts_goes_with_it() -> None:
    fused = "torchtitan.overrides.fused_swiglu.fused_swiglu"
    config = with_override_of_several(moe_config("deepseek_v3"), EXPERTS, fused)
    assert type(config.shared_experts).__qualname__ == "FusedSwiGLU.Config"
    assert type(config.routed_experts) is not RoutedExperts.Config


def with_override_of_several(config: MoE.Config, *imports: Any) -> Any:
    tree = Tree.Config(moe=config)
    apply_overrides(OverrideConfig(imports=[*imports]), tree)
    return tree.moe


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])  # that of gpt-oss leaves all weights of experts out
def test_hugging_face_names_are_torchtitans(model: str) -> None:
    spec = MODELS[model]()
    theirs: Any = spec.model.build()
    assert apply_overrides(OverrideConfig(imports=[EXPERTS]), spec.model)
    ours: Any = spec.model.build()
    draw_weights(theirs)
    draw_weights(ours)
    assert spec.state_dict_adapter is not None
    adapter: Any = spec.state_dict_adapter(spec.model, None)
    wanted, found = (adapter.to_hf(each.state_dict()) for each in (theirs, ours))
    assert [*found] == [*wanted]
    assert any("mlp.experts.7.gate_proj.weight" in name for name in found)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    loaded: Any = spec.model.build()
    loaded.load_state_dict(adapter.from_hf(found), strict=False)
    assert all(torch.equal(*pair) for pair in zip(loaded.parameters(), theirs.parameters(), strict=True))
