"""Misuse on one rank, or on all: every rank raises the same error, in words of ours, and the layer works as before."""

import random
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig, Routing, TransportConfig, checkpoint
from tests.fuzz.configurations import random_config
from tests.helpers.launch import RankPool

# Of a watchdog: how long an error may take to be on every rank.
TIMEOUT = 60.0
ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(str(ROOT / folder) + "/" for folder in ("sonic_ep", "kernels", "dispatch", "routers"))


class Setting(NamedTuple):
    """What goes wrong, and with what. folder: of this case; it holds a checkpoint of the layer."""

    layer: MoE
    x: Tensor
    folder: Path
    seed: str

    @property
    def config(self) -> MoEConfig:
        return self.layer.config

    def step(self) -> list[Tensor]:
        """A training step, to the bit."""
        torch.manual_seed(5)
        self.layer.zero_grad()
        y, aux, _ = self.layer(self.x)
        (y.double().square().sum() + aux).backward()
        return [y.detach(), aux.detach(), *(p.grad.clone() for p in self.layer.parameters() if p.grad is not None)]


Action = Callable[[Setting], object]


class Kind(NamedTuple):
    """Mistakes of one kind. good: what the other ranks do. everywhere: whether it is one on all ranks alike, too.
    lenient: some may be none, if all ranks find so."""

    good: Action
    mistakes: dict[str, Action]
    everywhere: bool = True
    lenient: bool = False


def _forward(setting: Setting) -> object:
    return setting.layer(setting.x)


def _as_inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


