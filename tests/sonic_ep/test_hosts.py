"""Which ranks share a host, and what is said of it."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, RouterConfig, TransportConfig
from sonic_ep import groups as groups_module
from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.two_hop import TwoHopTransport
from sonic_ep.groups.hosts import HostLayout, host_name
from sonic_ep.routers.topk import compute_topk
from sonic_ep.transports import GroupTransport
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]


def test_a_layout_in_numbers() -> None:
    layout = HostLayout(("b 1", "b 1", "a 2", "a 2", "c 3", "c 3"))
    assert (layout.names, layout.num_hosts, layout.ranks_per_host, layout.problem) == (
        ("b 1", "a 2", "c 3"),
        3,
        2,
        None,
    )


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ("a", None),
        ("aabb", None),
        ("abc", None),
        ("aab", "the hosts have different numbers of ranks (2 on a, 1 on b); start as many"),
        (
            "aba",
            "the ranks of a host are not consecutive (1 on a, 1 on b, 1 on a); make EP groups of consecutive ranks",
        ),
    ],
)
def test_blocks_of_equal_size_are_needed(hosts: str, problem: str | None) -> None:
    found = HostLayout(tuple(hosts)).problem
    assert found == problem if problem is None else found is not None and found.startswith(problem)


def test_the_place_of_ranks() -> None:
    layout = HostLayout(("left 1f", "left 1f", "right 2e", "right 2e"))
    assert layout.place_of([3]) == " on host right"
    assert layout.place_of([1, 2]) == " on hosts left and right"
    assert HostLayout(("left 1f", "left 1f")).place_of([1]) == ""


def test_hosts_of_one_name_are_told_apart_by_their_boot_ids() -> None:
    assert HostLayout(("node 1f", "node 2e")).place_of([1]) == " on host node 2e"


@pytest.mark.parametrize(("size", "per_host", "num_hosts"), [(4, 2, 2), (4, 4, 1), (4, 1, 4), (2, 8, 1), (8, 2, 4)])
def test_imitated_hosts(size: int, per_host: int, num_hosts: int) -> None:
    layout = HostLayout.imitated(size, per_host)
    assert (len(layout.hosts_S), layout.num_hosts, layout.problem) == (size, num_hosts, None)


def test_this_host_has_a_name() -> None:
    assert host_name()
    assert host_name() == host_name()


# --- how many hosts a token reaches --------------------------------------------------------------------------------


@given(st.data())
def test_no_token_has_experts_on_more_hosts_than_the_check_allows(data: st.DataObject) -> None:
    num_hosts, groups = (data.draw(st.sampled_from([1, 2, 3, 4, 6, 8])) for _ in range(2))
    E = 2 * num_hosts * groups
    per_token = data.draw(st.integers(1, groups))
    K = data.draw(st.integers(1, min(E // groups * per_token, 8)))
    limit = data.draw(st.integers(1, num_hosts))
    router = RouterConfig(num_groups=groups, groups_per_token=per_token, hosts_per_token=limit, renormalize=False)
    config = MoEConfig(d=8, n=4, E=E, K=K, router=router)
    topk = compute_topk(torch.randn(200, E), None, K, router)
    hosts = [len(set(ids)) for ids in (topk.topk_ids_TK // (E // num_hosts)).tolist()]
    assert config.problem_with_hosts(num_hosts) is not None or max(hosts) <= limit


@pytest.mark.parametrize(
    ("groups", "per_token", "num_hosts", "problem"),
    [
        (8, 4, 1, None),
        (8, 4, 4, None),
        (8, 4, 8, None),
        (4, 2, 8, None),  # a group lies on two hosts
        (8, 5, 8, "router.groups_per_token=5 of num_groups=8 reach 5 hosts; set num_groups to a multiple of 8 and"),
        (4, 3, 8, "router.groups_per_token=3 of num_groups=4 reach 6 hosts; set num_groups to a multiple of 8 and"),
        (1, 1, 8, "router.groups_per_token=1 of num_groups=1 reach 8 hosts; set num_groups to a multiple of 8 and"),
        (8, 4, 6, "router.num_groups=8 groups do not lie on whole hosts; set num_groups to a multiple of 6, or use as"),
    ],
)
def test_groups_and_hosts(groups: int, per_token: int, num_hosts: int, problem: str | None) -> None:
    router = RouterConfig(num_groups=groups, groups_per_token=per_token, hosts_per_token=4)
    found = MoEConfig(d=8, n=4, E=48, K=8, router=router).problem_with_hosts(num_hosts)
    if problem is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(f"router.hosts_per_token=4 on {num_hosts} hosts: {problem}")


def built_with(rank: int, groups: int, hosts: str) -> str:
    router = RouterConfig(num_groups=groups, groups_per_token=1, hosts_per_token=1)
    config = MoEConfig(d=8, n=4, E=16, K=2, router=router, transport=TransportConfig(kind="all_to_all"))
    with patch.object(groups_module, "host_name", lambda: hosts[rank]):
        try:
            MoE(config, EPGroup(), seed=0)
        except ValueError as error:
            return str(error)
    return ""


def test_a_layer_is_refused_on_every_rank_if_tokens_may_have_experts_on_too_many_hosts(ranks: Ranks) -> None:
    assert ranks(4).run(built_with, 2, "aabb") == [""] * 4
    assert ranks(4).run(built_with, 4, "aabb") == [""] * 4
    for text in ranks(4).run(built_with, 1, "aabb"):
        assert text.startswith("router.hosts_per_token=1 on 2 hosts: router.groups_per_token=1 of num_groups=1 reach 2")
    for text in ranks(4).run(built_with, 4, "aaab"):
        assert text.startswith("router.hosts_per_token=1 needs equal hosts: the hosts have different numbers of ranks")


Counted = dict[str, list[int]]


def traffic_and_bytes(rank: int, per_token: int) -> Counted:
    """By the statistics and by the transports' own counts: what one forward sends to other ranks and hosts."""
    router = RouterConfig(num_groups=4, groups_per_token=per_token)
    transport = TransportConfig(kind="two_hop", ranks_per_host=1)
    config = MoEConfig(d=8, n=4, E=16, K=4, router=router, rounding=RoundingConfig(mode="off"), transport=transport)
    group = EPGroup()
    layer = MoE(config, group, seed=0)
    x = torch.randn(50 + rank, 8, generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        stats = layer(x).stats
    assert isinstance(layer.transport, GroupTransport)
    assert isinstance(used := layer.transport.on(x), TwoHopTransport)
    sent = stats.traffic(group)
    assert [*map(int, sent)] == [*map(int, layer.router.traffic(x, group))]
    free = layer.router.traffic(x, group, group_limits=False)
    row_bytes = 8 * 4
    crossed = used.bytes_across_hosts["dispatch"] // row_bytes
    plain = MoE(config.replace(transport=TransportConfig(kind="all_to_all")), group, seed=0)
    with torch.no_grad():
        plain(x)
    assert isinstance(plain.transport, GroupTransport)
    assert isinstance(every := plain.transport.on(x), AllToAllTransport)
    return {
        "limited": [*map(int, sent)],
        "free": [*map(int, free)],
        "bytes": [every.wire_bytes["dispatch"] // row_bytes, crossed],
    }


def test_traffic_is_what_the_transports_send_and_group_limits_lower_it(ranks: Ranks) -> None:
    for per_token in (1, 2, 4):
        for found in ranks(4).run(traffic_and_bytes, per_token):
            to_ranks, to_remote_ranks, to_remote_hosts, max_hosts = found["limited"]
            assert found["bytes"] == [to_ranks, to_remote_hosts]
            assert to_ranks == to_remote_ranks == to_remote_hosts  # hosts of one rank
            assert max_hosts == per_token
            fewer = [limited < free for limited, free in zip(found["limited"], found["free"], strict=True)]
            assert fewer == [per_token < 4] * 4
