"""A rank that is killed, stopped, stuck or elsewhere: all others are told which one, where, and in time."""

import json
import multiprocessing
import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from sonic_ep import EPGroup, MoE, MoEConfig, TransportConfig
from sonic_ep.groups import LostRankError
from sonic_ep.groups.hosts import HostLayout
from sonic_ep.groups.lost_ranks import (
    _SPIN,
    BrokenConnectionError,
    Collective,
    PeerWatch,
    Whereabouts,
    _Report,
    message_of,
    polled,
)
from sonic_ep.transports import GroupTransport
from tests.helpers.free_port import free_port
from tests.helpers.launch import RankPool, backend_of_gpus
from tests.helpers.static_buffers import compares_nothing_in_backward, static_buffers_in
from tests.helpers.triton_device import triton_device

TIMEOUT = 3.0
# Seconds until all have raised: the limit, the time for reports and their reading, and what a busy machine needs.
TIME_TO_RAISE = 2 * TIMEOUT + 8.0
START = 8.0  # the limit before the step in which it happens: on a busy machine first calls take long
STEP = 2


@pytest.mark.parametrize(
    ("asked", "limit", "sleeps", "found"), [(9, 50, 0, True), (35, 50, 3, True), (99, 4.5, 4, False)]
)
def test_what_is_asked_sleeps_rarely(asked: int, limit: float, sleeps: int, found: bool) -> None:
    """By a clock that goes on by a tenth of `_SPIN` a question. asked: until it is ready. limit: in `_SPIN`."""
    clock, slept = [0.0], list[float]()

    def is_ready() -> bool:
        clock[0] += _SPIN / 10
        return clock[0] > _SPIN / 10 * asked

    with patch.object(time, "monotonic", lambda: clock[0]), patch.object(time, "sleep", slept.append):
        assert polled(is_ready)(limit * _SPIN) is found
    assert slept == [0] * sleeps


class Fault(NamedTuple):
    """action: what happens to the victim. stage: of its second layer, before it; "user" is between two steps.
    backward: of the backward. ranks_per_host: of the two-hop transport, if the ranks have it."""

    action: str
    victim: int
    stage: str
    backward: bool = False
    ranks_per_host: int | None = None


def _strike(fault: Fault, folder: Path) -> None:
    (folder / "struck").write_text(str(time.time()))
    if fault.action == "raise":
        raise MemoryError("no memory")
    if fault.action in ("sleep", "late"):
        time.sleep(60.0 if fault.action == "sleep" else TIMEOUT + 2.0)
    else:
        os.kill(os.getpid(), signal.SIGSTOP if fault.action == "stop" else signal.SIGKILL)


def _struck_in(method: str, fault: Fault, folder: Path) -> Any:
    original = getattr(EPGroup, method)

    def call(group: EPGroup, *args: Any, stage: str = "counts", **kwargs: Any) -> Any:
        backward = torch._C._current_graph_task_id() != -1
        layer = kwargs.get("layer", group.layer)
        if (stage, backward, layer) == (fault.stage, fault.backward, 2) and not (folder / "struck").exists():
            _strike(fault, folder)
        return original(group, *args, stage=stage, **kwargs)

    return patch.object(EPGroup, method, call)


def _steps(rank: int, fault: Fault, folder: Path) -> None:
    kind = "auto" if fault.ranks_per_host is None else "two_hop"
    transport = TransportConfig(kind=kind, timeout=START, ranks_per_host=fault.ranks_per_host)
    config = MoEConfig(d=8, n=4, E=8, K=2, transport=transport)
    is_victim, group = rank == fault.victim, EPGroup()
    if is_victim and fault.stage == "construction":
        _struck_in("all_gather_object", fault, folder).start()
    layers = [MoE(config, group, seed=1) for _ in range(2)]
    for step in range(20):
        if step == STEP:
            dist.barrier()
            assert isinstance(transport := layers[0].transport, GroupTransport)
            transport.group.timeout = group.timeout = TIMEOUT
        if is_victim and step == STEP:
            for method in ("all_gather", "all_to_all"):
                _struck_in(method, fault, folder).start()
            if fault.stage == "user":
                _strike(fault, folder)
        x = torch.randn(20, 8, requires_grad=True)
        x = layers[0](x).y
        if is_victim and step == STEP and fault.action == "skip":
            (folder / "struck").write_text(str(time.time()))
            if fault.stage == "leave":
                return
            group.all_to_all(torch.ones(size := group.size), [1] * size, [1] * size, stage="an exchange of its own")
        layers[1](x).y.sum().backward()


