"""When ranks can write into each other's memory, by where they are. What maps it is tested on GPUs."""

import pytest
import torch

from sonic_ep.symmetric_memory import PeerMemory, RankLocation, problem_between

NO_RANK: frozenset[str] = frozenset()


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
        ([location("a"), location("b"), location("a")], "two ranks of the group share a GPU"),
        (
            [location("a"), location("b", unreachable=frozenset("ac")), location("c")],
            "the GPU of rank 1 has no peer access to the GPU of rank 0",
        ),
    ],
)
def test_problem_between_places(locations: list[RankLocation], problem: str | None) -> None:
    assert problem_between(locations) == problem


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