INPUTS: dict[str, Callable[[Tensor], object]] = {
    "width": lambda x: x[..., :-1],
    "wider": lambda x: torch.cat([x, x], -1),
    "one dimension": lambda x: x.flatten(),
    "no dimension": lambda x: x.sum(),
    "four dimensions": lambda x: x[None, None],
    "float64": lambda x: x.double(),
    "half": lambda x: x.half(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "integers": lambda x: x.long(),
    "bool": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "meta": lambda x: x.to("meta"),
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "nothing": lambda x: None,
    "tuple": lambda x: (x,),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.flatten(0, -2).to_sparse_csr(),
    "nested": lambda x: torch.nested.as_nested_tensor([x], layout=torch.jagged),
    "strided nested": lambda x: torch.nested.nested_tensor([x]),
    "inference": _as_inference,
    "DTensor": lambda x: DTensor.from_local(
        x, DeviceMesh("cpu", [dist.get_rank()], _init_backend=False), [Replicate()], run_check=False
    ),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "masked": lambda x: torch.masked.masked_tensor(x, x > 0),
    "lazy": lambda x: torch.nn.UninitializedParameter(),
    "functional": torch._to_functional_tensor,
    "unsigned": lambda x: x.to(torch.uint32),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


def _input(change: Callable[[Tensor], Any]) -> Action:
    def act(setting: Setting) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about beta states of layouts
            x = change(setting.x)
        return setting.layer(x)

    return act


def _ids(setting: Setting) -> Tensor:
    """K distinct experts of each token."""
    shape, c = setting.x.shape[:-1], setting.config
    starts = torch.arange(shape.numel()).view(*shape, 1)
    return (starts + torch.arange(c.K)) % c.E


GIVEN: dict[str, Callable[[Tensor, MoEConfig], object]] = {
    "range": lambda ids, c: ids + c.E,
    "below": lambda ids, c: ids - c.E - 1,
    "part": lambda ids, c: torch.cat([ids[..., :-1], ids[..., :1] * 0 - 1], -1) if c.K > 1 else ids - 2 * c.E,
    "twice": lambda ids, c: ids[..., :1].expand(ids.shape) if c.K > 1 else ids + c.E,
    "width": lambda ids, c: ids.repeat(*[1] * (ids.dim() - 1), 2),
    "fewer": lambda ids, c: ids[:-1],
    "one dimension": lambda ids, c: ids.flatten() if c.K > 1 else ids.flatten()[:-1],
    "floats": lambda ids, c: ids.float(),
    "bool": lambda ids, c: ids > 0,
    "unsigned": lambda ids, c: ids.to(torch.uint32),
    "list": lambda ids, c: ids.tolist(),
    "numpy": lambda ids, c: ids.numpy(),
    "meta": lambda ids, c: ids.to("meta"),
    "sparse": lambda ids, c: ids.to_sparse(),
    "nested": lambda ids, c: torch.nested.as_nested_tensor([ids], layout=torch.jagged),
    "fake": lambda ids, c: FakeTensorMode().from_tensor(ids),
}
MASKS: dict[str, Callable[[Tensor], object]] = {
    "integers": lambda mask: mask.long(),
    "fewer": lambda mask: mask[:-1],
    "wider": lambda mask: mask[..., None],
    "list": lambda mask: mask.tolist(),
    "meta": lambda mask: mask.to("meta"),
}


def _replay(setting: Setting) -> object:
    return setting.layer(setting.x, routed_experts=_ids(setting))


def _given_experts(change: Callable[[Tensor, MoEConfig], Any]) -> Action:
    return lambda setting: setting.layer(setting.x, routed_experts=change(_ids(setting), setting.config))


def _with_mask(change: Callable[[Tensor], Any]) -> Action:
    def act(setting: Setting) -> object:
        mask = torch.arange(setting.x[..., 0].numel()).view(setting.x.shape[:-1]) % 3 == 1
        return setting.layer(setting.x, padding_mask=change(mask))

    return act


def _input_and_ids(change: Callable[[Tensor], Any]) -> Action:
    def act(setting: Setting) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = change(setting.x)
        return setting.layer(x, routed_experts=_ids(setting))

    return act


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "fewer": lambda w: w[:-1].clone(),
    "more": lambda w: torch.cat([w, w]),
    "empty": lambda w: w.new_empty(0),
    "flat": lambda w: w.flatten(),
    "narrow": lambda w: w[..., :-1].clone(),
    "strides": lambda w: w.transpose(0, -1).contiguous().transpose(0, -1),
    "float64": lambda w: w.double(),
    "meta": lambda w: w.to("meta"),
}


def _holders(layer: MoE) -> dict[str, tuple[torch.nn.Module, str, Tensor]]:
    """Module, attribute and tensor of every parameter, and of the bias of experts, by name."""
    tensors = {**dict(layer.named_parameters()), **{f"router.{n}": b for n, b in layer.router.named_buffers()}}
    parts = {name: name.rpartition(".") for name in tensors}
    return {name: (layer.get_submodule(parts[name][0]), parts[name][2], value) for name, value in tensors.items()}


def _weights(change: Callable[[Tensor], Tensor]) -> Action:
    def act(setting: Setting) -> object:
        holders = _holders(setting.layer)
        holder, name, value = holders[random.Random(setting.seed).choice([*holders])]
        changed = change(value.data)
        if isinstance(value, torch.nn.Parameter):
            changed = torch.nn.Parameter(changed)
            changed.allreduce = getattr(value, "allreduce", True)  # type: ignore[attr-defined]
        setattr(holder, name, changed)
        return setting.layer(setting.x)

    return act


def _in_mode(context: Callable[[], Any]) -> Action:
    def act(setting: Setting) -> object:
        with context():
            return setting.layer(setting.x)

    return act


def _called(change: Callable[[MoE], MoE]) -> Action:
    return lambda setting: change(setting.layer)(setting.x)


def _two(*order: int) -> Action:
    """Two layers, called in this order."""

    def act(setting: Setting) -> object:
        layers = setting.layer, MoE(setting.config, EPGroup(), seed=0)
        return [layers[number](setting.x) for number in order]

    return act


def _two_steps(*order: int) -> Action:
    """Two forwards that route alike, their backwards in this order, and another forward."""

    def act(setting: Setting) -> object:
        sums = []
        for _ in range(2):
            torch.manual_seed(5)
            sums.append(setting.layer(setting.x).y.sum())
        for number in order:
            sums[number].backward()
        return setting.layer(setting.x)

    return act


def _two_sizes(*order: int) -> Action:
    """Two layers of other sizes, called in this order."""

    def act(setting: Setting) -> object:
        E = 2 * setting.config.E
        layers = setting.layer, MoE(MoEConfig(d=setting.config.d, n=8, E=E, K=2), EPGroup(), seed=0)
        return [layers[number](setting.x) for number in order]

    return act


def _step(setting: Setting) -> object:
    return setting.layer(setting.x).y.sum().backward()


# What only one rank of several can do wrong, by the action of the others.
MODES: dict[str, Action] = {
    "eval": _called(lambda layer: layer.eval()),
    "no_grad": _in_mode(torch.no_grad),
    "inference": _in_mode(torch.inference_mode),
    "frozen": _called(lambda layer: layer.requires_grad_(False)),
    "autocast": _in_mode(lambda: torch.autocast("cpu", torch.bfloat16)),
    "half": _called(lambda layer: layer.half()),
    "double": _called(lambda layer: layer.double()),
    "vmap": lambda s: torch.func.vmap(lambda x: s.layer(x).y)(s.x[None]),
    "grad": lambda s: torch.func.grad(lambda x: s.layer(x).y.sum())(s.x),
}


def _built(**changes: Any) -> Action:
    def act(setting: Setting) -> object:
        return MoE(**{"config": setting.config, "group": EPGroup(), "seed": 0, **changes})

    return act


WRONG_ARGUMENTS: list[tuple[str, object]] = [
    *(
        ("config", {"d": 8}),
        ("config", None),
        ("seed", "7"),
        ("seed", 0.5),
        ("device", "nowhere"),
        ("device", "cuda:77"),
    ),
    *(("device", 1.5), ("dtype", "float32"), ("dtype", torch.int64), ("dtype", torch.float8_e5m2)),
]
BUILDS = {f"{name}={value}": _built(**{name: value}) for name, value in WRONG_ARGUMENTS}
BUILD_DIFFERENCES: dict[str, Action] = {
    "another size": lambda s: MoE(s.config.replace(d=s.config.d + 1), EPGroup(), seed=0),
    "another seed": _built(seed=1),
    "no seed": _built(seed=None),
    "another dtype": _built(dtype=torch.float64),
    "indivisible": lambda s: MoE(MoEConfig(d=8, n=4, E=13, K=2), EPGroup(), seed=0),
}


def _pairs(**changes: Any) -> Action:
    def act(setting: Setting) -> object:
        good = {"token_ids_N": torch.tensor([0, 1]), "expert_ids_N": torch.tensor([0, 0]), "weights_N": torch.ones(2)}
        return Routing.from_pairs(**{**good, "num_tokens": 2, "E": setting.config.E, "group": EPGroup(), **changes})

    return act


ON_META = {"token_ids_N": torch.int64, "expert_ids_N": torch.int64, "weights_N": torch.float32}
WRONG_PAIRS: list[tuple[str, object]] = [
    *(("token_ids_N", torch.tensor(ids)) for ids in ([-1, 0], [0, 2], [0, 0], [True, False], [[0, 1]])),
    *(("token_ids_N", [0, 1]), ("expert_ids_N", torch.tensor([0, 2**40])), ("expert_ids_N", torch.zeros(2))),
    *(("weights_N", torch.ones(3)), ("weights_N", torch.ones(2, dtype=torch.int64)), ("num_tokens", 2.0), ("E", 0)),
    *(("expert_ids_N", torch.tensor([0, 0]).to(dtype)) for dtype in (torch.uint16, torch.uint32, torch.uint64)),
    *(("token_ids_N", torch.tensor([0, 1]).to(dtype)) for dtype in (torch.uint64, torch.complex64)),
    ("weights_N", torch.ones(2).to(torch.float8_e5m2)),
    *(("weights_N", torch.ones(2, device="meta")), ("weights_N", torch.ones(2).to_sparse())),
]
PAIRS = {f"{name}={value}": _pairs(**{name: value}) for name, value in WRONG_PAIRS}
PAIRS["all on meta"] = _pairs(**{name: torch.zeros(2, dtype=dtype, device="meta") for name, dtype in ON_META.items()})


def _save(setting: Setting, *arguments: Any, **named: Any) -> object:
    return checkpoint.save(setting.folder / "new", *(arguments or (setting.layer,)), **named)


def _masked(setting: Setting) -> object:
    """A buffer beside the experts that has not a row for each of them."""
    setting.layer.experts.register_buffer("mask", torch.ones(setting.layer.experts.num_local + 1))
    return _save(setting)


def _other_optimizer() -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(3))])