def live(rank: int, size: int, port: int, fault: Fault, folder: Path) -> None:
    """The life of a rank; rank 0 has the store. It leaves what it raised, and when."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    raised = ["nothing", ""]
    try:
        _steps(rank, fault, folder)
    except Exception as error:  # noqa: BLE001 - all that there may be
        raised = [type(error).__name__, str(error)]
    (folder / f"raised-{rank}").write_text(json.dumps([*raised, time.time()]))


def run(size: int, fault: Fault, folder: Path) -> dict[int, str]:
    """Returns the messages of the ranks that are left, after checks of time, of kind and of the end of processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    port = free_port()
    processes = [context.Process(target=live, args=(rank, size, port, fault, folder)) for rank in range(size)]
    for process in processes:
        process.start()
    left = [rank for rank in range(size) if rank != fault.victim]
    deadline = time.monotonic() + 60.0
    for rank in left:
        processes[rank].join(max(0.0, deadline - time.monotonic()))
    codes = [processes[rank].exitcode for rank in left]
    if fault.action == "late":
        processes[fault.victim].join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
    struck = float((folder / "struck").read_text())
    found = {rank: json.loads((folder / f"raised-{rank}").read_text()) for rank in left}
    after = {rank: round(when - struck, 1) for rank, (_, _, when) in found.items()}
    assert codes == [0] * len(left)
    assert {kind for kind, _, _ in found.values()} == {"LostRankError"}
    assert max(after.values()) < TIME_TO_RAISE
    assert max(len(text.splitlines()) for _, text, _ in found.values()) <= 5
    return {rank: text for rank, (_, text, _) in found.items()}


IN_TIME = f"within {TIMEOUT:g} s: it died, it is stuck, or it is slower than that\n"
BROKEN = "because its process has ended\n"


@pytest.mark.parametrize(
    ("size", "fault", "wanted"),
    [
        (2, Fault("kill", 1, "construction"), f"construction of layer 2 {BROKEN}"),
        (2, Fault("kill", 1, "counts"), f"counts of layer 2 {BROKEN}"),
        (4, Fault("kill", 3, "dispatch"), f"dispatch of layer 2 {BROKEN}"),
        (4, Fault("kill", 2, "combine_scalars", backward=True), f"combine_scalars of layer 2 in backward {BROKEN}"),
        (4, Fault("stop", 3, "dispatch", backward=True), f"dispatch of layer 2 in backward {IN_TIME}"),
        (2, Fault("stop", 1, "lists"), f"lists of layer 2 {IN_TIME}"),
        (2, Fault("sleep", 1, "user"), f"counts of layer 1 {IN_TIME}"),
        (2, Fault("raise", 1, "user"), f"counts of layer 1 {BROKEN}"),
        (4, Fault("skip", 2, "leave"), f"counts of layer 2 {BROKEN}"),
        # The store goes with rank 0.
        (2, Fault("kill", 0, "dispatch"), f"dispatch of layer 2 {BROKEN}"),
        (2, Fault("stop", 0, "dispatch"), f"dispatch of layer 2 {IN_TIME}"),
    ],
    ids=str,
)
def test_the_others_name_the_rank_and_where(size: int, fault: Fault, wanted: str, tmp_path: Path) -> None:
    for text in run(size, fault, tmp_path).values():
        assert text.startswith(f"rank {fault.victim} of the EP group did not come to {wanted}")
        assert f"look at the log of rank {fault.victim} first, or raise transport.timeout" in text


@pytest.mark.parametrize(
    ("size", "fault", "wanted"),
    [
        (4, Fault("kill", 3, "dispatch across hosts", ranks_per_host=2), f"dispatch across hosts of layer 2 {BROKEN}"),
        (
            4,
            Fault("stop", 2, "dispatch within a host", ranks_per_host=2),
            f"dispatch within a host of layer 2 {IN_TIME}",
        ),
        (2, Fault("stop", 1, "lists", ranks_per_host=1), f"lists of layer 2 {IN_TIME}"),
        (
            4,
            Fault("stop", 3, "combine across hosts", backward=True, ranks_per_host=2),
            f"combine across hosts of layer 2 in backward {IN_TIME}",
        ),
        (
            4,
            Fault("kill", 2, "combine within a host", backward=True, ranks_per_host=2),
            f"combine within a host of layer 2 in backward {BROKEN}",
        ),
    ],
    ids=str,
)
def test_in_two_hops_the_host_is_named_as_well(size: int, fault: Fault, wanted: str, tmp_path: Path) -> None:
    for text in run(size, fault, tmp_path).values():
        assert text.startswith(f"rank {fault.victim} of the EP group on host 1 did not come to {wanted}")


