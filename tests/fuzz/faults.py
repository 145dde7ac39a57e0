"""Faults: a rank that is killed, stopped or out of memory, a full disk, torn checkpoints.

Every remaining rank raises in time and names the rank, and what is loaded is what was saved, or nothing.
"""

import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sonic_ep import EPGroup, MoE, MoEConfig, TransportConfig, checkpoint
from tests.fuzz.misuse import in_words_of_ours
from tests.helpers.launch import RankPool, RankTimeoutError

# Seconds: after which a layer gives up on a rank that has stopped; until the others have raised; and until all
# processes have ended. A rank that is gone is noticed without waiting, on a busy machine too.
STOPPED, GONE = 5.0, 90.0
TIME_TO_RAISE, DEADLINE = 40.0, 150.0
TIMEOUT = 60.0


class AbortError(RuntimeError):
    """A process ended in another way than it should."""


class Fault(NamedTuple):
    """action: "kill", "stop", "raise" or "save", a kill while a checkpoint is written. victim: the rank. calls: how
    many collectives, or files of the checkpoint, come before. after: whether the collective runs first."""

    action: str
    victim: int
    calls: int
    after: bool


def _model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 8), layer := MoE(MoEConfig(d=8, n=4, E=8, K=2, bias=True), EPGroup(), seed=seed))
    with torch.no_grad():  # dense weights are equal on all ranks
        for value in model[0].parameters():
            value.fill_(0.1 * seed)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in (*model[0].parameters(), *layer.parameters()):
        parameter.grad = torch.full_like(parameter, float(seed))
    optimizer.step()
    return model, optimizer


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [value for of_one in optimizer.state.values() for value in of_one.values()]
    return [value.detach().clone() for value in (*model.parameters(), *moments)]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# --- a rank dies, stops or fails -------------------------------------------------------------------------------------


def _strike(fault: Fault, folder: Path) -> None:
    (folder / "struck").write_text(str(time.time()))
    if fault.action == "raise":
        raise MemoryError("no memory")
    os.kill(os.getpid(), signal.SIGSTOP if fault.action == "stop" else signal.SIGKILL)


def _striking(original: Callable[..., Any], counter: "itertools.count[int]", fault: Fault, folder: Path) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        now = next(counter) == fault.calls
        if now and not fault.after:
            _strike(fault, folder)
        result = original(*args, **kwargs)
        if now:
            _strike(fault, folder)
        return result

    return call


def _steps(rank: int, fault: Fault, folder: Path) -> None:
    transport = TransportConfig(timeout=STOPPED if fault.action == "stop" else GONE)
    layer = MoE(MoEConfig(d=8, n=4, E=8, K=2, transport=transport), EPGroup(), seed=1)
    layer(torch.randn(20, 8)).y.sum().backward()
    if rank == fault.victim:
        counter = itertools.count()
        for name in ("all_gather", "all_to_all"):
            patch.object(EPGroup, name, _striking(getattr(EPGroup, name), counter, fault, folder)).start()
    for _ in range(50):
        layer(torch.randn(20, 8, requires_grad=True)).y.sum().backward()


