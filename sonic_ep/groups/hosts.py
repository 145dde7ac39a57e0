"""Which ranks of a group share a host: rows between hosts cross a slower network than rows inside one."""

import socket
from collections.abc import Sequence
from pathlib import Path

from sonic_ep.groups import EPGroup

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # hosts that were cloned may share a name


def host_name() -> str:
    """Returns the name of this process's host, and what tells it from another host of that name."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"


def ranks_per_host(hosts: Sequence[str]) -> int | None:
    """Returns how many consecutive ranks each host has, or None if hosts have different numbers or ranks of others.

    hosts: of each rank.
    Example: ranks_per_host(["a", "a", "b", "b"]) is 2, ranks_per_host(["a", "b", "a"]) None.
    """
    first = list(dict.fromkeys(hosts))
    number = len(hosts) // len(first)
    return number if list(hosts) == [host for host in first for _ in range(number)] else None


def hosts_of(group: EPGroup) -> list[str]:
    """Returns the host of each rank. A collective."""
    return group.all_gather_object(host_name(), stage="the search for hosts")