@pytest.mark.parametrize(("after", "cause"), [(0.0, "because its process has ended"), (0.98, "within 1 s: it died")])
def test_gloo_gives_up_a_little_before_our_limit(after: float, cause: str) -> None:
    """Its clock has begun with the collective, before ours. A connection that breaks early is another matter."""

    def breaks(_: float) -> bool:
        time.sleep(after)
        raise BrokenConnectionError

    store = dist.HashStore()
    watch = PeerWatch(0, 2, lambda: store, Whereabouts("a group", [0, 1], lambda: store))
    with pytest.raises(LostRankError, match=f"rank 1 of the EP group did not come to counts {cause}"):
        watch.wait(breaks, watch.begin("counts"), 1.0)


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_without_the_store_the_stage_and_who_it_may_be(action: str, tmp_path: Path) -> None:
    for rank, text in run(4, Fault(action, 0, "combine"), tmp_path).items():
        when = BROKEN if action == "kill" else IN_TIME
        assert text.startswith(f"a rank of the EP group did not come to combine of layer 2 {when}")
        others = [other for other in range(4) if other != rank]
        assert f"it may be any of ranks {others[0]}, {others[1]} and {others[2]}" in text


def test_ranks_in_different_collectives_are_all_named(tmp_path: Path) -> None:
    (text,) = run(2, Fault("skip", 1, "elsewhere"), tmp_path).values()
    assert text.startswith("the ranks of the EP group were in different collectives: rank")
    assert "rank 0 waited in counts of layer 2 (collective " in text
    assert "rank 1 waited in an exchange of its own of layer 1 (collective " in text
    assert "in the same order on every rank" in text


def test_a_rank_that_comes_too_late_is_told_as_well(tmp_path: Path) -> None:
    run(2, Fault("late", 1, "user"), tmp_path)
    kind, text, _ = json.loads((tmp_path / "raised-1").read_text())
    assert kind == "LostRankError"
    assert text.startswith(f"rank 1 of the EP group came too late to counts of layer 1: the limit is {TIMEOUT:g} s")


@pytest.mark.parametrize(
    ("reports", "store_answers", "wanted"),
    [
        (
            {0: (9, "combine", 2.0, "timeout"), 3: (8, "dispatch", 3.0, "timeout")},
            True,
            "ranks 1 and 2 of the EP group did not come to dispatch of layer 1 within 3 s: it died, it is stuck, or it "
            "is slower than that\nrank 3 waited in dispatch of layer 1 (collective 8); rank 0 waited in combine of "
            "layer 1 (collective 9)\ntorch says: so\nlook at the log of ranks 1 and 2 first",
        ),
        # The host of the store has ended after its report.
        ({0: (9, "lists", 1.0, "connection"), 2: (9, "lists", 1.0, "others")}, False, "ranks 1 and 3 of the EP group"),
        (
            {2: (9, "lists", 1.0, "connection")},
            False,
            "a rank of the EP group did not come to lists of layer 1 because",
        ),
        (
            {rank: (9, "lists", 3.0, "timeout") for rank in range(4)},
            True,
            "lists of layer 1 of the EP group took longer than 3 s, though every rank came\ntorch says: so\nlook for",
        ),
        # Later than the others by half of the limit, and by more.
        (
            {rank: (9, "lists", waited, "timeout") for rank, waited in enumerate((3.0, 1.5, 1.4, 3.0))},
            True,
            "rank 2 of the EP group came too late to lists of layer 1: the limit is 3 s\ntorch says: so\nlook for",
        ),
        (
            {rank: (9, "lists", 1.0, "connection") for rank in range(4)},
            True,
            "the connections of the EP group broke in lists of layer 1, to which every rank came\ntorch says: so\n",
        ),
    ],
)
def test_the_message(reports: dict[int, Any], store_answers: bool, wanted: str) -> None:
    of_ranks = {
        rank: _Report(Collective(number, stage, 1, False), waited, cause)
        for rank, (number, stage, waited, cause) in reports.items()
    }
    text = message_of(of_ranks, HostLayout(("",) * 4), TIMEOUT, "so", store_answers=store_answers)
    assert text.startswith(wanted)
    assert len(text.splitlines()) <= 5


