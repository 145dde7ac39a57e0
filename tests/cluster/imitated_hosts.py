"""Two hosts on one machine: network namespaces joined by a veth pair, or else two agents on the loopback interface.

`imitated_hosts` makes them and removes them. `run_on` starts one torchrun agent in each (`--nnodes 2`, c10d
rendezvous), as on two machines. In namespaces the traffic between hosts, and no other, goes through the veth pair, so
its counters say what crosses, and it can be cut. On the loopback interface the hosts look like one, and nothing can
be cut: transport.ranks_per_host says which ranks are on a host.
"""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.free_port import free_port

ROOT = Path(__file__).resolve().parents[2]
RANKS_PER_HOST = 2
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Hosts:
    """way: "namespaces" or "loopback". why: what does not permit namespaces, if that is the reason; else empty.
    addresses, interfaces, namespaces: of each host, the first of which has the stores."""

    way: str
    why: str
    addresses: tuple[str, str]
    interfaces: tuple[str, str]
    namespaces: tuple[str, str] | None = None

    def __str__(self) -> str:
        return f"two hosts as {self.way}{f', because namespaces are not permitted: {self.why}' if self.why else ''}"

    def command(self, host: int, command: list[str]) -> list[str]:
        """Returns what runs a command on a host."""
        return command if self.namespaces is None else ["ip", "netns", "exec", self.namespaces[host], *command]

    def cut(self) -> None:
        """Cuts the link between the hosts."""
        assert self.namespaces is not None
        _ip("-n", self.namespaces[1], "link", "set", self.interfaces[1], "down")


@contextlib.contextmanager
def imitated_hosts(way: str | None = None) -> Iterator[Hosts]:
    """Makes two hosts, in namespaces if that is permitted, and removes them. way: "loopback" for no namespaces."""
    number = f"{os.getpid()}{next(_NUMBERS)}"
    namespaces = f"sonic-ep-{number}-0", f"sonic-ep-{number}-1"
    interfaces = f"se{number[-11:]}a", f"se{number[-11:]}b"
    with contextlib.ExitStack() as stack:
        why = "" if way == "loopback" else _problem_with_namespaces(namespaces, interfaces, stack)
        if way == "loopback" or why:
            stack.close()
            yield Hosts("loopback", why, ("127.0.0.1", "127.0.0.1"), ("lo", "lo"))
        else:
            yield Hosts("namespaces", "", ("10.77.0.1", "10.77.0.2"), interfaces, namespaces)


def _problem_with_namespaces(
    namespaces: tuple[str, str], interfaces: tuple[str, str], stack: contextlib.ExitStack
) -> str:
    """Makes the namespaces and the pair between them. Returns what is not permitted, or nothing."""
    try:
        for namespace in namespaces:
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "del", namespace)  # its end of the pair goes with it
        left, right = interfaces
        _ip("-n", namespaces[0], "link", "add", left, "type", "veth", "peer", "name", right, "netns", namespaces[1])
        for host, (namespace, interface) in enumerate(zip(namespaces, interfaces, strict=True)):
            _ip("-n", namespace, "addr", "add", f"10.77.0.{host + 1}/24", "dev", interface)
            for name in (interface, "lo"):
                _ip("-n", namespace, "link", "set", name, "up")
    except FileNotFoundError:
        return "there is no `ip` command"
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip() or str(error)
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def run_on(hosts: Hosts, *script: str) -> list[subprocess.Popen[str]]:
    """Starts an agent with RANKS_PER_HOST ranks of a script on each host. What they print is in `stdout`."""
    port = free_port()
    agents = []
    for host, (address, interface) in enumerate(zip(hosts.addresses, hosts.interfaces, strict=True)):
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={RANKS_PER_HOST}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.addresses[0]}:{port}", "--rdzv-id=sonic-ep"),
            *(
                f"--rdzv-conf=is_host={int(host == 0)},join_timeout=60",
                f"--local-addr={address}",
                f"--node-rank={host}",
            ),
        ]
        environment = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": interface,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        }
        agents.append(
            subprocess.Popen(
                hosts.command(host, [*torchrun, *script]),
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return agents


def bytes_sent_by(interface: str) -> int:
    """Returns how many bytes an interface of this network namespace has sent, frame headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"there is no interface {interface} here")


if __name__ == "__main__":
    with imitated_hosts() as found:
        sys.stdout.write(f"{found}\n")
