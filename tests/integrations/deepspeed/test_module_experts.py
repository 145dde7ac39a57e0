"""Templates that no kernel computes: module by module they give what DeepSpeed's layer gives, under our routing."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonic_ep import RoundingConfig
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.protocol import PreparedDispatch
from tests.helpers.launch import RankPool
from tests.helpers.tolerances import assert_near

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]
H, WIDTH = 16, 24


class NormThenTwoPaths(nn.Module):
    """A norm, a residual inside, a buffer, and a second result, which DeepSpeed ignores."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(H), nn.Linear(H, WIDTH), nn.Linear(WIDTH, H, bias=False)
        self.register_buffer("scale", torch.full((), 1.5))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + self.second(torch.tanh(self.first(self.norm(x)))) * self.scale, None


def two_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(H, WIDTH), nn.Linear(WIDTH, H))


TEMPLATES: dict[str, Callable[[], nn.Module]] = {
    "linear": partial(nn.Linear, H, H),
    "two linears": two_linears,
    "norm, two paths": NormThenTwoPaths,
}


def layer_of(ours: bool, rank: int, ep_size: int, name: str, **arguments: Any) -> Any:
    from tests.helpers.deepspeed_moe import Model, scatter_experts

    model = Model(ours, ep_size=ep_size, expert=TEMPLATES[name], **arguments)
    scatter_experts(model, rank % ep_size)
    layer = model.layers[0]
    layer.set_deepspeed_parallelism()
    return layer


def outcome(layer: Any, x: Tensor, of: Any = None) -> dict[str, Tensor]:
    """of: the layer with the parameters, if `layer` calls another."""
    from tests.helpers.deepspeed_moe import gradients

    x = x.clone().requires_grad_()
    y, l_aux, counts = layer(x)
    (y.float().square().sum() + 3 * l_aux).backward()
    assert x.grad is not None
    return {"y": y.detach(), "l_aux": l_aux.detach(), "counts": counts, "dx": x.grad, **gradients(of or layer)}


def against_deepspeeds(rank: int, name: str, k: int, ep_size: int, residual: bool) -> Any:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    results = []
    with deepspeed_world():
        for ours in (False, True):
            layer = layer_of(ours, rank, ep_size, name, k=k, use_residual=residual)
            x = torch.randn(5, 8, H, generator=torch.Generator().manual_seed(rank))
            results.append(outcome(layer, x[: 5 - rank]))
    return results


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("size", "k", "ep_size", "residual"), [(2, 1, 1, False), (2, 2, 2, True), (4, 3, 4, False)])
def test_outputs_losses_counts_and_gradients_are_deepspeeds(
    ranks: Ranks, name: str, size: int, k: int, ep_size: int, residual: bool
) -> None:
    for stock, ours in ranks(size).run(against_deepspeeds, name, k, ep_size, residual):
        assert ours.keys() == stock.keys()
        torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)


def with_idle_rank(rank: int) -> Any:
    """Rank 1 has no token, and no token chooses the experts of rank 1. The same on one rank."""
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        x = torch.rand(20, H, generator=torch.Generator().manual_seed(7))
        layers = [layer_of(True, rank, ep_size, "norm, two paths", k=2) for ep_size in (2, 1)]
        for layer in layers:
            with torch.no_grad():
                layer.deepspeed_moe.gate.wg.weight[4:] = -10
        return outcome(layers[0], x if rank == 0 else x[:0]), outcome(layers[1], x)


def test_ranks_without_tokens_and_experts_without_rows(ranks: Ranks) -> None:
    (spread, whole), (idle, _) = ranks(2).run(with_idle_rank)
    for name in ("y", "l_aux", "counts", "dx"):
        torch.testing.assert_close(spread[name], whole[name])
    assert idle["y"].shape == (0, H)
    of_experts = [grad for key, grad in idle.items() if "deepspeed_experts" in key]
    assert of_experts
    assert not any(grad.any() for grad in of_experts)