def waits_for_what_never_comes(rank: int, size: int, port: int, folder: Path) -> None:
    """As over NCCL, where the host polls for what the device computes."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    group = EPGroup()
    group.timeout = 1.0
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.enter_layer(7)
    begun = time.monotonic()
    for again in range(2):
        try:
            if not again:
                group.wait_until(lambda: False, stage="counts")
            group.all_gather_object(None)
        except LostRankError as error:
            (folder / f"raised-{again}").write_text(json.dumps([str(error), time.monotonic() - begun]))


def test_a_host_that_polls_gives_up_and_the_group_stays_lost(tmp_path: Path) -> None:
    context, port = multiprocessing.get_context("forkserver"), free_port()
    processes = [context.Process(target=waits_for_what_never_comes, args=(r, 2, port, tmp_path)) for r in range(2)]
    for process in processes:
        process.start()
    processes[0].join(60)
    code = processes[0].exitcode
    for process in processes:
        process.kill()
        process.join()
    assert code == 0
    (first, after), (second, _) = (json.loads((tmp_path / f"raised-{again}").read_text()) for again in range(2))
    assert first.startswith("rank 1 of the EP group did not come to counts of layer 7 within 1 s: it died")
    assert second == first
    assert after < 6.0


Away = Literal["forward", "backward"]
_AWAY_AT = 5  # no step in which ranks meet to record launches


def stays_away(rank: int, away: Away, transport: TransportConfig, folder: Path, device: str) -> str:
    """What rank 0 raises where rank 1 does not come to the second layer, or to its backward. On CPUs over shared
    memory."""
    sizes, dtype = ({"d": 8, "n": 4}, torch.float32) if device == "cpu" else ({"d": 64, "n": 32}, torch.bfloat16)
    config, group = MoEConfig(**sizes, E=8, K=2, transport=transport), EPGroup()
    x = torch.randn(20, config.d, device=device, dtype=dtype, requires_grad=True)
    with ExitStack() as context:
        if device == "cpu":
            context.enter_context(static_buffers_in(str(folder), transport.timeout))
            context.enter_context(compares_nothing_in_backward())
        if device == "cuda":  # compiles kernels, which may take longer than the limit
            patient = config.replace(transport=TransportConfig(kind=transport.kind))
            MoE(patient, group, seed=1, device=device, dtype=dtype)(x).y.sum().backward()
        layers = [MoE(config, group, seed=1, device=device, dtype=dtype) for _ in range(2)]
        numbers = [layer._number for layer in layers]
        begun = 0.0
        try:
            for step in range(_AWAY_AT + 1):
                begun, is_away = time.monotonic(), rank == 1 and step == _AWAY_AT
                y = layers[0](x).y
                if is_away and away == "forward":
                    return _until_raised(folder)
                y = layers[1](y).y
                if is_away:
                    return _until_raised(folder)
                y.sum().backward()
            layers[0](x)  # on GPUs the host waits for nobody in backward
        except RuntimeError as error:
            (folder / "raised").touch()
            assert time.monotonic() - begun < 2 * transport.timeout + 8
            return re.sub(r"layer (\d+)", lambda found: f"layer {numbers.index(int(found[1])) + 1}", str(error))
    return "nothing"


def _until_raised(folder: Path) -> str:
    end = time.monotonic() + 60
    while not (folder / "raised").exists() and time.monotonic() < end:
        time.sleep(0.1)
    return ""


@pytest.mark.skipif(triton_device() != "cpu", reason="interprets its kernels")
@pytest.mark.parametrize("away", ["forward", "backward"])
def test_over_shared_memory_the_layer_is_named_as_well(away: Away, tmp_path: Path) -> None:
    with RankPool(2) as pool:
        text, _ = pool.run(stays_away, away, TransportConfig(timeout=START), tmp_path, "cpu")
    stage, noticed = ("counts", "layer 2") if away == "forward" else ("dispatch", "layer 2 in backward")
    assert text.startswith(f"rank 1 of the EP group did not come to {stage} within {START:g} s (noticed in {noticed})")


@pytest.mark.gpu
@pytest.mark.parametrize("away", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["all_to_all", "symmetric"])
def test_on_gpus_the_layer_is_named(away: Away, kind: Any, tmp_path: Path) -> None:
    """In ranks of its own: a communicator that has timed out is of no use to later tests."""
    with RankPool(2, backend_of_gpus(2)) as pool:
        text, _ = pool.run(stays_away, away, TransportConfig(kind=kind, timeout=5.0), tmp_path, "cuda")
    found = re.match(r"rank 1 of the EP group did not come to (\w+)( of| within 5 s \(noticed in) layer [12]", text)
    assert found, text