def _saves(rank: int, fault: Fault, folder: Path) -> None:
    """A checkpoint over another."""
    checkpoint.save(folder / "saved", *_model(1))
    counter, saved = itertools.count(), str(folder / "saved")

    def strike(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.remove") and str(args[0]).startswith(saved):
            if next(counter) == fault.calls:
                _strike(fault, folder)

    model = _model(2)
    if rank == fault.victim:
        sys.addaudithook(strike)
    checkpoint.save(folder / "saved", *model)


def live(rank: int, size: int, fault: Fault, folder: Path) -> None:
    """The life of a rank. It leaves what it raised, and when."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch, about a checkpoint over another
    store = dist.FileStore(str(folder / "store"), size)
    timeout = timedelta(seconds=STOPPED if fault.action == "stop" else GONE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    raised = ["nothing", ""]
    try:
        (_saves if fault.action == "save" else _steps)(rank, fault, folder)
    except BaseException as error:  # noqa: BLE001 - nothing else may end this process
        raised = [type(error).__name__, str(error)]
    (folder / f"raised-{rank}").write_text(json.dumps([*raised, time.time()]))


def strike_one(size: int, fault: Fault, folder: Path) -> None:
    """Raises RankTimeoutError if a rank that is left hangs, AbortError if its process dies, else AssertionError if it
    raises nothing or too late."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=live, args=(rank, size, fault, folder)) for rank in range(size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + DEADLINE
    expected = {rank: 0 for rank in range(size)}
    if fault.action == "stop":
        del expected[fault.victim]
    elif fault.action != "raise":
        expected[fault.victim] = -signal.SIGKILL
    for rank in expected:
        processes[rank].join(max(0.0, deadline - time.monotonic()))
    codes = {rank: processes[rank].exitcode for rank in expected}
    for process in processes:
        process.kill()
        process.join()
    if None in codes.values():
        raise RankTimeoutError(size, {rank: "" for rank, code in codes.items() if code is None}, DEADLINE)
    struck = (folder / "struck").exists()
    if codes != (expected if struck else dict.fromkeys(expected, 0)):
        raise AbortError(f"exit codes {codes}, expected {expected}")
    assert struck or fault.action == "save", "the fault did not happen"
    for rank in expected:
        if struck and (folder / f"raised-{rank}").exists():
            _check_raised(rank, fault, folder)


def _check_raised(rank: int, fault: Fault, folder: Path) -> None:
    kind, text, when = json.loads((folder / f"raised-{rank}").read_text())
    after = when - float((folder / "struck").read_text())
    # A checkpoint may be complete when its last file is closed, and the others may have ended.
    wanted = ("MemoryError",) if rank == fault.victim else ("LostRankError",)
    assert kind in wanted or (fault.action == "save" and kind == "nothing"), f"rank {rank} raised {kind}: {text}"
    if kind == "LostRankError":
        place = "checkpoint" if fault.action == "save" else ""
        assert text.startswith(f"rank {fault.victim} of the EP group did not come to {place}"), f"rank {rank}: {text}"
        assert fault.action == "save" or " of layer 1" in text, f"rank {rank}: {text}"
    assert after < TIME_TO_RAISE, f"rank {rank} raised after {after:.0f} s: {kind}: {text}"


# --- checkpoints -----------------------------------------------------------------------------------------------------


def load(rank: int, folder: Path) -> tuple[str, str]:
    """What a load into other weights does. A worker."""
    model, optimizer = _model(3)
    before = _state(model, optimizer)
    try:
        checkpoint.load(folder, model, optimizer)
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is none of Exception
        words = "" if in_words_of_ours(error) else "not in words of ours, "
        changed = "" if _same(before, _state(model, optimizer)) else "changed the model, "
        return f"{words}{changed}{type(error).__name__}", str(error)
    after, states = _state(model, optimizer), [_state(*_model(seed)) for seed in (1, 2)]  # on all ranks: a collective
    return next((f"state {seed}" for seed, state in enumerate(states, 1) if _same(after, state)), "another state"), ""


def save(rank: int, folder: Path, seed: int) -> None:
    """A worker."""
    checkpoint.save(folder, *_model(seed))


def _loads(pool: RankPool, folder: Path, what: str, allowed: set[str]) -> None:
    found = pool.run(load, folder, timeout=TIMEOUT)
    assert len({kind for kind, _ in found}) == 1, f"{what}: ranks differ: {found}"
    assert found[0][0] in allowed, f"{what}: {found}"


def save_with_limit(rank: int, folder: Path, ranks: list[int], limit: int) -> str:
    """What a save does where no file may grow beyond `limit`, as if the disk were full. A worker."""
    before, (model, optimizer) = resource.getrlimit(resource.RLIMIT_FSIZE), _model(2)
    if rank in ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        checkpoint.save(folder, model, optimizer)
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is none of Exception
        return (
            type(error).__name__
            if in_words_of_ours(error)
            else f"not in words of ours, {type(error).__name__}: {error}"
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "saved"


def disk_full(pool: RankPool, rng: random.Random, folder: Path) -> None:
    pool.run(save, folder / "saved", 1, timeout=TIMEOUT)
    ranks = rng.choice([[rng.randrange(pool.world_size)], [*range(pool.world_size)]])
    limit = rng.choice([0, 1, 100, 190, 1000, 10_000, 20_000, 30_000, 100_000, 150_000, 200_000])
    found = pool.run(save_with_limit, folder / "saved", ranks, limit, timeout=TIMEOUT)
    what = f"no file beyond {limit} bytes on ranks {ranks}"
    assert set(found) in ({"saved"}, {"OSError"}), f"{what}: {found}"
    _loads(pool, folder / "saved", what, {"state 2"} if "saved" in found else {"ValueError", "state 1", "state 2"})
    pool.run(save, folder / "saved", 2, timeout=TIMEOUT)
    _loads(pool, folder / "saved", f"after {what}", {"state 2"})


def check(pool: RankPool, seed: int, number: int) -> None:
    """Raises AssertionError, RankTimeoutError or AbortError, or RankError if ranks fail."""
    size, rng = pool.world_size, random.Random(f"fault {seed} {pool.world_size} {number}")
    kinds = ["disk full", "save", *(["kill", "stop", "raise"] if size > 1 else [])]
    kind = kinds[number % len(kinds)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if kind == "disk full":
            disk_full(pool, rng, folder)
            return
        fault = Fault(kind, rng.randrange(size), rng.randrange(7 if kind == "save" else 16), rng.random() < 0.5)
        try:
            strike_one(size, fault, folder)
            if kind == "save":
                _loads(pool, folder / "saved", "torn", {"ValueError", "state 1", "state 2"})
        except Exception as error:
            error.add_note(str(fault))
            raise
