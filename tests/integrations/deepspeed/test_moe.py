"""The layer by itself: DeepSpeed's triple and gradients, its marks, groups and keys, unequal and missing tokens, errors
that reach every rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonic_ep import TransportConfig
from tests.helpers.launch import RankPool
from tests.helpers.tolerances import assert_near

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of CPU and gloo: runs with CUDA_VISIBLE_DEVICES=")
Ranks = Callable[[int], RankPool]


def layer_of(ours: bool, rank: int, ep_size: int, **arguments: Any) -> Any:
    """One layer with its groups; equal weights for ours and DeepSpeed's."""
    from tests.helpers.deepspeed_moe import Model, scatter_experts

    model = Model(ours, ep_size=ep_size, **arguments)
    scatter_experts(model, rank % ep_size)
    layer = model.layers[0]
    layer.set_deepspeed_parallelism()
    return layer


def outcome(layer: Any, x: Tensor, *more: Any) -> dict[str, Tensor]:
    from tests.helpers.deepspeed_moe import gradients

    x = x.clone().requires_grad_()
    y, l_aux, counts = layer(x, *more)
    (y.float().square().sum() + 3 * l_aux).backward()
    assert x.grad is not None
    return {"y": y.detach(), "l_aux": l_aux.detach(), "counts": counts, "dx": x.grad, **gradients(layer)}


def against_deepspeeds(rank: int, k: int, ep_size: int, shape: tuple[int, ...], training: bool, residual: bool) -> Any:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    results = []
    with deepspeed_world():
        for ours in (False, True):
            layer = layer_of(ours, rank, ep_size, k=k, use_residual=residual).train(training)
            x = torch.randn(*shape, 16, generator=torch.Generator().manual_seed(rank))
            # 3 ranks of 4 have fewer tokens.
            results.append(outcome(layer, x[: len(x) - rank]))
    return results


@pytest.mark.parametrize(
    ("k", "ep_size", "shape", "training", "residual"),
    [
        (1, 4, (40,), True, False),
        (2, 2, (40,), True, False),
        (2, 4, (5, 7), False, True),
        (3, 1, (40,), True, False),
        (4, 4, (5, 2, 3), True, True),
    ],
)
def test_outputs_losses_counts_and_gradients_are_deepspeeds(
    ranks: Ranks, k: int, ep_size: int, shape: tuple[int, ...], training: bool, residual: bool
) -> None:
    for stock, ours in ranks(4).run(against_deepspeeds, k, ep_size, shape, training, residual):
        assert ours.keys() == stock.keys()
        assert ours["counts"].dtype == torch.int64
        torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)


def some_used(rank: int) -> Any:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    results = []
    with deepspeed_world():
        for ours in (False, True):
            layer = layer_of(ours, rank, 2, k=1, use_rts=False)
            x = torch.randn(30, 16, generator=torch.Generator().manual_seed(rank))
            used = (torch.arange(30) % 3 != 0).long()
            results.append(outcome(layer, x, used))
    return results


@pytest.mark.filterwarnings("ignore:without effect")
def test_unused_tokens_count_nowhere(ranks: Ranks) -> None:
    for stock, ours in ranks(2).run(some_used):
        assert ours["counts"].sum() == 20
        assert not ours["y"][0].any()
        torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)


def with_idle_rank(rank: int, k: int) -> Any:
    """Rank 1 has no token. The same with all tokens on one rank, alone."""
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        x = torch.randn(20, 16, generator=torch.Generator().manual_seed(7))
        spread = outcome(layer_of(True, rank, 2, k=k), x if rank == 0 else x[:0])
        whole = outcome(layer_of(True, rank, 1, k=k), x)
    return spread, whole


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_rank_without_tokens(ranks: Ranks, k: int) -> None:
    results = ranks(2).run(with_idle_rank, k)
    (spread, whole), (idle, _) = results
    for name in ("y", "l_aux", "counts", "dx"):
        torch.testing.assert_close(spread[name], whole[name])
    assert idle["y"].shape == (0, 16)
    assert idle["l_aux"] == 0
    assert idle["counts"].sum() == 0
    for rank, (mine, _) in enumerate(results):
        for key in (key for key in mine if "deepspeed_experts" in key):
            local = int(key.split("deepspeed_experts.")[1].split(".")[0])
            of_all = key.replace(f"deepspeed_experts.{local}.", f"deepspeed_experts.{rank * 4 + local}.")
            # Neither scaled nor divided: DeepSpeed does that.
            torch.testing.assert_close(mine[key], whole[of_all])


