"""The figures a user watches: against sets of pairs and plain loops.

Legend: S ranks of the EP group, T tokens on this rank, E experts, K experts per token.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sonic_ep.config import RoundingConfig, RouterConfig, load_config
from sonic_ep.groups import HostLayout
from sonic_ep.routers.rounding import round_counts
from sonic_ep.routers.route import select
from sonic_ep.routers.stats import RoutingStats, Traffic
from sonic_ep.routers.topk import TopK, compute_topk
from sonic_ep.routing import GroupCounts, RoutedPairs

MODES = ("apportion", "nearest", "up", "down", "stochastic", "pad", "off")


def route(
    tokens: list[int], E: int, K: int, rounding: RoundingConfig, seed: int = 0
) -> tuple[list[TopK], list[RoutedPairs], GroupCounts]:
    """Every rank's choice and selection, in one process."""
    generator = torch.Generator().manual_seed(seed)
    topks = [compute_topk(2 * torch.randn(T, E, generator=generator), None, K, RouterConfig()) for T in tokens]
    chosen_SE, tokens_S = torch.stack([topk.counts_E() for topk in topks]), torch.tensor(tokens)
    rounded = round_counts(chosen_SE, tokens_S, rounding, seed=seed)
    counts = GroupCounts(chosen_SE, rounded.rows_SE, rounded.pairs_SE, tokens_S, rounded.cut_S, int(rounded.t))
    recorded_pairs = [select(topk, counts, rank, rounding, training=True) for rank, topk in enumerate(topks)]
    return topks, recorded_pairs, counts


def pairs_of(topk: TopK) -> set[tuple[int, int]]:
    return {(token, expert) for token, ids in enumerate(topk.topk_ids_TK.tolist()) for expert in ids}


def selected(routed_pairs: RoutedPairs) -> set[tuple[int, int]]:
    return set(zip(routed_pairs.token_ids_N.tolist(), routed_pairs.expert_ids_N.tolist(), strict=True))


class Place(NamedTuple):
    """What `traffic` reads of an EPGroup."""

    rank: int
    size: int
    host_layout: HostLayout


@given(
    hosts=st.sampled_from(["a", "aa", "ab", "aabb", "abab", "aab", "abcd", "aabbcc"]),
    T=st.integers(0, 30),
    K=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 99),
)
def test_traffic_is_that_of_sets_of_rows(hosts: str, T: int, K: int, mode: str, seed: int) -> None:
    S, e = len(hosts), 2
    rounding = RoundingConfig(mode=mode, t=4, G=8)  # type: ignore[arg-type]
    topks, recorded_pairs, _ = route([T] * S, S * e, min(K, S * e), rounding, seed)
    for rank, (topk, routed_pairs) in enumerate(zip(topks, recorded_pairs, strict=True)):
        # Spare entries, as on a GPU.
        token_ids_N = torch.cat([routed_pairs.token_ids_N, torch.full((3,), -1, dtype=torch.int32)])
        group: Any = Place(rank, S, HostLayout(tuple(hosts)))
        stats = RoutingStats(topk.entropy_T(), token_ids_N, routed_pairs.counts)
        assert_traffic(stats.traffic(group), selected(routed_pairs), rank, hosts, e)
        assert_traffic(Traffic.of_topk(topk.topk_ids_TK, S * e, group), pairs_of(topk), rank, hosts, e)


def test_rows_a_token_of_deepseek_v3() -> None:
    """The table of docs/transports.md."""
    config, T = load_config("deepseek_v3"), 8192
    logits_TE, free = torch.randn(T, config.E), replace(config.router, num_groups=1, groups_per_token=1)
    wanted = {2: (2.85, 0.99, 3.25, 1.00), 4: (5.13, 2.35, 5.45, 2.72), 8: (6.54, 3.47, 6.71, 4.64)}
    for num_hosts, rows in wanted.items():
        group: Any = Place(0, 8 * num_hosts, HostLayout.imitated(8 * num_hosts, 8))
        found = []
        for router in (config.router, free):
            topk_ids_TK = compute_topk(logits_TE, None, config.K, router).topk_ids_TK
            traffic = Traffic.of_topk(topk_ids_TK, config.E, group)
            found += [int(traffic.to_remote_ranks) / T, int(traffic.to_remote_hosts) / T]
        assert found == pytest.approx(rows, abs=0.005)


