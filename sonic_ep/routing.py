"""`Routing`: which token goes to which expert with which weight, as integers that are replayed and weights that train.

What passes from the router to dispatch. Any number of experts per token, from none to all.

Legend: S ranks of the EP group, T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from sonic_ep.async_d2h import AsyncD2H
from sonic_ep.groups import EPGroup

INDEX_DTYPE = torch.int32  # of every per-pair and per-row index list


class GroupCounts(NamedTuple):
    """The group-wide integers of one routing: the same on every rank, int64, on the device of the routing.

    chosen_SE: plain top-K counts C[S, E]. rows_SE: n[S, E], rows of each (source rank, expert) chunk. pairs_SE: how
    many of those are real pairs, the rest being padding of weight zero. tokens_S: T of each rank. cut_S: pairs that
    capacity took from each owner rank. t: () the chunk multiple in force.
    """

    chosen_SE: Tensor
    rows_SE: Tensor
    pairs_SE: Tensor
    tokens_S: Tensor
    cut_S: Tensor
    t: Tensor


class SplitSizes(NamedTuple):
    """What the host knows of counts. tokens_S: of each rank. rows_SQ, pairs_SQ: rows, and the real pairs among them,
    from each rank to the experts of each owner Q."""

    tokens_S: tuple[int, ...]
    rows_SQ: tuple[tuple[int, ...], ...]
    pairs_SQ: tuple[tuple[int, ...], ...]

    def num_rows(self, dst_rank: int) -> int:
        """P: the rows that an owner receives."""
        return sum(rows_Q[dst_rank] for rows_Q in self.rows_SQ)

    def pairs_in(self, dst_rank: int) -> tuple[int, ...]:
        """The real pairs that an owner receives, from each rank."""
        return tuple(pairs_Q[dst_rank] for pairs_Q in self.pairs_SQ)


@final
class AsyncSplitSizes:
    """Sizes on their way to the host from the moment they are decided, and with them what the ranks report: whoever
    needs them does not wait for what was launched since.

    on_device: of `pack_split_sizes` (kernels/dispatch/split_sizes/reference.py), for that many ranks. check: given the
    reports, rank after rank, raises what is wrong; None if nothing can be. zeroed_on_error: no rank sends anything
    then, whatever was launched; see kernels/route/status/reference.py.
    """

    def __init__(
        self,
        on_device: Tensor,
        num_ranks: int,
        check: Callable[[list[int]], None] | None = None,
        *,
        zeroed_on_error: bool = False,
    ) -> None:
        self.on_device = on_device
        self._copy = AsyncD2H(on_device)
        self._num_ranks = num_ranks
        self._check = check
        self._known: tuple[SplitSizes, list[int]] | None = None
        # What was raised: told once by a collective, and again without. Not the error, which would hold its frames.
        self._raised: tuple[type[Exception], str] | None = None
        self._zeroed_on_error = zeroed_on_error
        self._undo: list[Callable[[], object]] = []

    def read(self) -> SplitSizes:
        """The sizes; waits for them. Raises what the ranks' reports say is wrong."""
        sizes, reports = self._unpacked()
        try:
            if self._raised is not None:
                kind, message = self._raised
                raise kind(message) from None
            if self._check is not None:
                self._check(reports)
                self._check = None
        except (RuntimeError, ValueError) as error:
            self._raised = type(error), str(error)
            for undo in self._undo:
                undo()
            raise
        finally:
            self._undo.clear()
        return sizes

    @property
    def is_ready(self) -> bool:
        """Would `read` not wait?"""
        return self._copy.is_ready

    @property
    def may_launch_unchecked(self) -> bool:
        """Does no harm come of launching what exchanges rows, and checking then?"""
        return self._check is None or self._zeroed_on_error

    def on_failure(self, undo: Callable[[], object]) -> None:
        """What is to be undone if something proves wrong."""
        if self._check is not None:
            self._undo.append(undo)

    def check(self) -> None:
        """Raises likewise; waits only if there can be something to raise."""
        if self._check is not None:
            self.read()

    def _unpacked(self) -> tuple[SplitSizes, list[int]]:
        if self._known is None:
            values, S = self._copy.read().tolist(), self._num_ranks
            tables = [tuple(values[start : start + S]) for start in range(0, S + 2 * S * S, S)]
            self._known = (
                SplitSizes(tables[0], tuple(tables[1 : 1 + S]), tuple(tables[1 + S :])),
                values[S + 2 * S * S :],
            )
        return self._known


class BalanceCounts(NamedTuple):
    """What a balance loss counts. ids_TK: int64, K experts of each token. times_SE: int64, how many tokens of each rank
    have each expert there; read for the "global" loss only."""

    ids_TK: Tensor
    times_SE: Tensor


