"""Room for a step that is launched before the host knows its sizes: guesses, which the device holds up.

Where steps are much like the last one, lists of a step have room if they are a little longer than the last one's. The
host need not wait for sizes before it launches what fills them. The device knows them, and takes the plan for one of
nothing if they exceed the room; then nobody sends, and when the host has read the sizes, the step is launched anew. So
it is with what experts compute on these lists (`PreparedDispatch.speculative`), in less room, since backward keeps
that.

Legend: S ranks of the EP group.
"""

from typing import NamedTuple, Self, final

from sonic_ep.routing import SplitSizes

_SIZE_MARGIN = 5 / 4  # than the last step needed
_DECAY = 15 / 16  # of the room, at most, from step to step, since layers differ
_ROW_MARGIN = 33 / 32  # rows of what is kept for backward
_MAX_RECORDS = 1024


class SizeBound(NamedTuple):
    """tokens: the most of any rank, exactly. rows, pairs: at least what any rank receives, and sends or receives."""

    tokens: int
    rows: int
    pairs: int

    @classmethod
    def needed_by(cls, sizes: SplitSizes) -> Self:
        sent, received = map(sum, sizes.pairs_SQ), map(sum, zip(*sizes.pairs_SQ, strict=True))
        return cls(max(sizes.tokens_S), max(map(sum, zip(*sizes.rows_SQ, strict=True))), max(*sent, *received))

    def holds(self, needed: "SizeBound") -> bool:
        return needed.tokens == self.tokens and needed.rows <= self.rows and needed.pairs <= self.pairs


@final
class SizePredictor:
    """Room for the next step, by what the last ones needed."""

    def __init__(self) -> None:
        self._bound: SizeBound | None = None
        self._own_tokens = 0

    def bound(self, own_tokens: int, max_pairs: int) -> SizeBound | None:
        """None if this rank's tokens are not as many as in the last step; of the others' the same is believed. Ranks
        may differ in what they do then. max_pairs: that there are buffers for."""
        if self._bound is None or own_tokens != self._own_tokens:
            return None
        return self._bound._replace(pairs=min(self._bound.pairs, max_pairs))

    def record(self, needed: SizeBound, own_tokens: int) -> None:
        """What a step has needed."""
        before = self._bound or needed
        rows, pairs = (
            max(round(now * _SIZE_MARGIN), round(then * _DECAY))
            for now, then in zip(needed[1:], before[1:], strict=True)
        )
        self._bound, self._own_tokens = SizeBound(needed.tokens, rows, pairs), own_tokens


@final
class RowPredictor:
    """How many rows the next step's experts may have on this rank, by what the last one's had. `layer_key`: a number
    that experts keep from step to step, like an address of their weights, for layers differ."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}

    def rows(self, layer_key: int | None, num_tokens: int) -> int | None:
        """None if there was no step yet, or it had another number of tokens, or nobody asks."""
        num_rows, tokens = (0, -1) if layer_key is None else self._last.get(layer_key, (0, -1))
        return round(num_rows * _ROW_MARGIN) if tokens == num_tokens else None

    def record(self, layer_key: int | None, num_rows: int, num_tokens: int) -> None:
        """What a step has had."""
        if layer_key is None:
            return
        if len(self._last) >= _MAX_RECORDS:
            self._last.clear()  # of numbers that were not kept
        self._last[layer_key] = num_rows, num_tokens
