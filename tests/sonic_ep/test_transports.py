"""Which transport a group has: one object for all who share the ranks, and a new one for new ranks."""

import gc
import weakref
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from sonic_ep import EPGroup, TransportConfig, groups
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.transports import GroupTransport, existing_transport, transport_for, transport_type
from tests.helpers.launch import RankPool


def shared_and_renewed(rank: int) -> None:
    first, second = transport_for(EPGroup()), transport_for(EPGroup())
    assert isinstance(first, GroupTransport)
    assert first is second
    other = EPGroup(dist.new_group([0, 1]))
    assert transport_for(other) is not first
    # As after torch.distributed was initialised anew: the name is back, the ranks are others.
    stranger = EPGroup()
    stranger.process_group = other.process_group
    assert transport_for(stranger) is not first


def lasts_as_long_as_a_group_that_asked(rank: int) -> None:
    first, second = EPGroup(), EPGroup()
    transport = weakref.ref(transport_for(first))
    assert transport_for(second) is transport()
    del first
    gc.collect()
    assert transport_for(second) is transport()
    del second
    gc.collect()
    assert transport() is None


def one_that_was_left_on_one_rank(rank: int) -> None:
    """As garbage that is not collected yet. A transport that only some ranks make anew waits for the others."""
    group, config = EPGroup(), TransportConfig(timeout=17)
    left = transport_for(group, config) if rank == 0 else weakref.ref(transport_for(group, config))
    del group
    gc.collect()
    group = EPGroup()
    transport = transport_for(group, config)
    assert transport is not left
    assert transport_for(EPGroup(), config) is transport
    if rank == 1:
        assert isinstance(left, weakref.ref)
        assert left() is None


def chosen_by_config(rank: int) -> None:
    group, rows = EPGroup(), torch.zeros(1)
    auto = transport_for(group)
    assert isinstance(auto, GroupTransport)
    assert isinstance(auto.on(rows), AllToAllTransport)
    asked = transport_for(group, TransportConfig(kind="all_to_all"))
    assert isinstance(asked, GroupTransport)
    assert asked is not auto
    assert isinstance(asked.on(rows), AllToAllTransport)
    symmetric = transport_for(group, TransportConfig(kind="symmetric"))
    assert isinstance(symmetric, GroupTransport)
    with pytest.raises(ValueError, match="kind='symmetric' with exact buffers cannot be had: the rows are on a cpu"):
        symmetric.on(rows)


def chosen_on(rank: int, hosts: list[str], config: TransportConfig) -> str:
    """The name of the type of a transport of ranks on these hosts, or what is raised."""
    group = EPGroup()
    with patch.object(groups, "host_name", lambda: hosts[rank]):
        transport = transport_for(group, config)
        assert isinstance(transport, GroupTransport)
        try:
            return type(transport.on(torch.zeros(1))).__name__
        except ValueError as error:
            return str(error)


AUTO, TWO_HOP = TransportConfig(), TransportConfig(kind="two_hop")
STATIC = TransportConfig(buffers="static")
UNEVEN = (
    "transport.kind='two_hop' cannot be had: the hosts have different numbers of ranks (3 on a, 1 on b); start as many "
    "processes on each, or make EP groups with as many ranks of each, or set transport.kind='all_to_all'"
)
MIXED = (
    "transport.kind='two_hop' cannot be had: the ranks of a host are not consecutive (1 on a, 1 on b, 1 on a, 1 on b); "
    "make EP groups of consecutive ranks, or set transport.kind='all_to_all'"
)


@pytest.mark.parametrize(
    ("hosts", "config", "wanted"),
    [
        ("aaaa", AUTO, "AllToAllTransport"),
        ("aabb", AUTO, "TwoHopTransport"),
        ("abcd", AUTO, "AllToAllTransport"),
        ("aaab", AUTO, "AllToAllTransport"),
        ("abab", AUTO, "AllToAllTransport"),
        ("aaaa", TransportConfig(ranks_per_host=2), "TwoHopTransport"),
        ("aabb", TransportConfig(ranks_per_host=8), "AllToAllTransport"),
        ("aabb", TransportConfig(kind="all_to_all"), "AllToAllTransport"),
        ("aaaa", TWO_HOP, "TwoHopTransport"),
        ("abcd", TWO_HOP, "TwoHopTransport"),
        ("aaab", TWO_HOP, UNEVEN),
        ("abab", TWO_HOP, MIXED),
        (
            "aabb",
            STATIC,
            "transport.kind='auto' with static buffers cannot be had: the ranks of the group are on several hosts: "
            "a, b",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) == 4 else "",
)
def test_hosts_decide(ranks: Callable[[int], RankPool], hosts: str, config: TransportConfig, wanted: str) -> None:
    assert ranks(4).run(chosen_on, [*hosts], config) == [wanted] * 4


def imitated_unevenly(rank: int) -> str:
    with pytest.raises(ValueError, match=r"^transport.ranks_per_host") as caught:
        transport_for(EPGroup(), TransportConfig(kind="two_hop", ranks_per_host=3))
    return str(caught.value)


def test_imitated_hosts_must_be_of_equal_size(ranks: Callable[[int], RankPool]) -> None:
    wanted = "transport.ranks_per_host=3 does not divide ep_size=4: give a divisor of 4, or 4 and more for one host"
    assert ranks(4).run(imitated_unevenly) == [wanted] * 4


def test_its_life(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(lasts_as_long_as_a_group_that_asked)


def test_no_rank_takes_one_that_others_no_longer_have(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(one_that_was_left_on_one_rank)


def test_what_is_chosen_on_a_cpu(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(chosen_by_config)


def test_a_group_has_one_transport(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(shared_and_renewed)


def test_one_rank_needs_no_exchange() -> None:
    assert isinstance(transport_for(EPGroup.alone()), LocalTransport)
    assert transport_type(EPGroup.alone()) is LocalTransport


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_compiled_graph_finds_the_transport_of_one_rank_as_it_was(batch_invariant: bool) -> None:
    group = EPGroup.alone()
    transport = transport_for(group, TransportConfig(batch_invariant=batch_invariant))
    assert existing_transport(group, transport.text).batch_invariant == batch_invariant
