"""Which transport a group has: one object for all who share the ranks, and a new one for new ranks."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from sonic_ep import EPGroup, TransportConfig
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.transports import GroupTransport, transport_for, transport_type
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
