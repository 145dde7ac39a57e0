"""The contract of the rounding decision's kernel. routers/rounding.py holds its plain twin, and says what is decided.

Legend: S source ranks, E experts.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class RoundingRule(NamedTuple):
    """A RoundingConfig as integers, for one number of ranks and experts.

    mode: of the config. t: the chunk multiple below every threshold; thresholds: (pairs of the group, t from there on),
    ascending, at most 4. pads_below: with fewer pairs than that chunks keep the plain top-K pairs. capacity:
    numerator and denominator of the factor, None without.
    """

    mode: str
    G: int
    t: int
    thresholds: tuple[tuple[int, int], ...]
    pads_below: int
    capacity: tuple[int, int] | None


class RoundingKernel(Protocol):
    def round_counts(
        self, chosen_SE: Tensor, tokens_S: Tensor, seed: Tensor, rule: RoundingRule
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """rows_SE, pairs_SE, cut_S and t of `RoundedCounts`, int64. draw: (), integer."""
        ...
