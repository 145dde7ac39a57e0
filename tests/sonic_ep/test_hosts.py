"""Which ranks share a host, and what is said of it."""

import pytest

from sonic_ep.groups.hosts import HostLayout, host_name


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
