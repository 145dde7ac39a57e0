"""Expected rows of a token: against enumeration of all choices, against drawn routes, and published figures."""

import itertools
from math import comb

import pytest

from sonic_ep import MoEConfig, RouterConfig, load_config
from sonic_ep.cli.expected_rows import expected_parts, rows_per_token
from sonic_ep.cli.load import DrawnRoutes


@pytest.mark.parametrize(("groups", "taken"), [(1, 1), (2, 1), (4, 2), (4, 3), (3, 2)])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 6, 12])
def test_all_choices_of_groups_and_experts(groups: int, taken: int, parts: int) -> None:
    """Blocks may be part of a group, be several groups, or lie across their borders."""
    config = MoEConfig(d=8, n=4, E=12, K=3, router=RouterConfig(num_groups=groups, groups_per_token=taken))
    found = []
    for chosen in itertools.combinations(range(groups), taken):
        candidates = [expert for expert in range(12) if expert * groups // 12 in chosen]
        found += [
            len({expert * parts // 12 for expert in experts}) for experts in itertools.combinations(candidates, 3)
        ]
    assert expected_parts(config, parts) == pytest.approx(sum(found) / len(found), abs=1e-12)


@pytest.mark.parametrize(("S", "ranks", "hosts"), [(16, 3.30, 1.00), (32, 5.52, 2.72)])
def test_rows_that_cross_of_qwen3_30b_a3b(S: int, ranks: float, hosts: float) -> None:
    """The figures that two_hop was asked for, with 8 GPUs a host, and their times at 48 GB/s."""
    rows = rows_per_token(load_config("qwen3_30b_a3b"), S, 8)
    assert (round(rows.remote_ranks, 2), round(rows.remote_hosts, 2)) == (ranks, hosts)
    ms = {16: (2.31, 0.70), 32: (3.86, 1.90)}[S]
    assert tuple(round(8192 * each * 4096 / 48e6, 2) for each in (rows.remote_ranks, rows.remote_hosts)) == ms


def test_the_parts_of_the_rows() -> None:
    rows = rows_per_token(load_config("qwen3_30b_a3b"), 32, 8)
    assert rows.ranks == pytest.approx(32 * (1 - comb(124, 8) / comb(128, 8)))
    assert rows.local_ranks + rows.remote_ranks == pytest.approx(rows.ranks * 31 / 32)
    assert (rows.local_pairs, rows.remote_pairs) == (8 * 7 / 32, 8 * 24 / 32)
    alone = rows_per_token(load_config("qwen3_30b_a3b"), 8, 8)
    assert (alone.remote_ranks, alone.remote_hosts, alone.hosts) == (0, 0, 1)


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "kimi_k2", "mixtral_8x7b"])
def test_uniform_routing_as_drawn(name: str) -> None:
    config = load_config(name)
    routes = DrawnRoutes(config, 2**15, skew=0, seed=1)
    for parts in (2, 4, 8):
        assert float(routes.tokens_by_block(parts).sum()) / 2**15 == pytest.approx(
            expected_parts(config, parts), rel=0.01
        )


def test_the_group_limit_of_deepseek_v3() -> None:
    """Of 8 groups a token takes 4: as uniform choices, it needs 3.63 hosts of 8. Its router takes the groups with the
    two best experts, and so needs 9 % more of them, nearly always all 4."""
    config = load_config("deepseek_v3")
    expected = expected_parts(config, 8)
    assert expected == pytest.approx(4 * (1 - comb(96, 8) / comb(128, 8)))
    drawn = float(DrawnRoutes(config, 2**14, skew=0, seed=1).tokens_by_block(8).sum()) / 2**14
    assert 1.08 < drawn / expected < 1.10
    assert drawn < 4
