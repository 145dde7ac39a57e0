"""When ranks can write into each other's memory, by where they are. What maps it is tested on GPUs."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from sonic_ep import EPGroup, TransportConfig, symmetric_memory, transports
from sonic_ep.dispatch.two_hop import TwoHopTransport
from sonic_ep.symmetric_memory import PeerMemory, RankLocation, problem_between
from tests.helpers.launch import RankPool

NO_RANK: frozenset[str] = frozenset()
SHARED = (
    "two ranks of the group share a GPU; TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 allows that, for tests: it is slow"
)


def location(
    gpu: str | None, host: str = "one", unreachable: frozenset[str] = NO_RANK, problem: str | None = None
) -> RankLocation:
    return RankLocation(host, gpu, unreachable, problem)


@pytest.mark.parametrize(
    ("locations", "problem"),
    [
        ([location("a"), location("b")], None),
        ([location("a", unreachable=frozenset("x")), location("b")], None),
        ([location("a"), location(None)], "the rows of rank 1 are not on a CUDA device"),
        ([location("a"), location("b", problem="triton not found")], "rank 1: triton not found"),
        ([location("a", "two"), location("b", "one")], "the ranks of the group are on several hosts: one, two"),
        ([location("a"), location("b"), location("a")], SHARED),
        (
            [location("a"), location("b", unreachable=frozenset("ac")), location("c")],
            "the GPU of rank 1 has no peer access to the GPU of rank 0",
        ),
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
def test_problem_between_places(
    locations: list[RankLocation], problem: str | None, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1" if allowed else "0")
    assert problem_between(locations) == (None if allowed and problem == SHARED else problem)


def test_a_place_without_a_gpu() -> None:
    here = RankLocation.here(torch.device("cpu"), None)
    assert here == RankLocation.here(torch.device("cpu"), None)
    assert here.host
    assert here.gpu is None


def test_views_and_addresses() -> None:
    own, other = torch.zeros(2, 64, dtype=torch.uint8)
    memory = PeerMemory(own, torch.tensor([1000, 2000]), [own, other])
    memory.view_of(1, 8, (1,), torch.int16).fill_(-1)
    assert other.nonzero().flatten().tolist() == [8, 9]
    memory.view((2, 3), torch.int32)[1, 2] = -1
    assert own.nonzero().flatten().tolist() == [20, 21, 22, 23]


def hop_2_of(rank: int, locations: list[RankLocation], fails: int) -> tuple[bool, list[range]]:
    """Whether two hops of two ranks a host take memory, and the ranks among which a rank tried to map some."""
    tried = list[range]()

    def maps(group: EPGroup, device: torch.device, num_bytes: int, ranks: range) -> PeerMemory:
        tried.append(ranks)
        if rank == fails:
            raise RuntimeError("no such memory")
        own = torch.zeros(num_bytes, dtype=torch.uint8)
        return PeerMemory(own, torch.zeros(len(ranks), dtype=torch.int64), [own] * len(ranks))

    config, device = TransportConfig(kind="two_hop", ranks_per_host=2), torch.device("cuda", 0)
    with (
        patch.object(RankLocation, "here", lambda *_: locations[rank]),
        patch.object(symmetric_memory, "_mapped", maps),
        patch.object(transports, "missing_extra", lambda *_: None),
    ):
        transport = transports._choose(EPGroup(), config, device)
    assert isinstance(transport, TwoHopTransport)
    return transport._memory is not None, tried


FOUR = [location("a"), location("b"), location("a", "two"), location("b", "two", frozenset("c"))]


@pytest.mark.parametrize(
    ("locations", "fails", "takes", "tries"),
    [
        (FOUR, -1, True, True),
        (FOUR, 2, False, True),
        ([*FOUR[:3], location("b", "two", frozenset("a"))], -1, False, False),
        ([*FOUR[:3], location("b", "three")], -1, False, False),
        ([*FOUR[:3], location("b", "two", problem="triton not found")], -1, False, False),
    ],
    ids=["peers", "nothing can be mapped", "no peer access", "another host", "no triton"],
)
def test_hop_2_takes_memory_if_the_ranks_of_every_host_can(
    ranks: Callable[[int], RankPool], locations: list[RankLocation], fails: int, takes: bool, tries: bool
) -> None:
    found = ranks(4).run(hop_2_of, locations, fails)
    here = [range(0, 2), range(0, 2), range(2, 4), range(2, 4)]
    assert found == [(takes, [each] if tries else []) for each in here]


def error_of(rank: int, fails: int) -> str:
    def maps(*_: object) -> PeerMemory:
        if rank == fails:
            raise torch.OutOfMemoryError("no memory\nfor 256 bytes")
        return PeerMemory(torch.zeros(1), torch.zeros(1), [])

    with patch.object(symmetric_memory, "_mapped", maps), pytest.raises(RuntimeError) as caught:
        symmetric_memory.symmetric_memory(EPGroup(), torch.device("cuda", 0), 256)
    assert (caught.value.__cause__ is None) == (rank != fails)
    return str(caught.value)


def test_all_ranks_raise_if_one_has_no_memory(ranks: Callable[[int], RankPool]) -> None:
    """None waits for it."""
    assert ranks(2).run(error_of, 1) == ["rank 1: no memory"] * 2
