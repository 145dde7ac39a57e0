"""Hop 2 through memory that the ranks of a host share, against hop 2 over torch.distributed: the same bits and bytes.

Processes share files here and the kernels are interpreted; tests/dispatch/test_two_hop_gpu.py has GPUs.
"""

import random
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig
from sonic_ep.config import RoundingMode
from sonic_ep.dispatch.host_memory import HostMemory
from sonic_ep.dispatch.symmetric_buffers import Allocate
from sonic_ep.dispatch.two_hop import TwoHopTransport
from sonic_ep.kernels.dispatch.symmetric.signal_pad import Stage
from sonic_ep.symmetric_memory import PeerMemory
from tests.dispatch import oracle
from tests.dispatch.oracle import Case, Outcome
from tests.dispatch.test_two_hop import EIGHT, FOUR, differing, leaves_of, step
from tests.helpers.launch import RankPool
from tests.helpers.shared_files import shared_files
from tests.helpers.triton_device import triton_device

if triton_device() != "cpu":
    pytest.skip("interprets its kernels; see test_two_hop_gpu.py", allow_module_level=True)

Ranks = Callable[[int], RankPool]
TIMEOUT = 0.5


def of_host(group: EPGroup, folder: str, per_host: int) -> Allocate:
    """Memory of the ranks of an imitated host."""
    files, first = shared_files(group, folder), group.rank - group.rank % per_host
    here = slice(first, first + per_host)

    def allocate(num_bytes: int) -> PeerMemory:
        memory = files(num_bytes)
        return PeerMemory(memory.own, memory.addresses_S[here].clone(), memory.peer_views[here])

    return allocate


def with_memory(per_host: int, folder: str, timeout: float = 60) -> TwoHopTransport:
    group = EPGroup()
    return TwoHopTransport(group, per_host, of_host(group, folder, per_host), timeout=timeout)


def bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.shape, torch.cat([value.flatten()]).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {name: bits(each) for name, each in value.items()}
    return [bits(each) for each in value] if isinstance(value, tuple) else value


def unlike_torch(rank: int, cases: list[Case], per_host: int, dtype: torch.dtype, folder: str) -> list[str]:
    """What of the contract differs, in steps whose sizes change."""
    transports, found = (with_memory(per_host, folder), TwoHopTransport(EPGroup(), per_host)), list[str]()
    for case in cases:
        ours, theirs = (oracle.use(transport, rank, case, dtype, torch.float32) for transport in transports)
        for field in fields(Outcome):
            if bits(getattr(ours, field.name)) != bits(getattr(theirs, field.name)):
                found.append(f"{case} {field.name}")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_host", [2, 4])
def test_the_bits_and_bytes_of_torch(ranks: Ranks, per_host: int, dtype: torch.dtype, tmp_path: Path) -> None:
    assert ranks(4).run(unlike_torch, [*FOUR, *FOUR[::-1]], per_host, dtype, str(tmp_path)) == [[]] * 4


@pytest.mark.parametrize("per_host", [2, 4])
def test_the_bits_and_bytes_of_torch_on_eight_ranks(per_host: int, tmp_path: Path) -> None:
    with RankPool(8) as eight:
        assert eight.run(unlike_torch, EIGHT, per_host, torch.float32, str(tmp_path)) == [[]] * 8


