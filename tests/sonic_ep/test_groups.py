"""EPGroup: collectives of real ranks, none of a single one."""

import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from sonic_ep import EPGroup, MoE, MoEConfig
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]


def collectives(rank: int) -> None:
    group = EPGroup()
    assert (group.rank, group.size, group.backend) == (rank, 4, "gloo")
    assert group.all_gather(torch.tensor([rank, 10 * rank])).tolist() == [[r, 10 * r] for r in range(4)]
    done: list[int] = []
    assert group.all_gather(torch.tensor([rank]), lambda: done.append(rank)).tolist() == [[0], [1], [2], [3]]
    assert done == [rank]
    assert group.all_gather_object({"rank": rank}) == [{"rank": r} for r in range(4)]
    sent = [{"from": rank, "text": "x" * 100 * q} for q in range(4)]
    wanted = [{"from": r, "text": "x" * 100 * rank} for r in range(4)]
    assert group.all_to_all_object(sent, stage="a test") == wanted
    assert group.all_reduce(torch.tensor([rank])).item() == 6
    # rank r sends r rows to every rank: (r, destination)
    rows = torch.tensor([[rank, q] for q in range(4) for _ in range(rank)], dtype=torch.int64).view(-1, 2)
    received = group.all_to_all(rows, [rank] * 4, [0, 1, 2, 3])
    assert received.tolist() == [[s, rank] for s in range(4) for _ in range(s)]


def test_collectives(ranks: Ranks) -> None:
    ranks(4).run(collectives)


def subgroups(rank: int) -> tuple[int, int, str]:
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = EPGroup(pair[rank % 2])
    try:
        EPGroup(pair[1 - rank % 2])
    except ValueError as error:
        return group.rank, int(group.all_reduce(torch.tensor([rank])).item()), str(error)
    raise AssertionError("a foreign group was accepted")


def test_subgroups_and_strangers(ranks: Ranks) -> None:
    for rank, (own, total, message) in enumerate(ranks(4).run(subgroups)):
        assert own == rank // 2
        assert total == (2 if rank % 2 == 0 else 4)
        assert message == f"global rank {rank} is not a member of the given process group"


def named(rank: int) -> bool:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair, all_peers = EPGroup(pairs[rank % 2]), EPGroup()
    assert pair.name != all_peers.name
    found = EPGroup.named(pair.name)
    assert (found.rank, found.size) == (rank // 2, 2)
    return found.process_group is pair.process_group and EPGroup.named(all_peers.name).size == 4


def test_a_group_is_found_by_its_name(ranks: Ranks) -> None:
    assert ranks(4).run(named) == [True] * 4
    assert EPGroup.named(EPGroup.alone().name).process_group is None


def shared_problem(rank: int) -> str:
    try:
        EPGroup().raise_together("too large" if rank in (1, 3) else None)
    except ValueError as error:
        return str(error)
    return ""


def test_problems_are_raised_on_every_rank(ranks: Ranks) -> None:
    assert ranks(4).run(shared_problem) == ["rank 1: too large; rank 3: too large"] * 4


def disagreement(rank: int) -> str:
    try:
        EPGroup().raise_together(None, T=4, E=8 if rank else 4)
    except ValueError as error:
        return str(error)
    return ""


def test_what_must_be_the_same_is_compared(ranks: Ranks) -> None:
    wanted = "the ranks of the EP group disagree about E: 4 on rank 0, 8 on rank 1; give every rank the same"
    assert ranks(2).run(disagreement) == [wanted] * 2


def test_one_rank_alone_takes_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a collective was called")

    for name in ("all_gather", "all_gather_object", "all_reduce", "all_to_all_single"):
        monkeypatch.setattr(dist, name, forbidden)
    group = EPGroup.alone()
    assert group.all_gather(torch.tensor([1, 2])).tolist() == [[1, 2]]
    done: list[int] = []
    assert group.all_gather(torch.tensor([1]), lambda: done.append(1)).tolist() == [[1]]
    assert done == [1]
    assert group.all_gather_object(3) == [3]
    assert group.all_to_all_object([3], stage="a test") == [3]
    assert group.all_reduce(torch.tensor(4)).item() == 4
    group.raise_together(None)
    with pytest.raises(ValueError, match="^odd$"):
        group.raise_together("odd")


def pickled(rank: int) -> str:
    layer = MoE(MoEConfig(d=8, n=4, E=4, K=2), EPGroup(), seed=0)
    with pytest.raises(TypeError) as raised:
        pickle.dumps(layer)
    return str(raised.value)


def test_several_ranks_are_not_pickled(ranks: Ranks) -> None:
    for message in ranks(2).run(pickled):
        assert message.startswith(
            "an EPGroup of 2 ranks, and a layer that has it, cannot be pickled: save the layer's st"
        )
    layer = MoE(MoEConfig(d=8, n=4, E=4, K=2), seed=0)
    x = torch.randn(6, 8)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x).y, layer(x).y)