@dataclass(frozen=True, slots=True)
class RoutedPairs:
    """The decided integers of one routing on this rank. Replaying it reproduces the routing exactly.

    topk_ids_TK: int64, the plain top-K choice. token_ids_N: int32, the tokens of each expert's pairs, by expert, then
    token; -1 where an entry is spare, see Routing. expert_ids_N: int64. chosen_N: bool, False for pairs that rounding
    added. counts: see Counts. max_rows, max_received, split_sizes: see Routing. counted: if not topk_ids_TK and
    counts.chosen_SE.
    """

    topk_ids_TK: Tensor
    token_ids_N: Tensor
    expert_ids_N: Tensor
    chosen_N: Tensor
    counts: GroupCounts
    max_rows: int | None
    max_received: int | None = None
    split_sizes: AsyncSplitSizes | None = None
    balance_counts: BalanceCounts | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """This rank's pairs in send order (by expert, then token), and every rank's counts.

    weights_N: (N,) combine weights, floating point, differentiable. token_ids_N: (N,) int32; behind the pairs that the
    counts tell there may be spare entries, whose weights count for nothing. num_tokens: T. max_rows: what the rows of
    this rank's chunks cannot exceed; None if nothing is spare and no row is padding, so that there are N of both.
    max_received: what the rows for the experts of any rank cannot exceed, if no rank has more than T tokens; None if
    only the counts tell. split_sizes: the sizes, where they were sent to the host ahead of the rest.
    """

    weights_N: Tensor
    token_ids_N: Tensor
    counts: GroupCounts
    num_tokens: int
    max_rows: int | None = None
    max_received: int | None = None
    split_sizes: AsyncSplitSizes | None = None

    @property
    def tile_aligned(self) -> bool:
        """Do experts have whole tiles of rows, as a rule? Rounding or capacity made the counts then."""
        return self.max_rows is not None

    def check(self) -> None:
        """Raises what the ranks reported when this was decided, on all of them alike. Waits for their reports, where
        there are any. To be called before anything is exchanged, but by a transport of which nobody sends then anyhow.

        Raises:  ValueError or RuntimeError, see `gather_counts` in routers/count_exchange.py.
        """
        if self.split_sizes is not None:
            self.split_sizes.check()

    @contextmanager
    def status_first(self) -> Generator[None, None, None]:
        """What the ranks have reported is raised before any other error that what is done here raises."""
        try:
            yield
        except Exception:
            self.check()
            raise

    @classmethod
    def of(cls, routed_pairs: RoutedPairs, weights_N: Tensor, num_tokens: int) -> Self:
        """The pairs of a selection with their weights."""
        s = routed_pairs
        return cls(weights_N, s.token_ids_N, s.counts, num_tokens, s.max_rows, s.max_received, s.split_sizes)

    @classmethod
    def from_pairs(
        cls,
        token_ids_N: Tensor,
        expert_ids_N: Tensor,
        weights_N: Tensor,
        *,
        num_tokens: int,
        E: int,
        group: EPGroup,
    ) -> Self:
        """A routing from any list of (token, expert, weight), in any order: one all-gather of counts.

        Shapes:  token_ids_N, expert_ids_N (N,) integers; weights_N (N,) floating point, may require grad.
        Raises:  ValueError, on every rank: a length, a token or an expert out of range, the same pair twice, an E that
                 the ranks do not divide; an E or a dtype of gates that they do not agree about.
        """
        problem = _problem_with_pairs(token_ids_N, expert_ids_N, weights_N, num_tokens, E)
        if E % group.size:
            problem = f"E={E} experts do not divide over ep_size={group.size} ranks"
        group.raise_together(problem, E=E, weights_dtype=str(weights_N.dtype))
        order_N = torch.argsort(expert_ids_N.long() * max(num_tokens, 1) + token_ids_N.long())
        counts_E = torch.bincount(expert_ids_N, minlength=E)
        header = torch.cat([counts_E, counts_E.new_tensor([num_tokens])])
        gathered = group.all_gather(header)
        counts_SE, tokens_S = gathered[:, :E], gathered[:, E]
        counts = GroupCounts(
            counts_SE, counts_SE, counts_SE, tokens_S, torch.zeros_like(tokens_S), tokens_S.new_ones(())
        )
        return cls(weights_N[order_N], token_ids_N[order_N].to(INDEX_DTYPE), counts, num_tokens)


def _problem_with_pairs(
    token_ids_N: Tensor, expert_ids_N: Tensor, weights_N: Tensor, num_tokens: int, E: int
) -> str | None:
    shapes = [tuple(values.shape) for values in (token_ids_N, expert_ids_N, weights_N)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        return f"token_ids, expert_ids and weights must have one shape (N,), got {shapes}"
    if not weights_N.dtype.is_floating_point:
        return f"weights must be floating point, got {weights_N.dtype}"
    for name, ids, limit in (("token", token_ids_N, num_tokens), ("expert", expert_ids_N, E)):
        if ids.dtype.is_floating_point or ids.dtype == torch.bool:
            return f"{name}_ids must be integers, got {ids.dtype}"
        if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < limit):
            return f"{name}_ids run from {int(ids.min())} to {int(ids.max())}, allowed are 0..{limit - 1}"
    keys = expert_ids_N.long() * max(num_tokens, 1) + token_ids_N.long()
    if keys.unique().numel() != keys.numel():
        return f"{keys.numel() - keys.unique().numel()} (token, expert) pairs are given more than once"
    return None
