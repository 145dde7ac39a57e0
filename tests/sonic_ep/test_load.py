"""Loads of the slowest rank: exact where routes can be counted by hand, and as skewed as was asked."""

import pytest
import torch

from sonic_ep import MoEConfig, RouterConfig, load_config
from sonic_ep.cli.load import MAX_TOKENS, DrawnRoutes, slowest_gpu


def test_loads_are_counted() -> None:
    """Four ranks of one expert, on two hosts. Host 0 gets rows of tokens 0 and 1, host 1 of all three."""
    routes = DrawnRoutes(MoEConfig(d=8, n=4, E=4, K=2), 3, skew=0)
    routes.topk_ids_TK = torch.tensor([[0, 2], [1, 2], [2, 3]])
    load = routes.load(S=4, D=2)
    assert load.pairs == load.rows == 3 / (6 / 4)
    assert load.hosts == 3 / (5 / 2)
    one_host = routes.load(S=2, D=2)
    assert (one_host.pairs, one_host.rows, one_host.hosts) == (4 / 3, 3 / (5 / 2), 1)


def test_draws_follow_the_seed_and_stay_small() -> None:
    config = load_config("tiny")
    first, again, other = (DrawnRoutes(config, 500, skew=0.5, seed=seed).topk_ids_TK for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert all(len(set(experts)) == config.K for experts in first[:50].tolist())
    assert DrawnRoutes(config, 10**9, skew=0).topk_ids_TK.shape[0] == MAX_TOKENS


def test_skew_is_the_deviation_of_the_popularity() -> None:
    """With K = 1 an expert is chosen in proportion to its popularity."""
    config = MoEConfig(d=8, n=4, E=256, K=1, router=RouterConfig(renormalize=False))
    for skew in (0.2, 0.5):
        chosen = DrawnRoutes(config, MAX_TOKENS, skew=skew, seed=3).topk_ids_TK.flatten()
        counts = torch.bincount(chosen, minlength=256).double()
        assert float(counts.std() / counts.mean()) == pytest.approx(skew, rel=0.15)


def test_more_skew_and_more_ranks_are_worse() -> None:
    config = load_config("deepseek_v3")
    even, skewed = (DrawnRoutes(config, 2**14, skew=skew) for skew in (0, 0.35))
    assert 1 < even.load(8, 8).pairs < skewed.load(8, 8).pairs < skewed.load(64, 8).pairs
    assert skewed.load(64, 8).hosts < skewed.load(64, 8).rows


def test_slowest_gpu() -> None:
    """The expected largest of 8 and of 1000 normal values is 1.42 and 3.24 deviations above their mean."""
    assert slowest_gpu(1, 0.03) == 1
    assert slowest_gpu(8, 0.1, draws=5000) == pytest.approx(1.142, abs=0.005)
    assert slowest_gpu(1000, 0.1) == pytest.approx(1.324, abs=0.01)
