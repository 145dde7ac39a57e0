"""torch.distributed.checkpoint alone, without sonic_ep.checkpoint: every expert, in every layout, and its moments."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, checkpoint, fsdp
from tests.helpers.launch import RankPool, run_ranks

Ranks = Callable[[int], RankPool]
CONFIG = MoEConfig(d=16, n=8, E=8, K=2, bias=True, shared_n=8, init_std=0.3, rounding=RoundingConfig(mode="off"))
WORLD, TOKENS = 4, 6


class Model(nn.Module):
    def __init__(self, group: EPGroup, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(16, 16)
        self.moe = MoE(CONFIG, group, seed=seed)

    def forward(self, x_TH: Tensor) -> Tensor:
        return (self.linear(x_TH) + self.moe(x_TH).y).square().mean()


class Run:
    """A model and its optimizer on this rank. sharded: whether FSDP shards dense weights over all ranks, and experts
    over the ranks that hold the same ones."""

    def __init__(self, ep_size: int, *, sharded: bool = False, seed: int, of: "Run | None" = None) -> None:
        """of: another run of this layout, whose groups are used."""
        self.ep_size, self.sharded, world = ep_size, sharded, dist.get_world_size() if dist.is_initialized() else 1
        self.same_experts: Any = None
        if world == 1:
            self.group = EPGroup.alone()
        elif of is not None:
            self.group, self.same_experts = of.group, of.same_experts
        else:
            table = torch.arange(world).view(-1, ep_size)
            ep, _ = dist.new_subgroups_by_enumeration(table.tolist())
            self.same_experts, _ = dist.new_subgroups_by_enumeration(table.t().tolist())
            self.group = EPGroup(ep)
        self.model = Model(self.group, seed)
        if sharded:
            mesh, expert_mesh = init_device_mesh("cpu", (world,)), DeviceMesh.from_group(self.same_experts, "cpu")
            fsdp.fully_shard(self.model, mesh=mesh, expert_mesh=expert_mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 * (seed + 1))

    def another(self) -> "Run":
        """A new run with other weights."""
        return Run(self.ep_size, sharded=self.sharded, seed=7, of=self)

    def train(self, *steps: int) -> list[float]:
        """The losses of all tokens, by step."""
        losses = []
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for step in steps:
            batch = torch.randn(WORLD * TOKENS, 16, generator=torch.Generator().manual_seed(step))
            loss = self.model(batch.chunk(world)[rank])
            self.optimizer.zero_grad()
            loss.backward()
            if world > 1:
                self._average()
                loss = loss.detach() / world
                dist.all_reduce(loss)
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def _average(self) -> None:
        for parameter in self.model.parameters() if not self.sharded else ():
            assert parameter.grad is not None
            is_expert = not getattr(parameter, "allreduce", True)
            dist.all_reduce(parameter.grad, group=self.same_experts if is_expert else None)
            parameter.grad /= dist.get_world_size()

    def state(self, **options: Any) -> dict[str, Any]:
        model, wanted = self.model, StateDictOptions(**options)
        return {
            "model": get_model_state_dict(model, options=wanted),
            "optimizer": get_optimizer_state_dict(model, self.optimizer, options=wanted),
        }

    def load(self, state: dict[str, Any], **options: Any) -> None:
        set_model_state_dict(self.model, state["model"], options=StateDictOptions(**options))
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=StateDictOptions(**options))

    def fill(self, wanted: dict[str, Tensor]) -> None:
        """Sets all weights and moments to what `whole` returned, without any state dict."""
        self.train(0)  # so that there are moments
        self.optimizer.param_groups[0]["lr"] = 0.01
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                for key, value in {"": parameter, **self.optimizer.state[parameter]}.items():
                    full, experts = wanted[f"{name}.{key}"], self.model.moe.experts
                    if ".experts." in name and full.dim() > 0:
                        full = full[experts.first : experts.first + experts.num_local]
                    if isinstance(value, DTensor):
                        full = distribute_tensor(full, value.device_mesh, value.placements)
                    value.copy_(full)

    def whole(self) -> dict[str, Tensor]:
        """All weights and moments of all experts, gathered here."""
        found = {}
        for name, parameter in self.model.named_parameters():
            for key, value in {"": parameter, **self.optimizer.state[parameter]}.items():
                full = value.full_tensor() if isinstance(value, DTensor) else value
                if ".experts." in name and full.dim() > 0:
                    full = torch.cat(self.model.moe.group.all_gather_object(full.detach()))
                found[f"{name}.{key}"] = full.detach().clone()
        return found


LAYOUTS = {
    "alone": (1, {"ep_size": 1}),
    "EP 4": (4, {"ep_size": 4}),
    "EP 4, FSDP 1": (4, {"ep_size": 4, "sharded": True}),
    "EP 2, replicas": (4, {"ep_size": 2}),
    "EP 2, FSDP 2": (4, {"ep_size": 2, "sharded": True}),
    "EP 2": (2, {"ep_size": 2}),
}


def write(rank: int, layout: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """Two steps, a checkpoint in each form, and the losses of two more."""
    run = Run(**layout, seed=0)
    run.train(0, 1)
    dcp.save(run.state(flatten_optimizer_state_dict=True), checkpoint_id=f"{folder}/flat")
    dcp.save(run.state(), checkpoint_id=f"{folder}/nested")
    raw = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    dcp.save(raw, checkpoint_id=f"{folder}/raw")
    checkpoint.save(f"{folder}/sonic_ep", run.model, run.optimizer)
    return run.whole(), run.train(2, 3)


def read(
    rank: int, layout: dict[str, Any], folder: str, wanted: dict[str, Tensor]
) -> dict[str, tuple[dict[str, Tensor], list[float]]]:
    """What was read, and the losses of two steps after it, by form and reader; and where `wanted` was set by hand."""
    by_hand = Run(**layout, seed=7)
    by_hand.fill(wanted)
    found = {"by hand": (by_hand.whole(), by_hand.train(2, 3))}
    for form in ("flat", "nested", "sonic_ep"):
        run, options = by_hand.another(), {"flatten_optimizer_state_dict": form != "nested"}
        state = run.state(**options)
        dcp.load(state, checkpoint_id=f"{folder}/{form}")
        run.load(state, **options)
        found[f"{form} by torch"] = run.whole(), run.train(2, 3)
    run = by_hand.another()
    run.train(0)  # there are no moments to read into before
    raw = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    dcp.load(raw, checkpoint_id=f"{folder}/raw")
    run.model.load_state_dict(raw["model"])
    run.optimizer.load_state_dict(raw["optimizer"])
    found["raw by torch"] = run.whole(), run.train(2, 3)
    run = by_hand.another()
    checkpoint.load(f"{folder}/flat", run.model, run.optimizer)
    found["flat by sonic_ep"] = run.whole(), run.train(2, 3)
    return found


def on(layout: str, ranks: Ranks, worker: Callable[..., Any], *args: object) -> list[Any]:
    world, options = LAYOUTS[layout]
    if world == 1:
        return [worker(0, options, *args)]
    if "sharded" in options:  # torch caches meshes, whose groups a pool destroys
        return run_ranks(worker, world, options, *args)
    return ranks(world).run(worker, options, *args)


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to.*in a single process")
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("EP 4", "EP 4"),
        ("EP 4", "EP 2, FSDP 2"),
        ("EP 4", "alone"),
        ("EP 4, FSDP 1", "EP 2, FSDP 2"),
        ("EP 2, FSDP 2", "EP 2"),
        ("EP 2, replicas", "EP 4"),
        ("alone", "EP 2, replicas"),
    ],
)
def test_any_layout_reads_what_another_wrote(ranks: Ranks, tmp_path: Path, source: str, target: str) -> None:
    (wanted, losses), *_ = on(source, ranks, write, str(tmp_path))
    for by_form in on(target, ranks, read, str(tmp_path), wanted):
        after = by_form["by hand"][1]
        for form, (found, losses_after) in by_form.items():
            torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=lambda text, form=form: f"{form}: {text}")
            assert losses_after == after, form
        assert after == (losses if target == source else pytest.approx(losses, rel=1e-6))


def set_full(rank: int, layout: dict[str, Any]) -> list[tuple[list[str], str]]:
    """Without and with broadcast_from_rank0: which entries of a full state dict are not the whole ones, or are not once
    it is set in another run; and what setting it raises."""
    run, found = Run(**layout, seed=0), []
    run.train(0, 1)
    wanted = run.whole()
    for broadcast in (False, True):
        full = run.state(full_state_dict=True, cpu_offload=broadcast)
        assert bool(full["model"]) == (rank == 0 or not broadcast)
        differing = [key for key, value in full["model"].items() if not torch.equal(value, wanted[f"{key}."])]
        for name, of in full["optimizer"].get("state", {}).items():
            differing += [f"{name}.{key}" for key in of if not torch.equal(of[key], wanted[f"{name}.{key}"])]
        if broadcast and rank > 0:
            full = {"model": {}, "optimizer": {}}
        other, error = run.another(), ""
        try:
            other.load(full, full_state_dict=True, broadcast_from_rank0=broadcast)
        except RuntimeError as raised:
            error = str(raised)
        else:
            differing += [f"{name}, set" for name, each in other.whole().items() if not torch.equal(each, wanted[name])]
        found.append((differing, error))
    return found


@pytest.mark.parametrize("layout", ["EP 4", "EP 2, replicas", "EP 4, FSDP 1", "EP 2, FSDP 2"])
def test_full_state_dicts_hold_all_experts(ranks: Ranks, layout: str) -> None:
    for (differing, error), (of_broadcast, error_of_broadcast) in on(layout, ranks, set_full):
        assert differing == of_broadcast == []
        assert error == ""
        # torch fills FSDP's shards in place, and knows of no EP group.
        assert bool(error_of_broadcast) == ("FSDP" in layout), error_of_broadcast


def load_plainly(rank: int) -> None:
    """What load_state_dict takes besides DTensors, and what state_dict gives."""
    layer, alone = MoE(CONFIG, EPGroup(), seed=0), MoE(CONFIG, seed=5)
    local = {name: value.clone() for name, value in layer.state_dict(keep_vars=True).items()}
    assert local["experts.w1"].shape[0] == 4, "keep_vars gives the parameters"
    if rank == 0:  # no collective
        assert layer.state_dict()["experts.w1"].shape[0] == 8
    own = slice(4 * rank, 4 * rank + 4)
    for assign in (False, True):
        layer.load_state_dict(alone.state_dict(), assign=assign)
        assert torch.equal(layer.experts.w1, alone.experts.w1[own])
        assert layer.experts.w1.untyped_storage().nbytes() == 4 * layer.experts.w1.numel(), "it keeps all experts"
        assert not layer.experts.w1.allreduce  # type: ignore[attr-defined]
        layer.load_state_dict(local, assign=assign)
        assert torch.equal(layer.experts.w1, local["experts.w1"])
    other = MoE(CONFIG, EPGroup(), seed=6)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.experts.w1, local["experts.w1"])
    old = {**local, "experts._extra_state": torch.tensor([4, 4, 8])}  # of rank 1, as older versions wrote it
    assert _raised(lambda: other.load_state_dict(old), "experts 4..7 of 8, this rank has experts 0..3") == (rank == 0)


@pytest.mark.parametrize("held", [torch.tensor(3), torch.ones(3), torch.ones(2, 2), [1], "0 8 8", 7, b"", {"a": 1}])
@pytest.mark.parametrize("in_metadata", [False, True])
def test_what_does_not_say_whose_experts_there_are(held: object, in_metadata: bool) -> None:
    layer, state = MoE(CONFIG, seed=1), MoE(CONFIG, seed=0).state_dict()
    if in_metadata:
        state._metadata["experts"]["experts"] = held  # type: ignore[attr-defined]
    else:
        state["experts._extra_state"] = held  # type: ignore[assignment]
    before = layer.experts.w1.clone()
    with pytest.raises(RuntimeError, match=r"experts._extra_state or its metadata says .* wanted the first expert"):
        layer.load_state_dict(state)
    assert torch.equal(layer.experts.w1, before)


def _raised(action: Callable[[], object], text: str) -> bool:
    try:
        action()
    except (RuntimeError, ValueError) as error:
        assert text in str(error), error  # noqa: PT017
        return True
    return False


def test_plain_state_dicts(ranks: Ranks) -> None:
    ranks(2).run(load_plainly)


def load_of_others(rank: int) -> None:
    groups = [dist.new_group([start, start + 1]) for start in (0, 2)]
    of_four, of_two = MoE(CONFIG, EPGroup(), seed=0), MoE(CONFIG, EPGroup(groups[rank // 2]), seed=1)
    before = of_two.experts.w1.clone()
    assert _raised(lambda: of_two.load_state_dict(of_four.state_dict()), "full_state_dict=True")
    assert torch.equal(of_two.experts.w1, before)


def test_dtensors_of_other_ranks_are_refused_on_every_rank(ranks: Ranks) -> None:
    ranks(4).run(load_of_others)


def load_file(rank: int, folder: str) -> None:
    """In processes that did not write it."""
    layer = MoE(CONFIG, EPGroup(), seed=9)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=True))
    optimizer.load_state_dict(torch.load(f"{folder}/{rank}.optimizer.pt", weights_only=True))
    assert torch.equal(layer.experts.w1, torch.load(f"{folder}/{rank}.w1.pt", weights_only=True))
    wanted = torch.load(f"{folder}/{rank}.exp_avg.pt", weights_only=True)
    assert torch.equal(optimizer.state[layer.experts.w1]["exp_avg"], wanted)
    assert type(optimizer.state[layer.experts.w1]["exp_avg"]) is Tensor
    another = torch.load(f"{folder}/{1 - rank}.pt", weights_only=True)
    assert _raised(lambda: layer.load_state_dict(another), "load on each rank what the same rank saved")


def save_file(rank: int, folder: str) -> None:
    layer = MoE(CONFIG, EPGroup(), seed=0)
    optimizer = torch.optim.AdamW(layer.parameters())
    for parameter in layer.parameters():
        parameter.grad = parameter.detach() + 1
    optimizer.step()
    torch.save(layer.state_dict(), f"{folder}/{rank}.pt")
    torch.save(optimizer.state_dict(), f"{folder}/{rank}.optimizer.pt")
    torch.save(layer.experts.w1.detach(), f"{folder}/{rank}.w1.pt")
    torch.save(optimizer.state[layer.experts.w1]["exp_avg"], f"{folder}/{rank}.exp_avg.pt")


def test_a_file_of_each_rank(tmp_path: Path) -> None:
    run_ranks(save_file, 2, str(tmp_path))
    run_ranks(load_file, 2, str(tmp_path))


def sharded_along(rank: int, folder: str, dim: int) -> list[str]:
    """What differs after a checkpoint of experts that FSDP shards along another dimension, or unevenly."""
    table = torch.arange(4).view(2, 2)
    ep, _ = dist.new_subgroups_by_enumeration(table.tolist())
    same_experts, _ = dist.new_subgroups_by_enumeration(table.t().tolist())
    meshes = {"mesh": init_device_mesh("cpu", (4,)), "expert_mesh": DeviceMesh.from_group(same_experts, "cpu")}
    layers = [nn.Sequential(MoE(CONFIG.replace(E=6), EPGroup(ep), seed=seed)) for seed in (0, 1)]
    wanted = {name: value.clone() for name, value in layers[0].named_parameters() if ".experts." in name}
    for layer in layers:
        fsdp.fully_shard(
            layer, **meshes, shard_placement_fn=lambda p: Shard(dim if p.dim() == 3 and p.shape[0] == 3 else 0)
        )
    dcp.save(get_model_state_dict(layers[0]), checkpoint_id=folder)
    state = get_model_state_dict(layers[1])
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(layers[1], state)
    assert wanted
    values = {name: value for name, value in layers[1].named_parameters() if name in wanted}
    found = {name: value.full_tensor() for name, value in values.items() if isinstance(value, DTensor)}
    assert found.keys() == wanted.keys()
    alone = MoE(CONFIG.replace(E=6), seed=0)
    whole = get_model_state_dict(layers[1], options=StateDictOptions(full_state_dict=True))
    differing = [name for name, value in found.items() if not torch.equal(value, wanted[name])]
    return differing + [
        name for name, value in alone.state_dict().items() if not torch.equal(whole[f"0.{name}"], value)
    ]


@pytest.mark.parametrize("dim", [0, 1])
def test_other_shards_of_fsdp(tmp_path: Path, dim: int) -> None:
    assert run_ranks(sharded_along, 4, str(tmp_path), dim) == [[]] * 4


def from_meta(rank: int) -> None:
    wanted = MoE(CONFIG, seed=0)
    layer = MoE(CONFIG, EPGroup(), seed=1, device="meta")
    full = wanted.state_dict() if rank == 0 else {}
    set_model_state_dict(layer, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert torch.equal(layer.experts.w1, wanted.experts.w1[4 * rank : 4 * rank + 4])
    assert layer(torch.randn(3, 16)).y.shape == (3, 16)


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated")
@pytest.mark.filterwarnings("ignore:Multiple backends are registered")
def test_a_model_on_meta_takes_what_rank_0_has(ranks: Ranks) -> None:
    ranks(2).run(from_meta)


def saved_meanwhile(rank: int, folder: str) -> None:
    layer, other = MoE(CONFIG, EPGroup(), seed=0), MoE(CONFIG, EPGroup(), seed=1)
    cast(Any, dcp.async_save(get_model_state_dict(layer), checkpoint_id=folder)).result()
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    assert torch.equal(layer.experts.w1, other.experts.w1)
    average = torch.optim.swa_utils.AveragedModel(layer)
    assert average.state_dict()["module.experts.w1"].shape[0] == 8
    dcp.save(get_model_state_dict(average), checkpoint_id=f"{folder}/average")


def test_asynchronous_saves_and_averages(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(saved_meanwhile, str(tmp_path))


def on_gpus(rank: int, folder: str) -> list[str]:
    """What differs after experts without FSDP were written and read into experts with it, and a full state dict set."""
    alone, _ = dist.new_subgroups_by_enumeration([[each] for each in range(dist.get_world_size())])
    mesh, expert_mesh = init_device_mesh("cuda", (dist.get_world_size(),)), DeviceMesh.from_group(alone, "cuda")
    models = [nn.Sequential(MoE(CONFIG, EPGroup(), seed=seed, device="cuda")) for seed in range(3)]
    fsdp.fully_shard(models[1], mesh=mesh, expert_mesh=expert_mesh)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    for parameter in models[0].parameters():
        parameter.grad = parameter.detach() + 1
    optimizers[0].step()

    def state(i: int, **options: bool) -> dict[str, Any]:
        wanted = StateDictOptions(**options)
        return {
            "model": get_model_state_dict(models[i], options=wanted),
            "optimizer": get_optimizer_state_dict(models[i], optimizers[i], options=wanted),
        }

    dcp.save(state(0), checkpoint_id=folder)
    loaded = state(1)
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(models[1], loaded["model"])
    set_optimizer_state_dict(models[1], optimizers[1], loaded["optimizer"])
    full = state(1, full_state_dict=True, cpu_offload=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(models[2], full["model"], options=options)
    set_optimizer_state_dict(models[2], optimizers[2], full["optimizer"], options=options)
    found = []
    for i in range(3):
        values = {}
        for name, parameter in models[i].named_parameters():
            for key, value in {"": parameter, **optimizers[i].state[parameter]}.items():
                values[f"{i} {name}.{key}"] = value.full_tensor() if isinstance(value, DTensor) else value.detach()
        found.append(values)
    wanted = [*found[0].values()]
    assert any(value.abs().sum() > 0 for name, value in found[0].items() if name.endswith("w1.exp_avg"))
    return [
        name
        for values in found[1:]
        for (name, value), each in zip(values.items(), wanted, strict=True)
        if not torch.equal(value, each)
    ]


@pytest.mark.gpu
def test_on_gpus(gpus: Callable[[int], RankPool], tmp_path: Path) -> None:
    assert gpus(2).run(on_gpus, str(tmp_path)) == [[], []]
