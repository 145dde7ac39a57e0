"""`SizeBound`: how large a step over symmetric memory may be that the host launches before it knows the sizes."""

from typing import NamedTuple, Self

from sonic_ep.routing import SplitSizes


class SizeBound(NamedTuple):
    """Group-wide bounds of a step's sizes, equal on all ranks.

    tokens: the rows of a region, at least the most tokens of any rank. rows: at least the pair-buffer rows of any
    destination rank. pairs: at least the pairs that any rank sends or receives.
    """

    tokens: int
    rows: int
    pairs: int

    @classmethod
    def needed_by(cls, sizes: SplitSizes) -> Self:
        """Returns the smallest bound of these sizes."""
        sent, received = map(sum, sizes.pairs_SQ), map(sum, zip(*sizes.pairs_SQ, strict=True))
        return cls(max(sizes.tokens_S), max(map(sum, zip(*sizes.rows_SQ, strict=True))), max(*sent, *received))

    def joined(self, other: "SizeBound | None") -> Self:
        """Returns the smallest bound of both."""
        return self if other is None else type(self)(*map(max, self, other))

    def holds(self, needed: "SizeBound") -> bool:
        """Returns True if a step that needs `needed` fits. The device decides the same in `bounded_plan`."""
        return needed.joined(self) == self
