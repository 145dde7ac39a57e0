"""How many rows of a token travel, on average: exact expectations for uniform routing.

A part is a set of neighbouring experts: all experts of a rank, or of a host. A token sends one row to each part that
has one of its K experts. Routing is uniform: every K experts are equally likely. Under a group limit every
`groups_per_token` of the g expert groups are, and then every K experts of those groups.

    P(a part of m experts is needed) = 1 - C(E - m, K) / C(E, K)                without group limit

docs/scaling.md has examples, and says how far a real router with group limits is from this.

Legend: S ranks of the EP group, A hosts of the EP group, D ranks of a host, E experts, K experts per token, g expert
groups.
"""

import math
from collections import defaultdict
from typing import NamedTuple

from sonic_ep.config import MoEConfig


class RowsPerToken(NamedTuple):
    """Expected rows of one token, from a rank's point of view. Remote: on other hosts. Local: on this host.

    ranks: distinct destination ranks, this one included. local_ranks: the ranks of this host, without this rank.
    remote_ranks: the ranks of other hosts. hosts: distinct destination hosts, this one included.
    remote_hosts: the others.
    local_pairs, remote_pairs: pairs for other ranks of this host, and for other hosts.
    """

    ranks: float
    local_ranks: float
    remote_ranks: float
    hosts: float
    remote_hosts: float
    local_pairs: float
    remote_pairs: float


def rows_per_token(config: MoEConfig, S: int, D: int) -> RowsPerToken:
    """Returns the expectations for S ranks on S / D hosts. D must divide S, and S must divide config.E."""
    ranks, hosts = (expected_parts(config, parts) for parts in (S, S // D))
    return RowsPerToken(
        ranks=ranks,
        local_ranks=ranks * (D - 1) / S,
        remote_ranks=ranks * (S - D) / S,
        hosts=hosts,
        remote_hosts=hosts * (S - D) / S,
        local_pairs=config.K * (D - 1) / S,
        remote_pairs=config.K * (S - D) / S,
    )


def expected_parts(config: MoEConfig, parts: int) -> float:
    """Returns how many of `parts` equal blocks of consecutive experts a token needs, on average."""
    size = config.E // parts
    return sum(_reached(config, part * size, size) for part in range(parts))


def _reached(config: MoEConfig, first: int, size: int) -> float:
    """Returns the probability that a token needs one of the experts [first, first + size)."""
    groups, taken, K = config.router.num_groups, config.router.groups_per_token, config.K
    width = config.E // groups
    overlaps = [max(0, min(first + size, (g + 1) * width) - max(first, g * width)) for g in range(groups)]
    # By the number of groups taken and the experts of the part in them: how many choices of groups have both.
    choices: dict[tuple[int, int], int] = {(0, 0): 1}
    for overlap in overlaps:
        longer = defaultdict(int, choices)
        for (count, inside), ways in choices.items():
            if count < taken:
                longer[count + 1, inside + overlap] += ways
        choices = longer
    candidates = taken * width
    missed = sum(
        ways * math.comb(candidates - inside, K) for (count, inside), ways in choices.items() if count == taken
    )
    return 1 - missed / (math.comb(groups, taken) * math.comb(candidates, K))