def engine_with_idle_rank(rank: int) -> list[bool]:
    """Whether every expert weight has a gradient after backward, and training goes on, with rank 1 idle."""
    from tests.helpers.deepspeed_cpu import deepspeed_world, engine
    from tests.helpers.deepspeed_moe import Model, batches

    finite = []
    with deepspeed_world():
        run = engine(Model(True, ep_size=2, k=2), zero=2)
        for x in batches(rank, 3):
            y, l_aux, _ = run(x if rank == 0 else x[:0])
            run.backward(y.square().sum() + l_aux)
            run.step()
            finite.append(all(parameter.isfinite().all() for parameter in run.module.parameters()))
    return finite


def test_an_engine_with_an_idle_rank_goes_on(ranks: Ranks) -> None:
    assert ranks(2).run(engine_with_idle_rank) == [[True] * 3] * 2


def marks_and_groups(rank: int) -> Any:
    import deepspeed.moe.layer
    import torch.distributed as dist
    from deepspeed.moe.utils import has_moe_layers, is_moe_param
    from deepspeed.utils import groups

    from tests.helpers.deepspeed_cpu import deepspeed_world

    made: list[list[int]] = []
    original = dist.new_group

    def counts(ranks: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(list(ranks))
        return original(ranks, *args, **kwargs)

    with deepspeed_world():
        dist.new_group = counts
        try:
            layer = layer_of(True, rank, 2, k=2, use_residual=True)
            layer.set_deepspeed_parallelism()
            layer(torch.randn(6, 16))
        finally:
            dist.new_group = original
        moe = layer.deepspeed_moe
        return {
            "kind": isinstance(layer, deepspeed.moe.layer.MoE) and has_moe_layers(layer)[0],
            "made": sorted(made),
            "group": moe.group.process_group is groups._get_expert_parallel_group("ep_size_2"),
            "experts": {
                name: getattr(value, "group_name", None)
                for name, value in layer.named_parameters()
                if is_moe_param(value)
            },
            "numbers": (layer.num_experts, layer.num_local_experts, layer.ep_size, layer.expert_group_name),
        }


def test_deepspeeds_groups_are_used_and_none_made_beside_them(ranks: Ranks) -> None:
    for found in ranks(4).run(marks_and_groups):
        assert found["kind"]
        assert found["made"] == [[0, 1], [0, 2], [1, 3], [2, 3]]
        assert found["group"]
        assert found["experts"] == dict.fromkeys(("deepspeed_moe.experts.w1", "deepspeed_moe.experts.w2"), "ep_size_2")
        assert found["numbers"] == (8, 4, 2, "ep_size_2")


def keys_of(rank: int) -> Any:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        states = [layer_of(ours, rank, 2, k=2, use_residual=True).state_dict() for ours in (True, False)]
        wrong = dict(states[1])
        first, *_ = (key for key in wrong if "deepspeed_experts.0" in key)
        wrong["deepspeed_moe.experts.deepspeed_experts.9.more"] = wrong.pop(first)
        message = ""
        try:
            layer_of(True, rank, 2, k=2, use_residual=True).load_state_dict(wrong)
        except RuntimeError as error:
            message = str(error)
    return states, first, message


def test_the_state_dict_is_deepspeeds(ranks: Ranks) -> None:
    (ours, stock), first, message = ranks(2).run(keys_of)[0]
    assert ours.keys() == stock.keys()
    torch.testing.assert_close(dict(ours), dict(stock), atol=0, rtol=0)
    assert f'Missing key(s) in state_dict: "{first}"' in message
    assert 'Unexpected key(s) in state_dict: "deepspeed_moe.experts.deepspeed_experts.9.more"' in message


def wrong_input(rank: int, fault: str) -> str:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        layer = layer_of(True, rank, 2, k=1, noisy_gate_policy="RSample" if fault == "sampled" else None)
        x, used = torch.randn(6, 16), torch.ones(6)
        if rank == 1 and fault in ("width", "sampled"):
            x = torch.randn(6, 12)
        if rank == 1 and fault == "dtype":
            x = x.double()
        if rank == 1 and fault == "used":
            used = torch.ones(5)
        if rank == 1 and fault == "mode":
            layer.eval()
        try:
            layer(x, used)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("width", "rank 1: x has hidden size 12"),
        ("dtype", "rank 1: x has dtype torch.float64"),
        ("used", "rank 1: used_token has shape (5,)"),
        ("mode", "disagree about input dtype or training mode"),
        ("sampled", "rank 1: x has hidden size 12"),
    ],
)
def test_what_is_wrong_on_one_rank_raises_on_all(ranks: Ranks, fault: str, message: str) -> None:
    for raised in ranks(2).run(wrong_input, fault):
        assert message in raised