SAVE_DIFFERENCES: dict[str, Action] = {
    "mask": _masked,
    "another model": lambda s: _save(s, torch.nn.Linear(2, 2)),
    "another folder": lambda s: checkpoint.save(s.folder / "elsewhere", s.layer),
}
SAVES: dict[str, Action] = {
    "no plain value": lambda s: _save(s, extra={"what": object()}),
    "extra of text": lambda s: _save(s, extra="step"),
    "no model": lambda s: _save(s, None),
    "another's optimizer": lambda s: _save(s, s.layer, _other_optimizer()),
    "folder": lambda s: checkpoint.save(3.5, s.layer),  # type: ignore[arg-type]
    "folder below a file": lambda s: checkpoint.save(s.folder / "checksums.json" / "more", s.layer),
}
LOADS: dict[str, Action] = {
    "nowhere": lambda s: checkpoint.load(s.folder / "nowhere", s.layer),
    "a file": lambda s: checkpoint.load(s.folder / "checksums.json", s.layer),
    "folder": lambda s: checkpoint.load(3.5, s.layer),  # type: ignore[arg-type]
    "extra": lambda s: checkpoint.load(s.folder, s.layer, extra={"step": 0}),
    "optimizer": lambda s: checkpoint.load(s.folder, s.layer, torch.optim.Adam(s.layer.parameters())),
    "another's optimizer": lambda s: checkpoint.load(s.folder, s.layer, _other_optimizer()),
    "model": lambda s: checkpoint.load(s.folder, torch.nn.Linear(2, 2)),
    "no model": lambda s: checkpoint.load(s.folder, None),  # type: ignore[arg-type]
}
# What one rank is in while the others are in something else.
CALLS: dict[str, Action] = {
    "a forward": _forward,
    "another layer": _two_sizes(1),
    "a construction": _built(),
    "pairs": _pairs(),
    "a save": _save,
    "a load": lambda s: checkpoint.load(s.folder, s.layer),
    "a sum": lambda s: EPGroup().all_reduce(torch.ones(3)),
    "a report": lambda s: EPGroup().raise_together(None),
}


