"""Counts of every rank, as the rounding decision gets them: any, and such as show its corners."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from sonic_ep.config import RoundingConfig
from sonic_ep.routers.rounding import round_counts
from sonic_ep.routing import GroupCounts

MODES = ("apportion", "nearest", "up", "down", "stochastic", "pad", "off")
KINDS = ("empty", "full", "sparse", "skewed", "any")


class Case(NamedTuple):
    """Counts of every rank, tokens of every rank, and the two row multiples."""

    chosen: list[list[int]]
    tokens: list[int]
    t: int
    G: int

    def round_counts(
        self, mode: str, *, capacity_factor: float | None = None, training: bool = True, seed: int = 0
    ) -> GroupCounts:
        rounding = RoundingConfig(mode=mode, t=self.t, G=self.G, capacity_factor=capacity_factor)  # type: ignore[arg-type]
        chosen_SE, tokens_S = torch.tensor(self.chosen), torch.tensor(self.tokens)
        return round_counts(chosen_SE, tokens_S, rounding, training=training, seed=seed)

    def columns(self) -> Iterator[tuple[int, ...]]:
        """The counts of each expert, by rank."""
        return zip(*self.chosen, strict=True)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def counts_of_rank(kind: str, T: int, E: int, favourite: int) -> st.SearchStrategy[list[int]]:
    match kind:
        case "empty":
            return st.just([0] * E)
        case "full":
            return st.just([T] * E)
        case "sparse":
            each = st.one_of(st.just(0), st.just(0), st.just(0), st.integers(0, T))
            return st.lists(each, min_size=E, max_size=E)
        case "skewed":
            low = st.lists(st.integers(0, min(T, 3)), min_size=E, max_size=E)
            return low.map(lambda row: [*row[:favourite], T, *row[favourite + 1 :]])
    return st.lists(st.integers(0, T), min_size=E, max_size=E)


@st.composite
def cases(seed: st.DrawFn, max_ranks: int = 8) -> Case:
    ep_size = seed(st.integers(1, max_ranks))
    E = ep_size * seed(st.integers(1, 3))
    G = seed(st.sampled_from([1, 2, 6, 8, 16, 48, 128, 256]))
    t = seed(st.sampled_from(divisors(G)))
    tokens = seed(st.lists(st.one_of(st.integers(0, 20), st.integers(0, 700)), min_size=ep_size, max_size=ep_size))
    kind = seed(st.sampled_from(KINDS))
    favourite = seed(st.integers(0, E - 1))
    return Case([seed(counts_of_rank(kind, T, E, favourite)) for T in tokens], tokens, t, G)


def assert_same(rounded: GroupCounts, other: GroupCounts) -> None:
    for name in ("rows_SE", "pairs_SE", "cut_S", "t"):
        assert torch.equal(getattr(rounded, name), getattr(other, name)), name