def by_kernels_and_by_modules(rank: int, mode: str) -> Any:
    """The same MLP twice, under rounding."""
    from sonic_ep.integrations.deepspeed import SonicEPOptions
    from sonic_ep.integrations.deepspeed.module_experts import ModuleExperts
    from tests.helpers.deepspeed_cpu import deepspeed_world
    from tests.helpers.deepspeed_moe import GatedMLP, Model, scatter_experts

    class SameByModules(GatedMLP):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("without_use", torch.ones(()))  # last in the order of `scatter_experts`

    options = SonicEPOptions(rounding=RoundingConfig(mode=mode))  # type: ignore[arg-type]
    results = []
    with deepspeed_world():
        for expert in (GatedMLP, SameByModules):
            model = Model(True, ep_size=2, k=2, expert=expert, options=options)
            scatter_experts(model, rank)
            layer = model.layers[0]
            layer.set_deepspeed_parallelism()
            assert isinstance(layer.deepspeed_moe.experts, ModuleExperts) == (expert is SameByModules)
            results.append(outcome(layer, torch.randn(300, H, generator=torch.Generator().manual_seed(rank))))
    return results


@pytest.mark.parametrize("mode", ["apportion", "pad"])
def test_rounding(ranks: Ranks, mode: str) -> None:
    for kernels, modules in ranks(2).run(by_kernels_and_by_modules, mode):
        assert kernels["y"].any()
        assert modules.keys() == kernels.keys()
        for key, value in kernels.items():
            torch.testing.assert_close(modules[key], value, atol=2e-4, rtol=2e-5, msg=lambda t, key=key: f"{key}: {t}")


@pytest.mark.filterwarnings("ignore:no kernel computes")
def test_spare_capacity_of_the_lists_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where lists are allocated before the host knows their sizes."""
    layer, x, exact = moe(NormThenTwoPaths()), torch.randn(6, H), LocalTransport.prepare
    wanted = outcome(layer, x)
    layer.zero_grad()

    def spacious(transport: LocalTransport, *arguments: Any, **named: Any) -> PreparedDispatch:
        prepared = exact(transport, *arguments, **named)
        lists = prepared.handle.row_of_pair_P, prepared.weights_P
        rows_P, weights_P = (torch.cat((values, values.new_zeros(3))) for values in lists)
        return PreparedDispatch(replace(prepared.handle, row_of_pair_P=rows_P), weights_P)

    monkeypatch.setattr(LocalTransport, "prepare", spacious)
    torch.testing.assert_close(outcome(layer, x), wanted, rtol=0, atol=0)


def recomputed(rank: int, reentrant: bool) -> Any:
    from torch.utils.checkpoint import checkpoint

    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        layers = [layer_of(True, rank, 2, "norm, two paths", k=2) for _ in range(2)]
        x = torch.randn(20 + rank, H, generator=torch.Generator().manual_seed(rank))
        return outcome(layers[0], x), outcome(lambda x: checkpoint(layers[1], x, use_reentrant=reentrant), x, layers[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(ranks: Ranks, reentrant: bool) -> None:
    for wanted, got in ranks(2).run(recomputed, reentrant):
        torch.testing.assert_close(got, wanted, atol=0, rtol=0)


def autocast(rank: int) -> Any:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world(), torch.autocast("cpu", torch.bfloat16):
        layers = [layer_of(ours, rank, 2, "norm, two paths", k=2) for ours in (True, False)]
        x = torch.randn(12, H)
        y, stock = (layer(x)[0] for layer in layers)
        y.float().sum().backward()
        grads = [parameter.grad for parameter in layers[0].parameters()]
        assert all(grad is not None and grad.isfinite().all() for grad in grads)
        return y.float().detach(), stock.float().detach()


def test_autocast(ranks: Ranks) -> None:
    for ours, stock in ranks(2).run(autocast):
        assert_near(ours, stock, share=2**-7)


def wrong(rank: int, fault: str) -> str:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        layer = layer_of(True, rank, 2, "linear", k=1)
        if fault == "shape":
            for expert in layer.deepspeed_moe.experts.deepspeed_experts:
                expert.forward = lambda x: x[:, :4]
        x = torch.randn(6, H)
        x = x.double() if rank == 1 and fault == "dtype" else x[:, :4] if rank == 1 and fault == "width" else x
        try:
            layer(x)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("width", "rank 1: x has hidden size 4"),
        ("dtype", "rank 1: x has dtype torch.float64"),
        ("shape", "expert=Linear returned"),
    ],
)
def test_what_is_wrong_on_one_rank_raises_on_all(ranks: Ranks, fault: str, message: str) -> None:
    for raised in ranks(2).run(wrong, fault):
        assert message in raised


def built_differently(rank: int) -> str:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        try:
            layer_of(True, rank, 2, ("linear", "two linears")[rank])
        except ValueError as error:
            return str(error)
    return ""


def test_templates_that_differ_are_found_before_the_first_step(ranks: Ranks) -> None:
    for raised in ranks(2).run(built_differently):
        assert "the ranks of the EP group disagree about a MoE layer" in raised


def moe(expert: nn.Module, **arguments: Any) -> Any:
    from sonic_ep.integrations.deepspeed import MoE
    from tests.helpers.deepspeed_moe import DROPLESS

    return MoE(H, expert, num_experts=4, k=2, **DROPLESS, **arguments)


def test_one_warning_says_what_would_be_fast() -> None:
    from sonic_ep.integrations.deepspeed import SonicEPOptions

    with pytest.warns(UserWarning, match=r"no kernel computes expert=Linear \(it is none .*module by module") as caught:
        moe(nn.Linear(H, H))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert all(name in str(caught[0].message) for name in ("gate_proj", "fc1, fc2", "gelu_erf", "relu"))
    assert "save_dispatched" not in str(caught[0].message)
    with pytest.warns(UserWarning, match="options.save_dispatched has no effect"):
        moe(nn.Linear(H, H), options=SonicEPOptions(save_dispatched=True))
    moe(nn.Sequential(nn.Linear(H, WIDTH), nn.ReLU(), nn.Linear(WIDTH, H)))  # no warning, which would be an error
    moe(nn.Sequential(nn.Linear(H, WIDTH), nn.GELU(), nn.Linear(WIDTH, H)))


@pytest.mark.filterwarnings("ignore:no kernel computes")
def test_batch_invariance_is_refused() -> None:
    from sonic_ep.integrations.deepspeed import SonicEPOptions

    with pytest.raises(
        ValueError, match=r"^options.batch_invariant=True with experts that run module by module, .*; set"
    ):
        moe(nn.Linear(H, H), options=SonicEPOptions(batch_invariant=True))


@pytest.mark.filterwarnings("ignore:no kernel computes")
def test_experts_are_marked_also_once_they_have_memory() -> None:
    from deepspeed.moe.utils import is_moe_param

    with torch.device("meta"):
        experts = moe(nn.Linear(H, H)).deepspeed_moe.experts
    experts.to_empty(device="cpu")
    assert {parameter.group_name for parameter in experts.parameters()} == {"ep_size_1"}
    assert all(is_moe_param(parameter) for parameter in experts.parameters())


class InHalfAndFull(nn.Module):
    """A norm in fp32 before a bf16 linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(H), nn.Linear(H, H, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.float()).bfloat16())


