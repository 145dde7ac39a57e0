"""Two and four GPUs as two hosts: two hops over NCCL, also with nothing but its network path between hosts, and with
hop 2 through memory.

Where a token has at most two destination ranks, two hops give the bits of the all-to-all.
"""

import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, TransportConfig
from sonic_ep.config import RoundingMode, TransportKind
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.host_memory import HostMemory
from sonic_ep.dispatch.protocol import Pending
from sonic_ep.dispatch.row_exchange import CollectiveTransport
from sonic_ep.dispatch.two_hop import TwoHopTransport
from sonic_ep.symmetric_memory import symmetric_memory
from tests.dispatch.gpu_steps import NAMES, expert_step, routing_of
from tests.helpers.changing_routing import leaning_tokens
from tests.helpers.launch import RankPool, backend_of_gpus
from tests.kernels.oracle import assert_no_worse_than_low_precision

pytestmark = pytest.mark.gpu
Gpus = Callable[[int], RankPool]
D, STEPS = 256, 100
TOKENS = (700, 513, 0, 64, 1)
TIMEOUT = 5


@contextmanager
def ranks_with(size: int, **environment: str) -> Iterator[RankPool]:
    """Ranks of their own, with these variables; skips where there are too few GPUs."""
    with patch.dict("os.environ", environment), RankPool(size, backend_of_gpus(size)) as pool:
        yield pool


@pytest.fixture(scope="module")
def hosts() -> Iterator[RankPool]:
    """Two ranks that NCCL joins as if they were on two hosts: over its network path alone."""
    with ranks_with(2, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_SOCKET_IFNAME="lo") as pool:
        yield pool


@pytest.fixture(scope="module")
def hosts_of_two() -> Iterator[RankPool]:
    with ranks_with(4, NCCL_SOCKET_IFNAME="lo") as pool:
        yield pool


def layer_of(
    kind: TransportKind,
    mode: RoundingMode,
    timeout: float = 60,
    *,
    programs: bool = True,
    per_host: int = 1,
    K: int = 4,
) -> MoE:
    rounding = RoundingConfig(mode=mode) if mode == "off" else RoundingConfig(mode=mode, t=64)
    hosts = per_host if kind == "two_hop" else None
    transport = TransportConfig(kind=kind, ranks_per_host=hosts, timeout=timeout)
    config = MoEConfig(d=D, n=128, E=16, K=K, rounding=rounding, transport=transport, record_launches=programs)
    return MoE(config, EPGroup(), seed=0, device="cuda", dtype=torch.bfloat16)


def run(layer: MoE, x: Tensor) -> list[Tensor]:
    torch.full((20_000_000,), float("nan"), device="cuda")
    x = x.detach().requires_grad_()
    layer.zero_grad()
    out = layer(x)
    ((out.y * out.y).sum() + out.aux_loss).backward()
    return [out.y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]  # pyright: ignore[reportReturnType]


def changing_steps(rank: int, mode: RoundingMode, other: TransportKind, rotate: bool) -> list[int]:
    """Steps of changing routing and token numbers in which two hops differ from the other transport."""
    layers, differing = [layer_of(kind, mode) for kind in ("two_hop", other)], []
    x = torch.empty(0, device="cuda")
    for step in range(STEPS):
        x = leaning_tokens(2 * step + rank, 700, D, "cuda", torch.bfloat16)
        x = x[: TOKENS[(step + rank) % len(TOKENS)] if rotate else 700]
        ours, theirs = (run(layer, x) for layer in layers)
        if not all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(ours, theirs, strict=True)):
            differing.append(step)
    assert isinstance(layers[0].transport.on(x), TwoHopTransport)  # pyright: ignore[reportAttributeAccessIssue]
    return differing


@pytest.mark.parametrize("mode", ["off", "apportion"])
@pytest.mark.parametrize("other", ["all_to_all", "symmetric"])
def test_the_bits_of_one_host(gpus: Gpus, mode: RoundingMode, other: TransportKind) -> None:
    assert gpus(2).run(changing_steps, mode, other, True) == [[], []]


@pytest.mark.parametrize("mode", ["off", "apportion"])
def test_the_bits_of_one_host_over_the_network_path(hosts: RankPool, mode: RoundingMode) -> None:
    assert hosts.run(changing_steps, mode, "all_to_all", True) == [[], []]