def _others(name: str) -> dict[str, Action]:
    return {f"not {name} but {other}": action for other, action in CALLS.items() if other != name}


def _after_forward(action: Action) -> Action:
    return lambda setting: (_forward(setting), action(setting))


HOSTILE: list[Any] = [
    *(1e300, 1e10, 1e-300),
    *(None, True, -1, 0, 2**70, 10**400, 0.5, -0.5, float("nan"), float("inf"), "8", b"x", [], [1], {}, (), object()),
    *(torch.tensor([1, 2]), numpy.ones(2), numpy.float32(2), numpy.int64(3), 1j, RouterConfig, RoundingConfig(), int),
]
SMALL = {"d": 8, "n": 4, "E": 8, "K": 2}


def _hostile(setting: Setting) -> object:
    """Some field with a value from HOSTILE: refused, or else built and run."""
    rng, parts = random.Random(setting.seed), {"router": RouterConfig, "rounding": RoundingConfig}
    part, made = rng.choice([("", MoEConfig), *parts.items(), ("transport", TransportConfig)])
    name, value = rng.choice([f.name for f in fields(made)]), rng.choice(HOSTILE)
    if part:
        config = MoEConfig(**{**SMALL, part: made(**{name: value})})  # type: ignore[arg-type]
    else:
        config = MoEConfig(**{**SMALL, name: value})
    if max(config.d, config.n, config.shared_n) > 2**20:  # more than there is memory for, and so no mistake of ours
        return None
    shape = (1, 12, config.d) if config.router.balance == "sequence" else (12, config.d)
    return MoE(config, EPGroup(), seed=0)(torch.randn(shape))


