"""Over symmetric memory, launch a step before the host knows its sizes, and redo it if the guess was too small.

There are two guesses, because counts change slowly:

1. Rows and lists (`SizePredictor`). We allocate 5/4 of what the last step needed and launch at once. The device knows
   the true counts. If they exceed the guess, it empties the plan (`bounded_plan`): every kernel becomes a no-op on
   every rank. Once the host has read the counts, it launches the step again with exact sizes.
2. The experts' forward GEMMs (`RowPredictor`, `guessed`). They are launched for 33/32 of the rows that this rank's
   experts had in the last step. The margin is smaller because H of that many rows is saved for backward. If the guess
   is too small, the device gives the experts no rows, and the host launches these GEMMs again.

The transport launches (symmetric.py), and so do the experts (sonic_ep/expert_parallel_mlp.py). Both ask here.

Example: in the last step the experts of each rank had 1,000 rows, of 1,000 pairs. This step gets lists for 1,250 of
each, and GEMMs for 1,031 rows. With 1,020 rows both guesses hold, and `cut_to` drops the spare ends. With 1,100 rows
the lists are right, and the host launches the GEMMs again. With 1,300 rows no rank has sent anything, and the host
launches all of it again.

Legend: S ranks of the EP group, P rows of the pair buffer, V pairs this rank receives.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Self, final

from sonic_ep.dispatch.protocol import PreparedDispatch
from sonic_ep.routing import SplitSizes

_SIZE_MARGIN = 5 / 4  # bound / what the last step needed
_DECAY = 15 / 16  # a bound shrinks at most by this factor a step, because the layers that share it need different sizes
_ROW_MARGIN = 33 / 32  # rows of the forward GEMMs / rows of the last step
_MAX_RECORDS = 1024  # layer keys


class SizeBound(NamedTuple):
    """Group-wide bounds of a step's sizes, equal on all ranks.

    tokens: the most tokens of any rank, or the rows of a region that all ranks have agreed on; must be exact. rows: at
    least the pair-buffer rows of any destination rank. pairs: at least the pairs that any rank sends or receives.
    """

    tokens: int
    rows: int
    pairs: int

    @classmethod
    def needed_by(cls, sizes: SplitSizes) -> Self:
        """Returns the smallest bound of these sizes."""
        sent, received = map(sum, sizes.pairs_SQ), map(sum, zip(*sizes.pairs_SQ, strict=True))
        return cls(max(sizes.tokens_S), max(map(sum, zip(*sizes.rows_SQ, strict=True))), max(*sent, *received))

    def next(self, before: "SizeBound | None", margin: float, decay: float) -> Self:
        """Returns a bound for the next step, if this is what the last one needed.

        before: the bound of the last step; the new one is smaller at most by the factor `decay`, unless tokens changed.
        margin: bound / what the last step needed.
        """
        before = self if before is None or before.tokens != self.tokens else before
        rows, pairs = (
            max(round(now * margin), round(then * decay)) for now, then in zip(self[1:], before[1:], strict=True)
        )
        return self._replace(rows=rows, pairs=pairs)

    def joined(self, other: "SizeBound | None") -> Self:
        """Returns the smallest bound of both."""
        return self if other is None else type(self)(*map(max, self, other))

    def with_tokens(self, least: int) -> Self:
        """Returns the same where regions have at least so many rows."""
        return self._replace(tokens=max(self.tokens, least))

    def holds(self, needed: "SizeBound") -> bool:
        """Returns True if a step that needs `needed` fits. The device decides the same in `bounded_plan`."""
        return needed.tokens == self.tokens and needed.rows <= self.rows and needed.pairs <= self.pairs


@final
class SizePredictor:
    """Predicts the SizeBound of the next step from what the last steps needed."""

    def __init__(self) -> None:
        self._bound: SizeBound | None = None
        self._own_tokens = 0

    def bound(self, own_tokens: int, max_pairs: int) -> SizeBound | None:
        """Returns the bound, or None without a last step or if this rank had another number of tokens in it.

        Other ranks may get None when this one does not, and then launch with exact sizes only. That is safe: if the
        bound holds, all ranks send the same; else the ranks that launched with it sent nothing. max_pairs: the capacity
        of the list buffers.
        """
        if self._bound is None or own_tokens != self._own_tokens:
            return None
        return self._bound._replace(pairs=min(self._bound.pairs, max_pairs))

    def record(self, needed: SizeBound, own_tokens: int) -> None:
        """Records what a step needed, and how many tokens this rank had."""
        self._bound, self._own_tokens = needed.next(self._bound, _SIZE_MARGIN, _DECAY), own_tokens


@final
class RowPredictor:
    """Predicts how many pair-buffer rows this rank's experts have in the next step.

    layer_key: identifies the experts, because layers differ in their numbers of rows. It must be equal in every step; a
    key that changes gets no prediction.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int]] = {}

    def rows(self, layer_key: int | None, num_tokens: int) -> int | None:
        """Returns the number of rows; None without a key, without a last step, or if that had other num_tokens."""
        num_rows, tokens = (0, -1) if layer_key is None else self._last.get(layer_key, (0, -1))
        return round(num_rows * _ROW_MARGIN) if tokens == num_tokens else None

    def record(self, layer_key: int | None, num_rows: int, num_tokens: int) -> None:
        """Records the rows and tokens of a step."""
        if layer_key is None:
            return
        if len(self._last) >= _MAX_RECORDS:
            self._last.clear()  # drops the keys of experts that are gone
        self._last[layer_key] = num_rows, num_tokens


def guessed(
    prepared: PreparedDispatch, num_rows: int, resolve_sizes: Callable[[], tuple[PreparedDispatch, bool]]
) -> PreparedDispatch:
    """Returns a speculative handle: experts compute on at most `num_rows` rows, before the host knows P.

    If P is larger, the device sets expert_starts_e to zero, so that the experts write nothing beyond `num_rows`. Spare
    entries of row_of_pair_P and weights_P must be zero.
    """
    handle, weights_P = prepared.handle, prepared.weights_P[:num_rows]
    starts_e = handle.expert_starts_e * (handle.expert_starts_e[-1:] <= weights_P.shape[0])
    handle = replace(handle, row_of_pair_P=handle.row_of_pair_P[:num_rows], expert_starts_e=starts_e)
    return PreparedDispatch(handle, weights_P, prepared.rows_RH, resolve_sizes)


def cut_to(prepared: PreparedDispatch, num_rows: int, num_pairs: int) -> PreparedDispatch:
    """Returns the same with lists cut to P = num_rows and V = num_pairs, of lists with spare capacity."""
    handle = replace(
        prepared.handle,
        row_of_pair_P=prepared.handle.row_of_pair_P[:num_rows],
        pairs_by_row_V=prepared.handle.pairs_by_row_V[:num_pairs],
        slot_V=prepared.handle.slot_V[:num_pairs],
    )
    return PreparedDispatch(handle, prepared.weights_P[:num_rows], prepared.rows_RH)