def two_hosts_of_two(rank: int, K: int) -> set[str]:
    """Four GPUs, two to a host. Returns what differs from the all-to-all in a bit; all of it has to be as exact."""
    os.environ["NCCL_HOSTID"] = str(rank // 2)  # NCCL reads it with its first communicator: between hosts, its network
    d, n, E = 512, 256, 16
    group = EPGroup()
    two_hop, expected = TwoHopTransport(group, 2), AllToAllTransport(group)
    differing = set[str]()
    for seed in range(8):
        T = (700, 0, 513, 300, 64)[(rank + seed) % 5]  # not 1: the all-to-all's error may be tiny by chance
        routing = routing_of(rank, group, T, E, K, seed)
        how = {"shape": (d, n, E // group.size), "saved": seed % 2 == 0, "seed": seed}
        ours, theirs = (expert_step(transport, group, routing, **how) for transport in (two_hop, expected))
        exact = expert_step(expected, group, routing, dtype=torch.float32, **how)
        for name, a, b, c in zip(NAMES, ours, theirs, exact, strict=True):
            differing |= set() if torch.equal(a, b) else {name}
            assert_no_worse_than_low_precision(a, c, b, f"{seed} {name}")
    return differing


def test_the_bits_of_all_to_all_on_two_hosts_of_two(hosts_of_two: RankPool) -> None:
    """Tokens of two experts, so of two destination ranks at most."""
    assert hosts_of_two.run(two_hosts_of_two, 2) == [set()] * 4


def test_two_hosts_of_two_are_as_exact_as_all_to_all(hosts_of_two: RankPool) -> None:
    assert hosts_of_two.run(two_hosts_of_two, 8) == [{"y", "dx"}] * 4  # where the order of additions differs


def through_memory(group: EPGroup, per_host: int) -> TwoHopTransport:
    device = torch.device("cuda", torch.cuda.current_device())
    first = group.rank - group.rank % per_host
    allocate = functools.partial(symmetric_memory, group, device, ranks=range(first, first + per_host))
    return TwoHopTransport(group, per_host, allocate, timeout=20)


def steps_through_memory(rank: int) -> list[str]:
    """Two to a host. What differs in a bit from hop 2 over NCCL, in steps whose sizes change."""
    group = EPGroup()
    if group.size > 2:
        os.environ["NCCL_HOSTID"] = str(rank // 2)
    d, n, E, K = 512, 256, 16, 8
    ours, expected, differing = through_memory(group, 2), TwoHopTransport(group, 2), list[str]()
    for seed in range(40):
        T = (700, 0, 513, 300, 64, 3000)[(rank + seed) % 6]
        routing = routing_of(rank, group, T, E, K, seed)
        how = {"shape": (d, n, E // group.size), "saved": seed % 2 == 0, "seed": seed}
        results = [expert_step(transport, group, routing, **how) for transport in (ours, expected)]
        differing += [f"{seed} {name}" for name, a, b in zip(NAMES, *results, strict=True) if not torch.equal(a, b)]
    return differing


def test_hop_2_through_memory_has_the_bits_of_nccl_on_one_host(gpus: Gpus) -> None:
    assert gpus(2).run(steps_through_memory) == [[]] * 2


def test_hop_2_through_memory_has_the_bits_of_nccl_on_two_hosts_of_two(hosts_of_two: RankPool) -> None:
    assert hosts_of_two.run(steps_through_memory) == [[]] * 4


def layers_through_memory(rank: int, mode: RoundingMode) -> list[int]:
    """Steps of programs in which a layer that uses memory differs from one whose transport is the all-to-all."""
    os.environ["NCCL_HOSTID"] = str(rank // 2)
    layers = [layer_of(kind, mode, per_host=2, K=2) for kind in ("two_hop", "all_to_all")]
    differing, x = list[int](), torch.empty(0, device="cuda")
    for step in range(STEPS):
        x = leaning_tokens(4 * step + rank, 700, D, "cuda", torch.bfloat16)[: TOKENS[(step + rank) % len(TOKENS)]]
        ours, theirs = (run(layer, x) for layer in layers)
        if not all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(ours, theirs, strict=True)):
            differing.append(step)
    transport = layers[0].transport.on(x)  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(transport, TwoHopTransport)
    assert transport._memory is not None
    return differing


@pytest.mark.parametrize("mode", ["off", "pad"])
def test_a_layer_takes_memory_within_a_host(hosts_of_two: RankPool, mode: RoundingMode) -> None:
    """Tokens of two experts, so of two destination ranks at most."""
    assert hosts_of_two.run(layers_through_memory, mode) == [[]] * 4


def stays_away(*_: Any) -> Tensor:
    time.sleep(6 * TIMEOUT)
    raise RuntimeError("stays away")


def one_rank_misses_hop_2(rank: int) -> str:
    x = torch.randn(64, D, device="cuda", dtype=torch.bfloat16)
    run(layer_of("two_hop", "off", per_host=2), x)  # compiles kernels, which may take longer than the limit
    layer = layer_of("two_hop", "off", TIMEOUT, per_host=2)
    run(layer, x)
    torch.cuda.synchronize()
    if rank == 1:
        with patch.object(HostMemory, "exchange", stays_away), pytest.raises(RuntimeError, match="stays away"):
            run(layer, x)
        return ""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        [run(layer, x) for _ in range(2)]  # the host need not wait in the first
    assert time.monotonic() - start < 4 * TIMEOUT
    return str(caught.value)


def test_a_rank_that_misses_hop_2_is_named_on_all_ranks() -> None:
    with ranks_with(4, NCCL_SOCKET_IFNAME="lo") as pool:
        messages = pool.run(one_rank_misses_hop_2)
    for rank in (0, 2, 3):
        assert re.search(r"rank 1 .*did not come to", messages[rank]), messages[rank]


def at_once(
    transport: CollectiveTransport, exchange: Callable[[Tensor], Tensor], values: Tensor, *, overlap: bool
) -> Pending:
    """Instead of `CollectiveTransport._start`: nothing overlaps."""
    return Pending.done(exchange(values))


def overlapping_steps(rank: int, kind: TransportKind) -> tuple[list[int], int]:
    """Steps of the layer's code in which exchanges that overlap GEMMs change a bit; how many of the last one do."""
    layer, start = layer_of(kind, "off", programs=False), CollectiveTransport._start
    differing, pending = list[int](), list[Pending]()

    def noted(*arguments: Any, overlap: bool) -> Pending:
        pending.append(start(*arguments, overlap=overlap))
        return pending[-1]

    for step in range(20):
        x = leaning_tokens(2 * step + rank, 3000, D, "cuda", torch.bfloat16)
        pending.clear()
        with patch.object(CollectiveTransport, "_start", noted):
            ours = run(layer, x)
        with patch.object(CollectiveTransport, "_start", at_once):
            theirs = run(layer, x)
        if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
            differing.append(step)
    return differing, sum(each.reserve_for == "exchange" for each in pending)


@pytest.mark.parametrize("kind", ["two_hop", "all_to_all"])
def test_exchanges_that_overlap_the_experts_bring_the_same_bits(gpus: Gpus, kind: TransportKind) -> None:
    """Of a backward: x, dX and the gradients of pairs' weights."""
    assert gpus(2).run(overlapping_steps, kind) == [([], 3)] * 2


def while_a_graph_is_captured(rank: int) -> str:
    layer, x = layer_of("two_hop", "off"), torch.randn(64, D, device="cuda", dtype=torch.bfloat16)
    run(layer, x)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError) as caught, torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"):
        layer(x)
    return str(caught.value)


def test_a_cuda_graph_is_refused(gpus: Gpus) -> None:
    for message in gpus(2).run(while_a_graph_is_captured):
        assert message.startswith("the two-hop transport of ep_size=2 needs its sizes on the host")


def one_rank_stays_away(rank: int) -> str:
    x = torch.randn(64, D, device="cuda", dtype=torch.bfloat16)
    run(layer_of("two_hop", "off"), x)  # compiles kernels, which may take longer than the limit
    layer = layer_of("two_hop", "off", TIMEOUT)
    run(layer, x)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(4 * TIMEOUT)
        return ""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        run(layer, x)  # it waits for sizes
    assert time.monotonic() - start < 3 * TIMEOUT  # the limit, and the time for reports of the others
    return str(caught.value)


def test_a_host_that_stays_away_is_named() -> None:
    """In ranks of its own: a communicator that has timed out is of no use to later tests."""
    with ranks_with(2) as pool:
        message = pool.run(one_rank_stays_away)[0]
    assert re.search(r"rank 1 .*did not come to", message), message
    assert "host" in message