KINDS = {
    "input": Kind(_forward, {name: _input(change) for name, change in INPUTS.items()}),
    "input with experts": Kind(_replay, {name: _input_and_ids(change) for name, change in INPUTS.items()}),
    "given experts": Kind(_replay, {name: _given_experts(change) for name, change in GIVEN.items()}),
    "given experts that differ": Kind(_replay, {"none": _forward}, everywhere=False),
    "padding": Kind(_forward, {name: _with_mask(change) for name, change in MASKS.items()}),
    "weights": Kind(_forward, {name: _weights(change) for name, change in CHANGES.items()}, lenient=True),
    "mode": Kind(_forward, MODES, everywhere=False),
    "order": Kind(_two(0, 1), {"crossed": _two(1, 0)}, everywhere=False),
    "order of backwards": Kind(_two_steps(0, 1), {"crossed": _two_steps(1, 0)}, everywhere=False),
    "sizes": Kind(_two_sizes(0, 1), {"crossed": _two_sizes(1, 0)}, everywhere=False),
    **{f"in {name}": Kind(action, _others(name), everywhere=False) for name, action in CALLS.items()},
    "in a backward": Kind(
        _step, {name: _after_forward(action) for name, action in _others("a backward").items()}, everywhere=False
    ),
    "build": Kind(_built(), BUILDS),
    "builds that differ": Kind(_built(), BUILD_DIFFERENCES, everywhere=False),
    "pairs": Kind(_pairs(), PAIRS),
    "pairs that differ": Kind(_pairs(), {"another E": _pairs(E=4096 * 3)}, everywhere=False),
    "save": Kind(_save, SAVES),
    "saves that differ": Kind(_save, SAVE_DIFFERENCES, everywhere=False),
    "load": Kind(lambda s: checkpoint.load(s.folder, s.layer), LOADS),
    "config": Kind(_hostile, {"hostile": _hostile}, lenient=True),
}
ALL = [*((kind, name) for kind, of_kind in KINDS.items() for name in of_kind.mistakes), *[("config", "hostile")] * 20]


class Outcome(NamedTuple):
    """error: the type and the text of what a rank raised, or None. ours: whether it is in words of ours. restored:
    whether a step is as before, to the bit."""

    error: tuple[str, str] | None
    ours: bool
    restored: bool


def in_words_of_ours(error: BaseException) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(OURS) and (last.line or "").startswith("raise")


def _setting(seed: str, folder: str) -> Setting:
    group, rng = EPGroup(), random.Random(seed)
    config = random_config(rng, group.size)
    generator = torch.Generator().manual_seed(group.rank)
    shape = (2, 6) if config.router.balance == "sequence" else (12,)
    x = torch.randn(*shape, config.d, generator=generator)
    return Setting(MoE(config, group, seed=0), x, Path(folder), seed)


def misuse(rank: int, seed: str, folder: str, kind: str, name: str, bad_rank: int | None) -> Outcome:
    """bad_rank: who makes the mistake; None for all. A worker."""
    setting = _setting(seed, folder)
    layer, before = setting.layer, setting.step()
    if kind in ("save", "load") or kind.startswith("in "):
        checkpoint.save(folder, layer)
    saved = [(*holder, holder[-1].data) for holder in _holders(layer).values()]
    outcome = Outcome(None, True, True)
    try:
        (KINDS[kind].mistakes[name] if bad_rank in (rank, None) else KINDS[kind].good)(setting)
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is none of Exception
        outcome = Outcome((type(error).__name__, str(error)), in_words_of_ours(error), True)
    layer.experts._buffers.pop("mask", None)
    for holder, attribute, value, data in saved:
        setattr(holder, attribute, value)
        value.data = data
    layer.train().requires_grad_(True)
    after = setting.step()
    return outcome._replace(restored=len(after) == len(before) and all(map(torch.equal, before, after)))


def check(pool: RankPool, seed: int, number: int) -> None:
    """Raises AssertionError unless all ranks raise the same error of ours, and go on as before; RankError or
    RankTimeoutError if ranks fail or hang."""
    rng = random.Random(f"misuse {seed} {pool.world_size} {number}")
    alone = pool.world_size == 1
    cases = [each for each in ALL if not alone or (KINDS[each[0]].everywhere and each[0] != "weights")]
    kind, name = cases[number % len(cases)]
    bad_rank = None if alone or (KINDS[kind].everywhere and rng.random() < 0.3) else rng.randrange(pool.world_size)
    what = f"{kind}, {name}, on {'all ranks' if bad_rank is None else f'rank {bad_rank}'}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcomes = pool.run(misuse, str(rng.random()), folder, kind, name, bad_rank, timeout=TIMEOUT)
        except Exception as error:
            error.add_note(what)
            raise
    errors = [outcome.error for outcome in outcomes]
    shown = f"{what}: {errors}"
    assert all(outcome.restored for outcome in outcomes), f"a later step is not as before; {shown}"
    assert len({error and error[0] for error in errors}) == 1, f"not the same error on all ranks; {shown}"
    assert errors[0] is not None or KINDS[kind].lenient, f"no error; {shown}"
    assert errors[0] is None or errors[0][0] in ("ValueError", "TypeError", "OSError"), f"of another type; {shown}"
    assert all(outcome.ours for outcome in outcomes), f"not in words of ours; {shown}"
