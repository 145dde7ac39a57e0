"""State dicts of torch's optimizers: DTensors for experts on several ranks, however the optimizer was used before."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from sonic_ep import EPGroup, MoE, MoEConfig, fsdp
from sonic_ep.checkpoint import optimizers
from tests.helpers.launch import RankPool, run_ranks

Ranks = Callable[[int], RankPool]
CONFIG = MoEConfig(d=8, n=4, E=8, K=2)


def layer_with_gradients(seed: int = 0) -> MoE:
    layer = MoE(CONFIG, EPGroup(), seed=seed)
    for parameter in layer.parameters():
        parameter.grad = parameter.detach() + 1
    return layer


def key_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    return next(i for i, each in enumerate(optimizer.param_groups[0]["params"]) if each is parameter)


def of_w1(optimizer: torch.optim.Optimizer, layer: MoE) -> dict[str, Any]:
    return optimizer.state_dict()["state"][key_of(optimizer, layer.experts.w1)]


def steps_in_ways(rank: int) -> None:
    """The optimizer was made before or after, its step is compiled, or it has only loaded."""
    layer = layer_with_gradients()
    optimizer = torch.optim.AdamW(layer.parameters())
    torch.compile(optimizer.step, backend="eager")()
    moments = of_w1(optimizer, layer)
    assert isinstance(moments["exp_avg"], DTensor)
    assert moments["exp_avg"].shape == (8, *layer.experts.w1.shape[1:])
    assert moments["step"].dim() == 0
    own = optimizer.state[layer.experts.w1]["exp_avg"]
    assert type(own) is Tensor, "the optimizer's own state is as it was"
    assert moments["exp_avg"].to_local().data_ptr() == own.data_ptr()

    other = MoE(CONFIG, EPGroup(), seed=1)
    loaded = torch.optim.AdamW(other.parameters())
    plain = optimizer.state_dict()
    plain["state"] = {key: optimizer.state[p] for key, p in enumerate(layer.parameters())}
    loaded.load_state_dict(plain)  # as older versions wrote it, one file a rank
    assert torch.equal(loaded.state[other.experts.w1]["exp_avg"], own)
    assert isinstance(of_w1(loaded, other)["exp_avg"], DTensor)

    frozen = layer_with_gradients()
    frozen.experts.w1.requires_grad_(False).grad = None
    optimizer = torch.optim.AdamW([p for p in frozen.parameters() if p.requires_grad])
    state = get_optimizer_state_dict(frozen, optimizer)
    assert "experts.w1" not in state["state"]
    set_optimizer_state_dict(frozen, optimizer, state)


def test_however_the_optimizer_was_used(ranks: Ranks) -> None:
    ranks(2).run(steps_in_ways)


class Nested(torch.optim.SGD):
    """Has state in containers, as second-order optimizers do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"parts": {"left": torch.zeros(p.shape[0], 3), "right": (torch.ones_like(p), 5)}}


class Blocks(torch.optim.SGD):
    """Has state that no expert can be assigned."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"blocks": torch.zeros(7)}


def other_optimizers(rank: int) -> None:
    layer = layer_with_gradients()
    optimizer = Nested(layer.parameters(), lr=0.1)
    optimizer.step()
    parts = of_w1(optimizer, layer)["parts"]
    assert parts["left"].shape == (8, 3)
    assert parts["right"][0].shape[0] == 8
    assert parts["right"][1] == 5
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[layer.experts.w1]["parts"]["left"].shape == (4, 3)
    blocks = Blocks(layer.parameters(), lr=0.1)
    blocks.step()
    with pytest.raises(ValueError, match=r"blocks of experts.w1 \(4, 8, 8\) has shape \(7,\)"):
        blocks.state_dict()
    # Without experts, it is torch's, down to the objects.
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    dense = torch.optim.AdamW([weight])
    dense.step()
    assert dense.state_dict()["state"][0] is dense.state[weight]
    dense.load_state_dict(dense.state_dict())


def test_state_of_other_kinds(ranks: Ranks) -> None:
    ranks(2).run(other_optimizers)


def test_one_rank_alone_leaves_torch_as_it_is() -> None:
    MoE(CONFIG, seed=0)
    assert torch.optim.Optimizer.state_dict is optimizers._torch_state_dict
    assert torch.optim.Optimizer.load_state_dict is optimizers._torch_load_state_dict


def forgotten(rank: int) -> list[bool]:
    """Whether an optimizer has DTensors while a layer lives, while a copy does, and once both are gone."""
    layer, found = MoE(CONFIG, EPGroup(), seed=0), []
    copies = copy.deepcopy(layer), torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer = layer.double()  # by swaps, which weak references to parameters would prevent
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for each in (layer, copies[0]):
        w1 = each.experts.w1
        optimizer = torch.optim.AdamW([w1])
        w1.grad = torch.ones_like(w1)
        optimizer.step()
        found.append(isinstance(optimizer.state_dict()["state"][0]["exp_avg"], DTensor))
    del layer, copies, each
    gc.collect()
    return [*found, isinstance(optimizer.state_dict()["state"][0]["exp_avg"], DTensor)]


def test_layers_that_are_gone_are_forgotten(ranks: Ranks) -> None:
    assert ranks(2).run(forgotten) == [[True, True, False]] * 2


def fsdp_in_ways(rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of moments of w1 where FSDP got a model on meta, keeps experts gathered after forward, or was loaded."""
    table, found = torch.arange(4).view(2, 2), {}
    ep, _ = dist.new_subgroups_by_enumeration(table.tolist())
    same_experts, _ = dist.new_subgroups_by_enumeration(table.t().tolist())
    mesh, expert_mesh = init_device_mesh("cpu", (4,)), DeviceMesh.from_group(same_experts, "cpu")
    for way in ("meta", "gathered", "assigned"):
        layer = MoE(CONFIG, EPGroup(ep), seed=0, device="meta" if way == "meta" else None)
        model = nn.Sequential(layer)
        fsdp.fully_shard(model, mesh=mesh, expert_mesh=expert_mesh, reshard_after_forward=way != "gathered")
        if way == "meta":
            model.to_empty(device="cpu")
            layer.initialize(0)
        if way == "assigned":
            model.load_state_dict(model.state_dict(), assign=True)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(5, 8)
        model(x).y.sum().backward()
        optimizer.step()
        w1 = layer.experts.w1
        with torch.no_grad():
            model(x)
        assert (way == "gathered") == (not isinstance(layer.experts.w1, DTensor))
        found[way] = tuple(optimizer.state_dict()["state"][key_of(optimizer, w1)]["exp_avg"].shape)
        assert model.state_dict()["0.experts.w1"].shape == (8, 8, 8)
    return found


def test_fsdp_in_other_ways() -> None:
    for found in run_ranks(fsdp_in_ways, 4):
        assert found == dict.fromkeys(("meta", "gathered", "assigned"), (8, 8, 8))