def built_differently(rank: int, what: str) -> str:
    from sonic_ep.integrations.deepspeed import SonicEPOptions
    from tests.helpers.deepspeed_cpu import deepspeed_world

    options = SonicEPOptions(transport=TransportConfig(kind=("auto", "all_to_all")[rank]))
    with deepspeed_world():
        try:
            layer_of(True, rank, 2, **({"k": 1 + rank} if what == "k" else {"options": options}))
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("what", ["k", "transport"])
def test_layers_built_differently_are_found_before_the_first_step(ranks: Ranks, what: str) -> None:
    for raised in ranks(2).run(built_differently, what):
        assert "the ranks of the EP group disagree about a MoE layer" in raised


def without_groups(rank: int) -> str:
    from tests.helpers.deepspeed_cpu import deepspeed_world
    from tests.helpers.deepspeed_moe import Model

    with deepspeed_world():
        alone = Model(True, ep_size=1).layers[0](torch.randn(3, 16))[0]
        assert alone.shape == (3, 16)
        try:
            Model(True, ep_size=2)(torch.randn(3, 16))
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_layer_without_groups_says_what_to_call(ranks: Ranks) -> None:
    for message in ranks(2).run(without_groups):
        assert "call deepspeed.initialize" in message


def under_tensor_parallelism(rank: int) -> str:
    from deepspeed.utils import groups

    from tests.helpers.deepspeed_cpu import deepspeed_world

    class TwoTensorRanks:
        def get_tensor_model_parallel_world_size(self) -> int:
            return 2

    with deepspeed_world():
        groups.mpu = TwoTensorRanks()  # type: ignore[assignment]
        try:
            layer_of(True, rank, 2, k=1)
        except ValueError as error:
            return str(error)
    return ""


def test_tensor_parallelism_is_refused(ranks: Ranks) -> None:
    for message in ranks(2).run(under_tensor_parallelism):
        assert "tensor parallel size 2" in message


def autocast(rank: int) -> Any:
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world(), torch.autocast("cpu", torch.bfloat16):
        layers = [layer_of(ours, rank, 2, k=2) for ours in (True, False)]
        x = torch.randn(12, 16)
        return [layer(x)[0].float().detach() for layer in layers]


def test_autocast(ranks: Ranks) -> None:
    for ours, stock in ranks(2).run(autocast):
        assert_near(ours, stock, share=2**-7)


