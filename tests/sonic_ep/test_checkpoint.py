"""Checkpoints: written at one ep_size, read at another, exact in weights, optimizer state and extras."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from sonic_ep import EPGroup, MoE, MoEConfig, RouterConfig, checkpoint, fsdp
from tests.helpers.launch import RankPool, run_ranks

Ranks = Callable[[int], RankPool]
CONFIG = MoEConfig(d=8, n=4, E=8, K=2, bias=True, shared_n=4, router=RouterConfig(score="sigmoid", expert_bias=True))


class Model(nn.Module):
    """Two MoE layers, one nested, and a replicated layer around them."""

    def __init__(self, group: EPGroup, seed: int) -> None:
        super().__init__()
        self.first = MoE(CONFIG, group, seed=seed)
        self.rest = nn.ModuleDict({"second": MoE(CONFIG, group, seed=seed + 1)})
        self.out = nn.Linear(8, 8)


def ep_group(ep_size: int) -> EPGroup:
    """This rank's EP group of `ep_size` consecutive ranks of the world."""
    if ep_size == 1:
        return EPGroup.alone()
    groups = [dist.new_group(range(s, s + ep_size)) for s in range(0, dist.get_world_size(), ep_size)]
    return EPGroup(groups[dist.get_rank() // ep_size])


def make(group: EPGroup, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model(group, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def train_step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """A step whose gradients depend on each expert's global index alone."""
    for name, parameter in model.named_parameters():
        values = torch.arange(parameter[0].numel(), dtype=torch.float32).view(parameter.shape[1:])
        first = model.first.experts.first if ".experts." in name else 0
        index = torch.arange(first, first + parameter.shape[0]).view(-1, *[1] * (parameter.dim() - 1))
        parameter.grad = torch.sin(values + 10 * index + len(name))
    optimizer.step()
    for layer in (model.first, model.rest["second"]):
        assert isinstance(layer, MoE)
        assert layer.router.expert_bias is not None
        layer.router.expert_bias += torch.arange(8) / 8


def everything(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, buffers and moments, of experts those of this rank."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for parameter, state in optimizer.state.items():
        values.update({f"{names[parameter]}.{key}": value for key, value in state.items()})
    return {name: value.detach().clone() for name, value in values.items()}


def write(rank: int, folder: str, ep_size: int) -> None:
    model, optimizer = make(ep_group(ep_size), seed=5)
    for _ in range(3):
        train_step(model, optimizer)
    checkpoint.save(folder, model, optimizer, {"step": 3, "rng": torch.arange(4), f"own{rank}": rank})


def read(rank: int, folder: str, ep_size: int, own: bool) -> dict[str, object]:
    """Names that differ from three steps taken here without a checkpoint; then the extras."""
    group = ep_group(ep_size)
    model, optimizer = make(group, seed=77)
    extra = {"step": 0, "rng": torch.zeros(4, dtype=torch.int64), **({f"own{rank}": None} if own else {})}
    extra = checkpoint.load(folder, model, optimizer, extra)
    wanted, wanted_optimizer = make(group, seed=5)
    for _ in range(3):
        train_step(wanted, wanted_optimizer)
    got, reference = everything(model, optimizer), everything(wanted, wanted_optimizer)
    assert got.keys() == reference.keys()
    assert any(name.endswith("experts.w1.exp_avg") for name in got)
    for model_, optimizer_ in ((model, optimizer), (wanted, wanted_optimizer)):  # and they go on alike
        train_step(model_, optimizer_)
    after, reference_after = everything(model, optimizer), everything(wanted, wanted_optimizer)
    differing = [n for n in got if not torch.equal(got[n], reference[n])]
    differing += [f"{n} a step later" for n in after if not torch.equal(after[n], reference_after[n])]
    assert optimizer.param_groups[0]["lr"] == wanted_optimizer.param_groups[0]["lr"]
    return {"differing": differing, **extra}


@pytest.mark.parametrize(("written_at", "read_at"), [(4, 4), (4, 2), (4, 1), (2, 4), (1, 4), (1, 2)])
def test_any_ep_size_reads_any_checkpoint_exactly(ranks: Ranks, tmp_path: Path, written_at: int, read_at: int) -> None:
    pool = ranks(4)
    pool.run(write, str(tmp_path), written_at)
    for rank, found in enumerate(pool.run(read, str(tmp_path), read_at, True)):
        assert found["differing"] == []
        assert found["step"] == 3
        assert found[f"own{rank}"] == rank
        assert torch.equal(found["rng"], torch.arange(4))  # type: ignore[arg-type]


def sharded(seed: int) -> tuple[Model, torch.optim.Optimizer]:
    """As `make`, on 4 ranks with ep_size 2, the experts sharded once more by sonic_ep.fsdp."""
    table = torch.arange(4).view(2, 2)
    ep, _ = dist.new_subgroups_by_enumeration(table.tolist())
    same_experts, _ = dist.new_subgroups_by_enumeration(table.t().tolist())
    torch.manual_seed(seed)
    model = Model(EPGroup(ep), seed)
    mesh = init_device_mesh("cpu", (4,))
    fsdp.fully_shard(model, mesh=mesh, expert_mesh=DeviceMesh.from_group(same_experts, "cpu"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def whole(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights, buffers and moments; those of the local experts of an EP group."""
    values = everything(model, optimizer)
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in values.items()}


def write_sharded(rank: int, folder: str) -> dict[str, Tensor]:
    model, optimizer = sharded(5)
    for name, parameter in model.named_parameters():
        values = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape).sin()
        assert isinstance(parameter, DTensor)
        parameter.grad = distribute_tensor(
            values + (rank % 2 if ".experts." in name else 0), parameter.device_mesh, parameter.placements
        )
    optimizer.step()
    checkpoint.save(folder, model, optimizer)
    return whole(model, optimizer)


def read_sharded(rank: int, folder: str) -> dict[str, Tensor]:
    model, optimizer = sharded(77)
    checkpoint.load(folder, model, optimizer)
    return whole(model, optimizer)


def test_experts_that_fsdp_shards_too(tmp_path: Path) -> None:
    """Written so, read on one rank, written there, read so."""
    folders = [str(tmp_path / name) for name in ("sharded", "alone")]
    written = run_ranks(write_sharded, 4, folders[0])
    model, optimizer = make(EPGroup.alone(), seed=77)
    checkpoint.load(folders[0], model, optimizer)
    found = whole(model, optimizer)
    checkpoint.save(folders[1], model, optimizer)
    for rank, (before, after) in enumerate(zip(written, run_ranks(read_sharded, 4, folders[1]), strict=True)):
        assert before.keys() == after.keys() == found.keys()
        for name, value in found.items():
            is_local = ".experts." in name and value.dim() > 0
            wanted = value.chunk(2)[rank % 2] if is_local else value
            assert torch.equal(before[name], wanted), name
            assert torch.equal(after[name], wanted), name


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    """As a trainer wraps it whose data parallelism leaves experts alone."""
    match wrapper:
        case "DDP":
            experts = [
                name for name, parameter in model.named_parameters() if not getattr(parameter, "allreduce", True)
            ]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
            return DistributedDataParallel(model)
        case "compile":
            return torch.compile(model)  # type: ignore[return-value]
        case _:
            return model


def write_and_read_wrapped(rank: int, folder: str, written: str, read: str) -> list[str]:
    """What differs after a model of one wrapper was read into one of another."""
    model, optimizer = make(EPGroup(), seed=5)
    outer = wrapped(model, written)
    for _ in range(2):
        train_step(model, optimizer)
    checkpoint.save(folder, outer, optimizer)
    other, other_optimizer = make(EPGroup(), seed=77)
    checkpoint.load(folder, wrapped(other, read), other_optimizer)
    saved, loaded = everything(model, optimizer), everything(other, other_optimizer)
    assert any(name.endswith("experts.w1.exp_avg") for name in saved)
    return [name for name in saved if not torch.equal(saved[name], loaded[name])]


@pytest.mark.parametrize(
    ("written", "read"), [("DDP", "DDP"), ("compile", "compile"), ("DDP", "none"), ("none", "DDP")]
)
def test_what_wraps_a_model_leaves_no_trace(ranks: Ranks, tmp_path: Path, written: str, read: str) -> None:
    assert ranks(2).run(write_and_read_wrapped, str(tmp_path), written, read) == [[], []]


def write_and_read_with_dense_shards(rank: int, folder: str) -> tuple[list[str], str]:
    """What differs where FSDP2 shards what is dense; what is said where it shards experts too."""
    mesh = init_device_mesh("cpu", (2,))
    models = []
    for seed in (5, 77):
        model, _ = make(EPGroup(), seed)
        experts = {p for name, p in model.named_parameters() if ".experts." in name}
        fully_shard(model, mesh=mesh, ignored_params=experts)
        models.append((model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1), foreach=False)))
    (model, optimizer), (other, other_optimizer) = models
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    checkpoint.save(folder, model, optimizer)
    checkpoint.load(folder, other, other_optimizer)
    saved, loaded = (
        {name: value.to_local() if isinstance(value, DTensor) else value for name, value in everything(*each).items()}
        for each in ((model, optimizer), (other, other_optimizer))
    )
    differing = [name for name in saved if not torch.equal(saved[name], loaded[name])]
    whole, _ = make(EPGroup(), 5)
    fully_shard(whole, mesh=mesh)
    try:
        checkpoint.save(folder + "-not", whole)
    except ValueError as error:
        return differing, str(error)
    return differing, "nothing"


def test_fsdp_may_shard_what_is_dense(ranks: Ranks, tmp_path: Path) -> None:
    for differing, message in ranks(2).run(write_and_read_with_dense_shards, str(tmp_path / "dense")):
        assert differing == []
        assert "leave them out of fully_shard" in message


def test_one_process_without_torch_distributed_reads_four_ranks_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(write, str(tmp_path), 4)
    assert not dist.is_initialized()
    found = read(0, str(tmp_path), 1, own=False)
    assert found["differing"] == []


class Shared(nn.Module):
    """A layer under two names, and one that has its experts."""

    def __init__(self, group: EPGroup, seed: int) -> None:
        super().__init__()
        self.first = MoE(CONFIG, group, seed=seed)
        self.again = self.first
        self.other = MoE(CONFIG, group, seed=seed + 1)
        self.other.experts.w1, self.other.experts.w2 = self.first.experts.w1, self.first.experts.w2


def write_and_read_shared(rank: int, folder: str) -> list[str]:
    """What differs in weights and moments."""
    (model, optimizer), (other, other_optimizer) = (
        (made, torch.optim.AdamW(made.parameters())) for made in (Shared(EPGroup(), 5), Shared(EPGroup(), 77))
    )
    for parameter in model.parameters():
        parameter.grad = parameter + 1
    optimizer.step()
    checkpoint.save(folder, model, optimizer)
    checkpoint.load(folder, other, other_optimizer)
    saved, loaded = (
        {**m.state_dict(), **{f"{n}.exp_avg": o.state[p]["exp_avg"] for n, p in m.named_parameters()}}
        for m, o in ((model, optimizer), (other, other_optimizer))
    )
    assert "again.experts.w1" in saved
    return [name for name in saved if not torch.equal(saved[name], loaded[name])]


def test_layers_may_share_experts(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(write_and_read_shared, str(tmp_path)) == [[], []]


def masked(rank: int, folder: str, rows: int) -> str:
    """A buffer of each rank's own beside its experts, as torch's pruning adds one."""
    models = [Model(EPGroup(), 5) for _ in range(2)]
    for model, start in zip(models, (rank + 1.0, 0.0), strict=True):
        model.first.experts.register_buffer("mask", torch.full((rows, 1), start))
    try:
        checkpoint.save(folder, models[0])
    except ValueError as error:
        return str(error)
    checkpoint.load(folder, models[1])
    return str(models[1].first.experts.get_buffer("mask").unique().tolist())


def test_buffers_of_experts_are_each_ranks_own(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(masked, str(tmp_path / "fine"), 4) == ["[1.0]", "[2.0]"]
    for message in ranks(2).run(masked, str(tmp_path / "bad"), 3):
        assert "first.experts.mask has shape (3, 1), wanted a row for each of the 4 local experts" in message


def adafactor(rank: int, folder: str, ep_size: int, read: bool, bias: bool) -> dict[str, Tensor] | str:
    """Moments that have a row for every expert but not its shape, after two steps or read back."""
    torch.manual_seed(0)
    layer = MoE(CONFIG.replace(bias=bias), ep_group(ep_size), seed=77 if read else 5)
    optimizer = torch.optim.Adafactor(layer.parameters())
    first = layer.experts.first
    for _ in range(2):
        for parameter in layer.parameters():
            of_experts = not getattr(parameter, "allreduce", True)
            whole = torch.randn(CONFIG.E if of_experts else parameter.shape[0], *parameter.shape[1:])
            parameter.grad = whole[first : first + parameter.shape[0]] if of_experts else whole
        optimizer.step()
    if read:
        checkpoint.load(folder, layer, optimizer)
    else:
        try:
            checkpoint.save(folder, layer, optimizer)
        except ValueError as error:
            return str(error)
    return {f"{n}.{key}": value for n, p in layer.named_parameters() for key, value in optimizer.state[p].items()}


def test_moments_of_another_shape_are_each_experts_own(ranks: Ranks, tmp_path: Path) -> None:
    written = ranks(2).run(adafactor, str(tmp_path), 2, False, False)
    read = ranks(4).run(adafactor, str(tmp_path), 4, True, False)
    for key in ("row_var", "col_var"):
        of_two, of_four = (torch.cat([found[f"experts.w1.{key}"] for found in each]) for each in (written, read))
        assert of_two.shape[0] == CONFIG.E
        assert torch.equal(of_two, of_four)


def test_moments_of_a_ranks_experts_together_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for message in ranks(2).run(adafactor, str(tmp_path), 2, False, True):
        assert "the optimizer's col_var of experts.b1 (4, 8) has shape (1, 8)" in message
        assert "give these parameters another optimizer" in message


def test_another_shape_is_refused(tmp_path: Path) -> None:
    model, optimizer = make(EPGroup.alone(), seed=1)
    checkpoint.save(tmp_path, model, optimizer)
    model.out = nn.Linear(8, 9)
    with pytest.raises(ValueError, match=r"has out.weight of shape \(8, 8\), the model \(9, 8\)"):
        checkpoint.load(tmp_path, model)


def test_a_model_with_other_parts_is_refused(tmp_path: Path) -> None:
    """Both ways: what is read no weight of the file, and what is a weight without values."""
    with_shared, without = (MoE(CONFIG.replace(shared_n=n), seed=1) for n in (4, 0))
    checkpoint.save(tmp_path / "with", with_shared)
    checkpoint.save(tmp_path / "without", without)
    names = "shared.down.bias, shared.down.weight, shared.up.bias, shared.up.weight"
    with pytest.raises(ValueError, match=f"with also holds {names} of the model; .* build the model as it was then"):
        checkpoint.load(tmp_path / "with", without)
    with pytest.raises(ValueError, match=f"without lacks {names} of the model"):
        checkpoint.load(tmp_path / "without", with_shared)


def test_an_extra_value_that_is_not_there(tmp_path: Path) -> None:
    layer = MoE(CONFIG, seed=1)
    checkpoint.save(tmp_path, layer, extra={"step": 3, "seen": {"tokens": 5}})
    with pytest.raises(ValueError, match="lacks epoch of the extra; it has seen.tokens, step"):
        checkpoint.load(tmp_path, layer, extra={"epoch": 0})
    assert checkpoint.load(tmp_path, layer, extra={"step": 0}) == {"step": 3}


def load_the_state_of(rank: int, folder: str, saved_by: int) -> str:
    """The error of loading another rank's plain state dict; then this rank's own, and one without identity."""
    layer = MoE(CONFIG, EPGroup(), seed=1)
    torch.save(layer.state_dict(), f"{folder}/{rank}.pt")
    dist.barrier()
    states = [torch.load(f"{folder}/{other}.pt", weights_only=True) for other in (saved_by, rank)]
    other = MoE(CONFIG, EPGroup(), seed=2)
    before = other.experts.w1.clone()
    message = ""
    try:
        other.load_state_dict(states[0])
    except RuntimeError as error:
        message = str(error)
        assert torch.equal(before, other.experts.w1)
    other.load_state_dict(states[1])
    assert torch.equal(layer.experts.w1, other.experts.w1)
    assert not other.load_state_dict(dict(states[1])).missing_keys  # a plain dict does not say whose experts it holds
    return message


def test_a_rank_refuses_the_experts_of_another(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(load_the_state_of, str(tmp_path), 0)[0] == ""
    message = ranks(2).run(load_the_state_of, str(tmp_path), 0)[1]
    assert "experts holds experts 0..3 of 8, this rank has experts 4..7 of 8" in message
    assert "sonic_ep.checkpoint" in message
