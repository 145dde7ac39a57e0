"""The predicted share of changed assignments: against its published figures, against measurement, and in "auto".

rho is T*K/(E*128): tiles of 128 rows per (rank, expert).

Legend: S ranks of the EP group, E experts.
"""

from typing import NamedTuple

import pytest
import torch

from sonic_ep.config import RoundingConfig
from sonic_ep.routers.rounding import chunk_multiples, predicted_change, round_counts
from sonic_ep.routing import GroupCounts

BUDGET = 0.066
CHUNKS = (128, 64, 32, 16)


def even_counts(rho: float, ep_size: int, E: int = 64) -> torch.Tensor:
    """(S, E) counts of exactly rho tiles a chunk on average, rounded up in all to a whole number of pairs."""
    total = -int(-rho * 128 * ep_size * E // 1)
    counts = torch.full((ep_size * E,), total // (ep_size * E))
    counts[: total % (ep_size * E)] += 1
    return counts.view(ep_size, E)


def auto(chosen_SE: torch.Tensor) -> GroupCounts:
    return round_counts(chosen_SE, torch.full((chosen_SE.shape[0],), 10**6), RoundingConfig())


class Measured(NamedTuple):
    share: float
    rho: float
    t: int
    pads: bool


def measure(rho: float, ep_size: int, t: int | None, spread: float, seed: int) -> Measured:
    """Poisson counts around Gamma-distributed expert popularity; the share of them that `apportion` changes."""
    generator = torch.Generator().manual_seed(seed)
    E = 2048 // ep_size
    # A Gamma of integer shape is a sum of exponentials, and those a generator can draw.
    shape = round(1 / spread)
    popularity_E = -torch.rand(shape, E, generator=generator, dtype=torch.float64).log().mean(0)
    chosen_SE = torch.poisson((rho * 128 * popularity_E).expand(ep_size, E), generator=generator).long()
    rounding = RoundingConfig() if t is None else RoundingConfig(t=t)
    rounded = round_counts(chosen_SE, torch.full((ep_size,), 10**6), rounding)
    changed = (rounded.pairs_SE - chosen_SE).abs().sum() / chosen_SE.sum()
    return Measured(
        changed.item(),
        chosen_SE.sum().item() / (128 * chosen_SE.numel()),
        int(rounded.t),
        torch.equal(rounded.pairs_SE, chosen_SE),
    )


def least_rho(t: int, ep_size: int) -> float:
    """Where the prediction meets the budget; it falls as 1 / rho."""
    return predicted_change(1.0, t, 128, ep_size) / BUDGET


@pytest.mark.parametrize(("t", "percent"), [(128, 26.0), (64, 13.2), (32, 7.0), (16, 4.3)])
def test_prediction_is_the_published_one_for_8_ranks(t: int, percent: float) -> None:
    for rho in (0.5, 1.0, 4.0):
        assert predicted_change(rho, t, 128, 8) == pytest.approx(percent / 100 / rho, rel=0.02)


def test_prediction_on_one_rank_is_a_quarter_tile_whatever_t() -> None:
    assert [predicted_change(2.0, t, 128, 1) for t in CHUNKS] == [0.125] * 4


@pytest.mark.parametrize("spread", [1 / 2, 1 / 4, 1 / 16], ids=["skewed", "usual", "even"])
@pytest.mark.parametrize("t", CHUNKS)
@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_measured_change_is_the_predicted_one(ep_size: int, t: int, spread: float) -> None:
    for seed, times in enumerate((1.0, 1.5, 2.5, 5.0)):
        measured = measure(times * least_rho(t, ep_size), ep_size, t, spread, seed)
        ratio = measured.share / predicted_change(measured.rho, t, 128, ep_size)
        assert 1 / 1.3 < ratio < 1.3, f"{times} x the least rho: measured / predicted = {ratio:.2f}"


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_auto_keeps_the_measured_change_near_the_budget(ep_size: int) -> None:
    for seed, rho in enumerate((0.1, 0.5, 0.7, 1.0, 1.2, 1.8, 2.2, 3.0, 3.7, 4.5, 8.0)):
        measured = measure(rho, ep_size, None, 1 / 4, seed)
        if measured.pads:
            assert measured.share == 0
            assert measured.rho < least_rho(16, ep_size)
            continue
        ratio = measured.share / predicted_change(measured.rho, measured.t, 128, ep_size)
        assert 1 / 1.3 < ratio < 1.3, f"rho {rho}, t {measured.t}: measured / predicted = {ratio:.2f}"
        assert measured.share < 1.3 * BUDGET


@pytest.mark.parametrize(
    ("rho", "t"),
    [(100.0, 128), (4.0, 128), (3.85, 64), (2.0, 64), (1.95, 32), (1.1, 32), (1.03, 16), (0.68, 16)],
)
def test_auto_takes_the_largest_t_within_budget_for_8_ranks(rho: float, t: int) -> None:
    for E in (8, 64, 512):
        rounded = auto(even_counts(rho, 8, E))
        assert int(rounded.t) == t
        assert (rounded.rows_SE % t == 0).all()
        assert (rounded.rows_SE.sum(0) % 128 == 0).all()


def test_auto_pads_when_no_t_is_within_budget() -> None:
    for rho in (0.64, 0.3, 0.01, 0.0):
        chosen_SE = even_counts(rho, 8)
        rounded = auto(chosen_SE)
        assert int(rounded.t) == 16
        assert torch.equal(rounded.pairs_SE, chosen_SE)
        assert torch.equal(rounded.rows_SE, (chosen_SE + 15) // 16 * 16)


def test_auto_never_takes_a_smaller_t_for_more_tokens() -> None:
    for ep_size in (1, 2, 3, 4, 8):
        taken = [int(auto(even_counts(rho / 8, ep_size, 16)).t) for rho in range(48)]
        assert taken == sorted(taken)


@pytest.mark.parametrize(
    ("G", "multiples"), [(128, CHUNKS), (256, CHUNKS), (64, (64, 32, 16)), (48, (16,)), (96, (32, 16)), (24, (24,))]
)
def test_auto_chooses_among_the_usual_chunks_that_divide_G(G: int, multiples: tuple[int, ...]) -> None:
    assert chunk_multiples(G) == multiples


@pytest.mark.parametrize("mode", ["nearest", "up", "down", "stochastic"])
def test_auto_is_the_whole_tile_where_each_rank_rounds_alone(mode: str) -> None:
    chosen_SE = torch.tensor([[100, 300], [7, 0]])
    rounded = round_counts(chosen_SE, torch.tensor([400, 400]), RoundingConfig(mode=mode, G=64))  # type: ignore[arg-type]
    assert int(rounded.t) == 64
    assert (rounded.rows_SE % 64 == 0).all()