def jitter(rank: int, k: int) -> Any:
    """The losses of two steps in training and of one in evaluation, of our layer and DeepSpeed's, from one seed."""
    from tests.helpers.deepspeed_cpu import deepspeed_world

    with deepspeed_world():
        results = []
        for ours in (True, False):
            # Without use_rts: with k=1 it takes random numbers, too.
            layer, x = layer_of(ours, rank, 2, k=k, noisy_gate_policy="Jitter", use_rts=False), torch.ones(12, 16)
            torch.manual_seed(rank)
            results.append((layer(x)[1].detach(), layer(x)[1].detach(), layer.eval()(x)[1].detach()))
    return results


@pytest.mark.parametrize("k", [1, 2, 3])
def test_jitter_is_deepspeeds(ranks: Ranks, k: int) -> None:
    for ours, stock in ranks(2).run(jitter, k):
        torch.testing.assert_close(ours, stock)
        assert len({*map(float, ours)}) == 3


def sampled(rank: int, rounded: bool) -> Any:
    """Two outcomes in training and the loss in evaluation, of our layer and DeepSpeed's, from one seed."""
    from sonic_ep import RoundingConfig
    from sonic_ep.integrations.deepspeed import SonicEPOptions
    from tests.helpers.deepspeed_cpu import deepspeed_world

    results = []
    with deepspeed_world():
        for ours in (True, False):
            options = {"options": SonicEPOptions(rounding=RoundingConfig())} if ours and rounded else {}
            # Without use_rts: it takes random numbers, too.
            layer = layer_of(ours, rank, 2, k=1, noisy_gate_policy="RSample", use_rts=False, **options)
            x = torch.randn(40, 16, generator=torch.Generator().manual_seed(rank))
            torch.manual_seed(rank)
            results.append((outcome(layer, x), outcome(layer, x), layer.eval()(x)[1].detach()))
    return results


def test_rsample_is_deepspeeds(ranks: Ranks) -> None:
    for ours, stock in ranks(2).run(sampled, False):
        torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
        assert not torch.equal(ours[0]["counts"], ours[1]["counts"])


def test_rsample_under_rounding_counts_what_was_sampled(ranks: Ranks) -> None:
    for ours, stock in ranks(2).run(sampled, True):
        assert torch.equal(ours[0]["counts"], stock[0]["counts"])
        torch.testing.assert_close(ours[0]["l_aux"], stock[0]["l_aux"])
        assert all(value.isfinite().all() for value in ours[0].values())


def test_it_is_a_module_of_its_own() -> None:
    """What the parent's constructor would build is not there."""
    from sonic_ep.integrations.deepspeed import MoE
    from tests.helpers.deepspeed_moe import DROPLESS, GatedMLP

    layer = MoE(16, GatedMLP(), num_experts=4, k=2, **DROPLESS)
    assert sum(parameter.numel() for parameter in layer.parameters()) == 4 * 3 * 16 * 24 + 4 * 16
    assert not any(isinstance(module, nn.Linear) for module in layer.modules())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("k", [1, 2, 3])
def test_torch_compile_changes_neither_the_loss_nor_its_gradient(k: int) -> None:
    from sonic_ep.integrations.deepspeed import MoE
    from tests.helpers.deepspeed_moe import DROPLESS, GatedMLP

    layer = MoE(16, GatedMLP(), num_experts=4, k=k, **{**DROPLESS, "top2_2nd_expert_sampling": False})
    x, used = torch.randn(12, 16), torch.arange(12) % 3 > 0
    found = []
    for run in (layer, torch.compile(layer, backend="eager")):
        l_aux = run(x, used)[1]
        found.append([l_aux.detach(), *torch.autograd.grad(l_aux, layer.deepspeed_moe.gate.wg.weight)])
    torch.testing.assert_close(*found)
    assert found[0][1].any()


def test_weights_without_memory_are_not_loaded_into() -> None:
    from tests.helpers.deepspeed_moe import Model

    with torch.device("meta"):
        experts = Model(True, k=2).layers[0].deepspeed_moe.experts
    with pytest.raises(RuntimeError, match="have no memory yet: call to_empty"):
        experts.load_state_dict(Model(True, k=2).layers[0].deepspeed_moe.experts.state_dict())


