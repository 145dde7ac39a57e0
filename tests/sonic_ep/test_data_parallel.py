"""docs/data_parallel.md: under torch's wrappers the gradients are those of one process with the whole batch."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig
from tests.helpers.launch import RankPool
from tests.helpers.tolerances import assert_near

CONFIG = MoEConfig(d=16, n=8, E=8, K=2, shared_n=8, init_std=0.3, rounding=RoundingConfig(mode="off"))
TOKENS, WORLD, EP = 12, 4, 2


class Model(nn.Module):
    def __init__(self, group: EPGroup, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.moe = MoE(CONFIG, group, seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.linear(x)).y.square().mean()


def batch() -> Tensor:
    return torch.randn(WORLD * TOKENS, 16, generator=torch.Generator().manual_seed(1))


def gradients(rank: int, wrapper: str) -> dict[str, Tensor]:
    """Whole dense gradients, and those of this rank's experts."""
    ep, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    same_experts, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    model = Model(EPGroup(ep), seed=rank // EP)  # the second group's experts are others until they are copied
    experts = {name: p for name, p in model.named_parameters() if not getattr(p, "allreduce", True)}
    for p in experts.values():
        dist.broadcast(p.data, group_src=0, group=same_experts)
    for p in model.parameters():
        if getattr(p, "allreduce", True):
            dist.broadcast(p.data, src=0)  # as DistributedDataParallel does, FSDP does not
    wrapped: nn.Module = model
    if wrapper == "DDP":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
        wrapped = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), ignored_params=set(experts.values()))
    wrapped(batch().chunk(WORLD)[rank]).backward()
    for p in experts.values():
        assert p.grad is not None
        dist.all_reduce(p.grad, group=same_experts)
        p.grad /= dist.get_world_size()
    found: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        found[name] = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
    return found


def made_on_meta(rank: int, ep_size: int) -> None:
    """Built without memory, sharded, given memory, filled: the weights of a layer that was built with them."""
    group = EPGroup() if ep_size > 1 else EPGroup.alone()
    with torch.device("meta"):
        model = Model(group)
    experts = {p for p in model.parameters() if not getattr(p, "allreduce", True)} if ep_size > 1 else set()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=experts)
    model.to_empty(device="cpu")
    model.moe.initialize(3)
    nn.init.zeros_(model.linear.weight)
    nn.init.ones_(model.linear.bias)
    for (name, got), wanted in zip(model.moe.named_parameters(), MoE(CONFIG, group, seed=3).parameters(), strict=True):
        assert isinstance(got, DTensor) == (ep_size == 1 or "experts" not in name)
        assert torch.equal(got.full_tensor() if isinstance(got, DTensor) else got, wanted), name
    model(batch()[:TOKENS]).backward()


@pytest.mark.parametrize("ep_size", [1, 2])
def test_sharded_weights_are_filled_alike(ranks: Callable[[int], RankPool], ep_size: int) -> None:
    ranks(2).run(made_on_meta, ep_size)


def experts_alone_sharded(rank: int) -> str:
    model = Model(EPGroup.alone())
    fully_shard(model.moe.experts, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="give fully_shard the layer or its block") as raised:
        model(batch()[:TOKENS])
    return str(raised.value)


def test_experts_of_one_rank_are_sharded_with_their_layer(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(2).run(experts_alone_sharded):
        assert message.startswith("experts.w1 is sharded while the layer computes")


class PerExpert(nn.Module):
    """Adds to each expert's weight: what somebody may train instead of it."""

    def __init__(self, weight: Tensor, marked: bool) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.ones(weight.shape[0], 1, 1))
        self.added.allreduce = not marked  # type: ignore[attr-defined]

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.added


def parametrized(rank: int, marked: bool) -> str:
    model = Model(EPGroup())
    register_parametrization(model.moe.experts, "w1", PerExpert(model.moe.experts.w1, marked))
    try:
        model(batch()[:TOKENS]).backward()
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("marked", [False, True])
def test_parameters_that_experts_are_given_must_be_marked(ranks: Callable[[int], RankPool], marked: bool) -> None:
    for message in ranks(2).run(parametrized, marked):
        assert ("experts.parametrizations.w1.0.added is managed as if" in message) != marked
        assert (message == "nothing") == marked


def experts_sharded_too(rank: int, around: str) -> str:
    model = Model(EPGroup())
    inner = {"all": model, "layer": model.moe, "experts": model.moe.experts}[around]
    fully_shard(inner, mesh=init_device_mesh("cpu", (2,)))
    try:
        model(batch()[:TOKENS])
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("around", ["all", "layer", "experts"])
def test_experts_that_fsdp_shards_are_found(ranks: Callable[[int], RankPool], around: str) -> None:
    for message in ranks(2).run(experts_sharded_too, around):
        assert "experts.w1 is managed as if it were the same on all ranks" in message


def experts_in_ddp(rank: int, over: str) -> str:
    """The error of the second forward; the first is not wrapped."""
    ep, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    same_experts, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    model = Model(EPGroup(ep))
    model(batch()[:TOKENS])
    wrapped = DistributedDataParallel(model, process_group=same_experts if over == "same experts" else None)
    try:
        for _ in range(2):
            wrapped(batch()[:TOKENS]).backward()
    except ValueError as error:
        return str(error)
    return "nothing"


def test_experts_that_ddp_manages_are_found(ranks: Callable[[int], RankPool]) -> None:
    for message in ranks(WORLD).run(experts_in_ddp, "all"):
        assert "DistributedDataParallel over ranks [0, 1, 2, 3] manages experts.w1, experts.w2" in message
        assert "build the model again" in message


def test_ddp_may_manage_experts_over_the_ranks_that_hold_the_same(ranks: Callable[[int], RankPool]) -> None:
    assert ranks(WORLD).run(experts_in_ddp, "same experts") == ["nothing"] * WORLD


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_gradients_are_those_of_the_whole_batch(ranks: Callable[[int], RankPool], wrapper: str) -> None:
    alone = Model(EPGroup.alone())
    alone(batch()).backward()
    for rank, found in enumerate(ranks(WORLD).run(gradients, wrapper)):
        for name, p in alone.named_parameters():
            assert p.grad is not None
            wanted = p.grad.chunk(EP)[rank % EP] if ".experts." in name else p.grad
            assert_near(found[name], wanted, share=1e-5, msg=lambda text, name=name: f"{name}: {text}")
