"""Which transport a group has: one object for all who share the ranks, and a new one for new ranks."""

import gc
from collections.abc import Callable

import torch.distributed as dist

from sonic_ep import EPGroup
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.transports import transport_for, transport_type
from tests.helpers.launch import RankPool


def shared_and_renewed(rank: int) -> None:
    first, second = transport_for(EPGroup()), transport_for(EPGroup())
    assert isinstance(first, AllToAllTransport)
    assert first is second
    other = EPGroup(dist.new_group([0, 1]))
    assert transport_for(other) is not first
    # As after torch.distributed was initialised anew: the name is back, the ranks are others.
    stranger = EPGroup()
    stranger.process_group = other.process_group
    assert transport_for(stranger) is not first
    del first, second
    gc.collect()
    assert transport_for(EPGroup()).wire_bytes == {}  # type: ignore[attr-defined]


def test_a_group_has_one_transport(ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(shared_and_renewed)


def test_one_rank_needs_no_exchange() -> None:
    assert isinstance(transport_for(EPGroup.alone()), LocalTransport)
    assert transport_type(EPGroup.alone()) is LocalTransport