def test_entries_that_are_no_tensors_are_refused_by_name() -> None:
    from tests.helpers.deepspeed_moe import Model

    experts = Model(True, k=2).layers[0].deepspeed_moe.experts
    key = next(iter(state := experts.state_dict()))
    with pytest.raises(RuntimeError, match=f"size mismatch for {key}: a list in the checkpoint"):
        experts.load_state_dict({**state, key: [1, 2]})


@pytest.mark.parametrize("frozen", ["gate_proj up_proj", "down_proj"])
def test_what_is_frozen_in_the_template_stays_frozen(frozen: str) -> None:
    from sonic_ep.integrations.deepspeed.experts import StackedExperts
    from sonic_ep.integrations.deepspeed.template import Template, read_template
    from tests.helpers.deepspeed_moe import GatedMLP, H

    template = GatedMLP(bias=True)
    for name, parameter in template.named_parameters():
        parameter.requires_grad_(name.split(".")[0] not in frozen)
    read = read_template(template, H)
    assert isinstance(read, Template)
    experts = StackedExperts(template, read, 2, "ep_size_1")
    wanted = {"w1", "bias1"} if "up_proj" in frozen else {"w2", "bias2"}
    assert {name for name, parameter in experts.named_parameters() if not parameter.requires_grad} == wanted
    assert {parameter.group_name for parameter in experts.parameters()} == {"ep_size_1"}  # type: ignore[attr-defined]


def test_weights_that_get_memory_are_still_experts() -> None:
    from deepspeed.moe.utils import is_moe_param

    from tests.helpers.deepspeed_moe import Model

    with torch.device("meta"):
        experts = Model(True, k=2).layers[0].deepspeed_moe.experts
    experts.to_empty(device="cpu")
    assert all(is_moe_param(parameter) for parameter in experts.parameters())
    assert {parameter.group_name for parameter in experts.parameters()} == {"ep_size_1"}


def with_biases(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """Outcomes of DeepSpeed's layer and ours, and the parameters of ours that a trainer would not decay."""
    from tests.helpers.deepspeed_cpu import deepspeed_world
    from tests.helpers.deepspeed_moe import GatedMLP

    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(rank))
    with deepspeed_world():
        stock, ours = (
            layer_of(is_ours, rank, 2, k=2, expert=partial(GatedMLP, bias=True)) for is_ours in (False, True)
        )
        named = dict(ours.deepspeed_moe.experts.named_parameters())
        spared = [name for name, parameter in named.items() if "bias" in name and parameter.dim() == 1]
        return outcome(stock, x), outcome(ours, x), spared


def test_biases_of_experts(ranks: Ranks) -> None:
    for wanted, got, spared in ranks(2).run(with_biases):
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(
                got[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert spared == ["bias1", "bias2"]


def engine_around(rank: int) -> str:
    """An engine with a client optimizer and timers; what ZeRO 3 says."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    from tests.helpers.deepspeed_cpu import deepspeed_world, engine, train
    from tests.helpers.deepspeed_moe import Model, batches, loss_of

    with deepspeed_world():
        model = Model(True, ep_size=2, k=2)
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
        run = engine(model, zero=1, optimizer=torch.optim.AdamW(groups, lr=1e-2), wall_clock_breakdown=True)
        steps = train(run, batches(rank, 3), loss_of)
        assert all(step.grad_norm > 0 for step in steps)
    with deepspeed_world():
        try:
            engine(Model(True, ep_size=2, k=2), zero=3)
        except AssertionError as error:
            return str(error)
    return ""


def test_client_optimizers_and_timers_work_and_zero_3_is_deepspeeds_to_refuse(ranks: Ranks) -> None:
    for message in ranks(2).run(engine_around):
        assert "not supported with ZeRO Stage 3" in message