def steps_unlike_torch(rank: int, mode: RoundingMode, tokens: tuple[int, ...], folder: str) -> list[str]:
    """Which results differ for one routing of a layer's router in training."""
    group, H = EPGroup(), 6
    rounding = RoundingConfig(mode=mode, t=4, G=16) if mode != "off" else RoundingConfig(mode="off")
    layer = MoE(MoEConfig(d=H, n=4, E=8, K=3, rounding=rounding), group, seed=0, dtype=torch.float64)
    x = torch.randn(tokens[rank], H, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    routing = layer.router(x, group=group, sequence_length=max(len(x), 1), exchange=layer.transport).routing
    leaves, dout = leaves_of(rank, len(x), H, 2, routing.weights_N.detach(), torch.float64, exact=False)
    transports: list[Any] = [with_memory(2, folder), TwoHopTransport(group, 2)]
    results = [step(t, group, routing, leaves, dout, activation="relu2") for t in transports]
    assert not len(x) or results[0]["y"].any()
    return differing(*results)


@pytest.mark.parametrize("mode", get_args(RoundingMode))
@pytest.mark.parametrize("tokens", [(37, 20, 51, 46), (0, 33, 8, 21)], ids=str)
def test_steps_have_the_bits_of_torch(
    ranks: Ranks, mode: RoundingMode, tokens: tuple[int, ...], tmp_path: Path
) -> None:
    assert ranks(4).run(steps_unlike_torch, mode, tokens, str(tmp_path)) == [[]] * 4


def late_ranks(rank: int, folder: str) -> list[int]:
    """Exchanges that came out wrong, by ranks that send late, and read late what has arrived."""
    group, rng, cat = EPGroup(), random.Random(rank), torch.cat
    memory = HostMemory(group, range(group.size), shared_files(group, folder), 60)
    memory.reserve(9)

    def late(*arguments: Any, **options: Any) -> Tensor:
        time.sleep(rng.choice([0, 0.05]))
        return cat(*arguments, **options)

    wrong = []
    for number in range(20):
        width, stage = 1 + number % 3, Stage.DISPATCH if number % 4 else Stage.COMBINE
        sizes = [[(number + 2 * source + dst) % 8 for dst in range(group.size)] for source in range(group.size)]
        rows = [
            torch.full((sizes[source][dst], width), 100 * number + 10 * source + dst)
            for source, dst in [*((rank, dst) for dst in range(group.size)), *((s, rank) for s in range(group.size))]
        ]
        time.sleep(rng.choice([0, 0.05]))
        with patch.object(torch, "cat", late):
            found = memory.exchange(stage, cat(rows[: group.size]), sizes[rank], [each[rank] for each in sizes])
        if not torch.equal(found, cat(rows[group.size :])):
            wrong.append(number)
    return wrong


def test_nobody_writes_what_another_has_yet_to_read(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(3).run(late_ranks, str(tmp_path)) == [[]] * 3


def stays_away(rank: int, case: Case, folder: str) -> str:
    """The second rank of each host prepares, and then sends nothing. What its peer hears."""
    transport = with_memory(2, folder, TIMEOUT)
    handle = transport.prepare(case.routing(rank), case.plan().of_rank(rank)).handle
    x_TH, heard = case.integers(rank, case.tokens[rank], torch.float32, 3), ""
    transport.dispatch(x_TH, handle).result()
    EPGroup().all_gather_object(None)
    if rank % 2 == 0:
        splits, start = handle.splits, time.monotonic()
        x_fH = x_TH.new_zeros(sum(splits.forwarded_out), case.H)
        transport._within_host("dispatch", x_fH, splits.forwarded_out, splits.forwarded_in, 0)
        assert TIMEOUT < time.monotonic() - start < 20 * TIMEOUT
        with pytest.raises(RuntimeError) as caught:
            transport.raise_if_lost()
        heard = str(caught.value)
    EPGroup().all_gather_object(None)
    return heard


def test_a_rank_that_stays_away_from_hop_2_is_named(ranks: Ranks, tmp_path: Path) -> None:
    heard = ranks(4).run(stays_away, FOUR[0], str(tmp_path))
    for rank, message in ((1, heard[0]), (3, heard[2])):
        assert message.startswith(f"rank {rank} of the EP group did not come to dispatch within a host in 1 s")


def parts_of_a_group(rank: int) -> tuple[str, int, int, bytes]:
    first = rank - rank % 2
    name = EPGroup().name_of_part(range(first, first + 2))
    assert EPGroup().name_of_part(range(first, first + 2)) == name
    part = distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportArgumentType]
    store = part.get_group_store()
    if rank % 2:
        store.set("key", str(rank))
    return name, part.rank(), part.size(), store.get("key")


def test_a_part_of_a_group_has_a_store_of_its_own(ranks: Ranks) -> None:
    """Its ranks meet there, and need no communicator."""
    found = ranks(4).run(parts_of_a_group)
    assert [each[1:] for each in found] == [(0, 2, b"1"), (1, 2, b"1"), (0, 2, b"3"), (1, 2, b"3")]