def assert_traffic(traffic: Traffic, pairs: set[tuple[int, int]], rank: int, hosts: str, e: int) -> None:
    rows = {(token, expert // e) for token, expert in pairs}
    by_host = {(token, hosts[dst]) for token, dst in rows}
    per_token = [sum(token == other for other, _ in by_host) for token, _ in by_host]
    assert [int(value) for value in traffic] == [
        sum(dst != rank for _, dst in rows),
        sum(hosts[dst] != hosts[rank] for _, dst in rows),
        sum(host != hosts[rank] for _, host in by_host),
        max(per_token, default=0),
    ]


@given(
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    per_rank=st.integers(1, 3),
    mode=st.sampled_from(MODES),
    factor=st.sampled_from([None, 1.0]),
    seed=st.integers(0, 1000),
)
def test_shares_are_those_of_the_pairs_themselves(
    tokens: list[int], per_rank: int, mode: str, factor: float | None, seed: int
) -> None:
    E = len(tokens) * per_rank
    rounding = RoundingConfig(mode=mode, t=4, G=8, capacity_factor=factor)  # type: ignore[arg-type]
    topks, recorded_pairs, counts = route(tokens, E, min(2, E), rounding, seed)
    plain = sum(len(pairs_of(topk)) for topk in topks)
    changed = sum(
        len(pairs_of(topk) ^ selected(routed_pairs)) for topk, routed_pairs in zip(topks, recorded_pairs, strict=True)
    )
    rows, pairs = int(counts.rows_SE.sum()), sum(len(routed_pairs.token_ids_N) for routed_pairs in recorded_pairs)
    for T, topk, routed_pairs in zip(tokens, topks, recorded_pairs, strict=True):
        stats = RoutingStats(topk.entropy_T(), routed_pairs.token_ids_N, routed_pairs.counts)
        assert stats.changed_share.item() == pytest.approx(changed / max(plain, 1))
        assert stats.capacity_cut_share.item() == pytest.approx(int(counts.cut_S.sum()) / max(plain, 1))
        assert stats.pad_share.item() == pytest.approx((rows - pairs) / max(rows, 1))
        assert stats.tokens_without_expert.item() == T - len({token for token, _ in selected(routed_pairs)})
        assert stats.counts_E.tolist() == [
            sum((token, expert) in pairs_of(other) for other in topks for token in range(40)) for expert in range(E)
        ]
        assert stats.t == counts.t


def stats_of_counts(chosen: list[list[int]], rows: list[list[int]]) -> RoutingStats:
    """Stats of rank 0 where only the counts matter."""
    chosen_SE, rows_SE = torch.tensor(chosen), torch.tensor(rows)
    tokens_S = torch.full((len(chosen),), 4)
    counts = GroupCounts(chosen_SE, rows_SE, chosen_SE, tokens_S, torch.zeros_like(tokens_S), 1)
    topk = compute_topk(torch.zeros(4, chosen_SE.shape[1]), None, 1, RouterConfig())
    no_pairs = torch.empty(0, dtype=torch.int64)
    return RoutingStats(topk.entropy_T(), no_pairs, counts)


def test_loads_are_the_fullest_over_the_mean() -> None:
    stats = stats_of_counts([[10, 0, 5, 1], [2, 0, 5, 1]], [[16, 0, 8, 8], [8, 0, 8, 8]])
    # Rank 0 owns experts 0 and 1: 24 rows against 32; experts: 12, 0, 10, 2 pairs.
    assert stats.rank_load_max_over_mean.item() == pytest.approx(32 / 28)
    assert stats.expert_load_max_over_mean.item() == pytest.approx(12 / 6)


def test_loads_of_less_than_one_row_on_average_are_right_too() -> None:
    # A small batch over many experts: 2 pairs on one of 8 experts are 8 times the mean, not 2.
    stats = stats_of_counts([[2, 0, 0, 0, 0, 0, 0, 0], [0] * 8], [[2, 0, 0, 0, 0, 0, 0, 0], [0] * 8])
    assert stats.rank_load_max_over_mean.item() == pytest.approx(2.0)
    assert stats.expert_load_max_over_mean.item() == pytest.approx(8.0)


def test_no_pairs_at_all_give_finite_figures() -> None:
    stats = stats_of_counts([[0, 0], [0, 0]], [[0, 0], [0, 0]])
    for name in ("changed_share", "pad_share", "capacity_cut_share", "rank_load_max_over_mean", "entropy"):
        assert math.isfinite(getattr(stats, name).item()), name


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_entropy_is_the_mean_over_tokens_in_nats(score: str) -> None:
    config = RouterConfig(score=score)  # type: ignore[arg-type]
    topk = compute_topk(torch.randn(7, 5, dtype=torch.float64), None, 2, config)
    _, (routed_pairs,), _ = route([7], 5, 2, RoundingConfig(mode="off"))
    expected = 0.0
    for scores in topk.scores_TE.tolist():
        shares = [value / math.fsum(scores) for value in scores]
        expected -= math.fsum(share * math.log(share) for share in shares) / 7
    assert RoutingStats(
        topk.entropy_T(), routed_pairs.token_ids_N, routed_pairs.counts
    ).entropy.item() == pytest.approx(expected, rel=1e-9)


def test_entropy_of_a_uniform_and_of_a_certain_router() -> None:
    _, (routed_pairs,), _ = route([3], 8, 1, RoundingConfig(mode="off"))
    uniform = compute_topk(torch.zeros(3, 8), None, 1, RouterConfig())
    certain = compute_topk(1000.0 * torch.eye(8)[:3], None, 1, RouterConfig())
    assert RoutingStats(
        uniform.entropy_T(), routed_pairs.token_ids_N, routed_pairs.counts
    ).entropy.item() == pytest.approx(math.log(8), rel=1e-6)
    assert RoutingStats(certain.entropy_T(), routed_pairs.token_ids_N, routed_pairs.counts).entropy.item() == 0


def test_figures_carry_no_graph() -> None:
    topk = compute_topk(torch.randn(6, 4, requires_grad=True), None, 2, RouterConfig())
    _, (routed_pairs,), _ = route([6], 4, 2, RoundingConfig(mode="off"))
    stats = RoutingStats(topk.entropy_T(), routed_pairs.token_ids_N, routed_pairs.counts)
    assert not stats.entropy.requires_grad
    assert not stats.tokens_without_expert.requires_grad


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16])
def test_ratios_are_fp32_whatever_the_default(default: torch.dtype) -> None:
    counts_SE = torch.tensor([[40000, 0]])
    stats = RoutingStats(
        torch.zeros(40000),
        torch.zeros(0, dtype=torch.int32),
        GroupCounts(counts_SE, counts_SE, counts_SE, torch.tensor([40000]), torch.tensor([300]), torch.tensor(1)),
    )
    torch.set_default_dtype(default)
    try:
        figures = [stats.expert_load_max_over_mean, stats.rank_load_max_over_mean, stats.capacity_cut_share]
    finally:
        torch.set_default_dtype(torch.float32)
    assert [figure.dtype for figure in figures] == [torch.float32] * 3
    torch.testing.assert_close(torch.stack(figures), torch.tensor([2, 1, 0.0075]))