@pytest.mark.filterwarnings("ignore:no kernel computes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_any_dtype_of_the_template(dtype: torch.dtype) -> None:
    layer = moe(InHalfAndFull())
    y, _, _ = layer(torch.randn(6, H, dtype=dtype))
    assert y.dtype == dtype
    y.float().sum().backward()
    with pytest.raises(ValueError, match=r"x has dtype torch\.float16, the experts compute in torch\.float32"):
        layer(torch.randn(6, H, dtype=torch.float16))


@pytest.mark.filterwarnings("ignore:no kernel computes")
def test_second_derivatives_are_refused() -> None:
    x = torch.randn(6, H, requires_grad=True)
    y, _, _ = moe(nn.Linear(H, H))(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        dx.sum().backward()


@pytest.mark.filterwarnings("ignore:no kernel computes")
def test_a_graph_may_be_used_twice() -> None:
    layer, x = moe(NormThenTwoPaths()), torch.randn(6, H, requires_grad=True)
    y, _, _ = layer(x)
    first, second = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.any()


@pytest.mark.filterwarnings("ignore:no kernel computes", "ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_compile_leaves_it_out() -> None:
    layer, x = moe(nn.Linear(H, H)), torch.randn(6, H)
    wanted = outcome(layer, x)
    layer.zero_grad()
    y, l_aux, counts = torch.compile(layer, backend="aot_eager")(x)
    (y.square().sum() + 3 * l_aux).backward()
    torch.testing.assert_close({"y": y.detach(), "counts": counts}, {key: wanted[key] for key in ("y", "counts")})
    for key, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[key])


@pytest.mark.filterwarnings("ignore:no kernel computes")
def test_frozen_experts_pass_gradients_on() -> None:
    layer, x = moe(nn.Linear(H, H).requires_grad_(False)), torch.randn(6, H, requires_grad=True)
    layer(x)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    assert all(parameter.grad is None for parameter in layer.deepspeed_moe.experts.parameters())
