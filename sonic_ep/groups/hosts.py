"""`HostLayout`: which ranks of a group share a host."""

import itertools
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """Returns this host's name and boot id: two hosts may have the same name."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}".strip()


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The hosts of a group's ranks. hosts_S: the name of each rank's host, in rank order."""

    hosts_S: tuple[str, ...]

    @classmethod
    def imitated(cls, size: int, ranks_per_host: int) -> Self:
        """Returns `size` ranks as if each `ranks_per_host` consecutive ones had a host of their own.

        Raises ValueError unless the number divides `size`, or all ranks fit on one host.
        """
        if size > ranks_per_host and size % ranks_per_host:
            raise ValueError(
                f"transport.ranks_per_host={ranks_per_host} does not divide ep_size={size}: give a divisor of {size}, "
                f"or {size} and more for one host"
            )
        return cls(tuple(str(rank // ranks_per_host) for rank in range(size)))

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts' names, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.hosts_S))

    @property
    def num_hosts(self) -> int:
        return len(self.names)

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks of each host, if `problem` is None."""
        return len(self.hosts_S) // self.num_hosts

    @property
    def problem(self) -> str | None:
        """Why the hosts are not blocks of consecutive ranks of equal size, or None."""
        blocks = [(name, len([*ranks])) for name, ranks in itertools.groupby(self.hosts_S)]
        shown = ", ".join(f"{count} on {name.partition(' ')[0]}" for name, count in blocks)
        if len(blocks) > self.num_hosts:
            return f"the ranks of a host are not consecutive ({shown}); make EP groups of consecutive ranks"
        if len(set(Counter(self.hosts_S).values())) > 1:
            return (
                f"the hosts have different numbers of ranks ({shown}); start as many processes on each, or make EP "
                "groups with as many ranks of each"
            )
        return None

    def place_of(self, ranks: list[int]) -> str:
        """Returns " on host X" for ranks of several hosts, for errors; nothing if there is one host."""
        if self.num_hosts < 2:
            return ""
        short = [name.partition(" ")[0] for name in self.names]
        shown = dict(zip(self.names, self.names if len(set(short)) < len(short) else short, strict=True))
        found = [shown[name] for name in dict.fromkeys(self.hosts_S[rank] for rank in ranks)]
        return f" on host{'s' if len(found) > 1 else ''} {' and '.join(found)}"
