"""The rates of a rank over torch.distributed: to itself, within its host and to other hosts, to one peer and to all.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT benchmarks/links.py
    torchrun --nproc-per-node 4 benchmarks/links.py --device cpu --ranks-per-host 2

Every rank sends --mib at the same time, through the communicator of all ranks, as the hops of an expert-parallel layer
do. Medians over --rounds of ten exchanges, and the slowest rank:

    ms      of an exchange
    gb_s    GB/s that a rank sends in it

"to its number on all other hosts" is what two hops cross by, and the --link of `sonic-ep plan`. Rows within a host that
are as slow as those between hosts say that NCCL has too few channels (docs/multi_host.md).
"""

import statistics
from collections.abc import Callable

import torch

from runs import group_of_ranks, leave, new_record, parser_of, say, write
from sonic_ep import EPGroup
from sonic_ep.groups import HostLayout
from timing import Clock

EXCHANGES, UNTIMED = 10, 3
ROW_BYTES = 4096


def exchanges(layout: HostLayout, rows: int) -> dict[str, list[list[int]]]:
    """Returns, by exchange, the rows that each rank sends to each: as equal parts as they can be of `rows`."""
    size, per_host = len(layout.hosts_S), layout.ranks_per_host

    def host_of(rank: int) -> list[int]:
        first = rank - rank % per_host
        return [*range(first, first + per_host)]

    def after(rank: int, ranks: list[int]) -> list[int]:
        """The other ranks, from the next one on."""
        place = ranks.index(rank)
        return ranks[place + 1 :] + ranks[:place]

    def same_number(rank: int) -> list[int]:
        return after(rank, [*range(rank % per_host, size, per_host)])

    peers: dict[str, Callable[[int], list[int]]] = {
        "to itself": lambda rank: [rank],
        "to one rank of its host": lambda rank: after(rank, host_of(rank))[:1],
        "to all others of its host": lambda rank: after(rank, host_of(rank)),
        "to its number on one other host": lambda rank: same_number(rank)[:1],
        "to its number on all other hosts": same_number,
        "to all other ranks": lambda rank: after(rank, [*range(size)]),
    }
    return {
        name: [_parts(rows, peers_of(rank), size) for rank in range(size)]
        for name, peers_of in peers.items()
        if peers_of(0)
    }


def _parts(rows: int, peers: list[int], size: int) -> list[int]:
    share, rest = divmod(rows, len(peers))
    by_peer = {peer: share + (i < rest) for i, peer in enumerate(peers)}
    return [by_peer.get(rank, 0) for rank in range(size)]


def measure(rows_SQ: list[list[int]], group: EPGroup, clock: Clock, rounds: int) -> dict[str, float]:
    send, receive = rows_SQ[group.rank], [sent[group.rank] for sent in rows_SQ]
    rows = torch.randn(sum(send), ROW_BYTES // 4, device=clock.device)
    turns = [
        clock.back_to_back(lambda: group.all_to_all(rows, send, receive), EXCHANGES, untimed=UNTIMED)[0]
        for _ in range(rounds)
    ]
    ms = clock.largest({"ms": statistics.median(turns)})["ms"]
    return {"ms": ms, "gb_s": rows.nbytes / ms / 1e6}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks-per-host", type=int, help="take so many consecutive ranks for a host")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    group = group_of_ranks(options.device)
    layout, clock = group.hosts(options.ranks_per_host), Clock(group, options.device)
    if layout.problem is not None:
        raise SystemExit(layout.problem)
    found: dict[str, dict[str, float]] = {}
    record = new_record(options.device, ranks_per_host=layout.ranks_per_host, mib=options.mib, exchanges=found)
    for name, rows_SQ in exchanges(layout, options.mib * 2**20 // ROW_BYTES).items():
        found[name] = times = measure(rows_SQ, group, clock, options.rounds)
        say(f"{name:34} {times['ms']:9.3f} ms {times['gb_s']:8.1f} GB/s")
        write(record, options.out)
    leave()


if __name__ == "__main__":
    main()
