"""Ranks that write into each other's memory over NVLink: bit for bit what the all-to-all brings."""

import functools
import re
import time
from collections.abc import Callable

import pytest
import torch

from sonic_ep import EPGroup
from sonic_ep.config import Dispatch
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.symmetric import SymmetricTransport
from sonic_ep.functional import moe
from sonic_ep.symmetric_memory import problem_with_peers, symmetric_memory
from tests.dispatch.gpu_steps import NAMES, expert_step, routing_of
from tests.helpers.launch import RankPool, most_gpus

pytestmark = pytest.mark.gpu
Gpus = Callable[[int], RankPool]
# d, n, E, K, T of each rank (in turn)
SHAPES = [
    (256, 128, 8, 2, (300, 300)),
    (2048, 768, 32, 8, (1024, 777)),
    (7168, 256, 16, 4, (513, 0)),
    (72, 40, 8, 3, (5,)),
]


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def symmetric(group: EPGroup, timeout: float = 20, dispatch: Dispatch = "auto") -> SymmetricTransport:
    allocate = functools.partial(symmetric_memory, group, here())
    return SymmetricTransport(group, allocate, timeout=timeout, dispatch=dispatch)


def same_as_all_to_all(rank: int, shape: tuple[int, int, int, int, tuple[int, ...]], dispatch: Dispatch) -> list[str]:
    d, n, E, K, tokens = shape
    group = EPGroup()
    assert problem_with_peers(group, here()) is None
    transport, expected = symmetric(group, dispatch=dispatch), AllToAllTransport(group)
    differing = []
    for seed in range(4):
        T = tokens[(rank + seed) % len(tokens)]
        routing = routing_of(rank, group, T, E, K, seed)
        for saved in (False, True):
            ours, theirs = (
                expert_step(t, group, routing, (d, n, E // group.size), saved=saved, seed=seed)
                for t in (transport, expected)
            )
            differing += [
                f"{seed} {saved} {name}"
                for name, a, b in zip(NAMES, ours, theirs, strict=True)
                if not torch.equal(a, b)
            ]
    return differing


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dispatch", ["push", "copy"])
def test_the_same_bits_as_all_to_all(
    gpus: Gpus, size: int, shape: tuple[int, int, int, int, tuple[int, ...]], dispatch: Dispatch
) -> None:
    assert gpus(size).run(same_as_all_to_all, shape, dispatch) == [[]] * size


def counts_of_all(rank: int) -> bool:
    """All-gathers of changing lengths, ranks late in turn, and something on the device between telling and asking."""
    group = EPGroup()
    transport, busy = symmetric(group), torch.ones(1, device="cuda")
    equal = True
    for step in range(200):
        values_SF = torch.stack(
            [
                torch.randint(-(2**62), 2**62, (1 + step % 7 * 90,), generator=torch.Generator().manual_seed(seed))
                for seed in range(10 * step, 10 * step + group.size)
            ]
        )
        if step % 9 == rank:
            time.sleep(0.005)
        equal &= torch.equal(transport.all_gather(values_SF[rank].cuda(), lambda: busy.add_(1)).cpu(), values_SF)
    return equal and float(busy) == 201


def test_all_gather(gpus: Gpus) -> None:
    assert all(gpus(most_gpus()).run(counts_of_all))


def many_steps(rank: int) -> bool:
    """100 steps of changing routing and token numbers, two microbatches in flight; ranks are late in turn."""
    group = EPGroup()
    transport, expected = symmetric(group), AllToAllTransport(group)
    equal = True
    for number in range(50):
        if number % 7 == rank:
            time.sleep(0.02)
        routings = [routing_of(rank, group, 64 + 37 * ((number + rank + i) % 5), 16, 4, 2 * number + i) for i in (0, 1)]
        x = [torch.randn(r.num_tokens, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for r in routings]
        torch.manual_seed(number)
        w1, w2 = (
            torch.randn(16 // group.size, *s, device="cuda", dtype=torch.bfloat16) / 8 for s in ((128, 128), (128, 64))
        )
        results = []
        for each in (transport, expected):
            ys = [moe(a, r, w1, w2, transport=each, group=group) for a, r in zip(x, routings, strict=True)]
            grads = [torch.autograd.grad(y.float().square().sum(), a)[0] for y, a in zip(ys, x, strict=True)]
            results.append([*ys, *grads])
        equal &= all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return equal


def test_many_steps_with_late_ranks_and_two_microbatches(gpus: Gpus) -> None:
    assert all(gpus(most_gpus()).run(many_steps))


def one_rank_stays_away(rank: int) -> str:
    group = EPGroup()
    transport = symmetric(group, timeout=2)
    # More tiles of tokens than programs that push them, and fewer than twice as many.
    routing, shape = routing_of(rank, group, 1536 // group.size, 8, 2, 0), (2048, 64, 8 // group.size)
    expert_step(transport, group, routing, shape, saved=False, seed=0)
    if rank == group.size - 1:
        time.sleep(8)
        return ""
    start = time.monotonic()
    try:
        y = expert_step(transport, group, routing, shape, saved=False, seed=0)[0]
        torch.cuda.synchronize()
        assert y.isnan().all()
        expert_step(transport, group, routing, shape, saved=False, seed=0)
    except RuntimeError as error:
        assert time.monotonic() - start < 6
        return str(error)
    return "no error"


def test_a_rank_that_stays_away_is_named(gpus: Gpus) -> None:
    size = most_gpus()
    messages = gpus(size).run(one_rank_stays_away)
    for message in messages[:-1]:  # lists and rows are waited for side by side
        raised = rf"rank {size - 1} of the EP group did not come to (lists|dispatch) within 2 s"
        assert re.match(raised, message), message
