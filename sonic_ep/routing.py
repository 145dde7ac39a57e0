"""`Routing`: which token goes to which expert with which weight, as integers that are replayed and weights that train.

What passes from the router to dispatch. Any number of experts per token, from none to all.

Legend: S source ranks (= ep_size), T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

from dataclasses import dataclass
from typing import Self, final

import torch
from torch import Tensor

from sonic_ep.groups import EPGroup
from sonic_ep.host_copy import HostCopy

INDEX_DTYPE = torch.int32  # of every per-pair and per-row index list


@dataclass(frozen=True, slots=True)
class Counts:
    """The group-wide integers of one routing: the same on every rank, int64, on the device of the routing.

    chosen_SE: plain top-K counts C[R, E]. rows_SE: n[R, E], rows of each (source rank, expert) chunk. pairs_SE: how
    many of those are real pairs, the rest being padding of weight zero. tokens_S: T of each rank. cut_S: pairs that
    capacity took from each owner rank. t: () the chunk multiple in force.
    """

    chosen_SE: Tensor
    rows_SE: Tensor
    pairs_SE: Tensor
    tokens_S: Tensor
    cut_S: Tensor
    t: Tensor


@final
class CountsOnHost:
    """Counts on their way to the host from the moment they are decided: whoever needs sizes there does not wait for
    what was launched since. beside: more integers on the same way, (n,) int64."""

    def __init__(self, counts: Counts, beside: Tensor | None = None) -> None:
        self._shape = counts.rows_SE.shape
        parts = [counts.tokens_S, counts.rows_SE.flatten(), counts.pairs_SE.flatten()]
        self._copy = HostCopy(torch.cat(parts if beside is None else [*parts, beside]))

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens_S, rows_SE, pairs_SE and what came beside them, on the CPU."""
        S, E = self._shape
        values = self._copy.read()
        tokens_S, rows, pairs, beside = values.split((S, S * E, S * E, values.shape[0] - S - 2 * S * E))
        return tokens_S, rows.view(S, E), pairs.view(S, E), beside


@dataclass(frozen=True, slots=True)
class Selection:
    """The decided integers of one routing on this rank. Replaying it reproduces the routing exactly.

    topk_ids_TK: int64, the plain top-K choice. token_ids_N: int32, the tokens of each expert's pairs, by expert, then
    token; -1 where an entry is spare, see Routing. expert_ids_N: int64. chosen_N: bool, False for pairs that rounding
    added. counts: see Counts. most_rows, most_received, on_host: see Routing.
    """

    topk_ids_TK: Tensor
    token_ids_N: Tensor
    expert_ids_N: Tensor
    chosen_N: Tensor
    counts: Counts
    most_rows: int | None
    most_received: int | None = None
    on_host: CountsOnHost | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """This rank's pairs in send order (by expert, then token), and every rank's counts.

    gates_N: (N,) combine weights, floating point, differentiable. token_ids_N: (N,) int32; behind the pairs that the
    counts tell there may be spare entries, whose weights count for nothing. num_tokens: T. most_rows: what the rows of
    this rank's chunks cannot exceed; None if nothing is spare and no row is padding, so that there are N of both.
    most_received: what the rows for the experts of any rank cannot exceed, if no rank has more than T tokens; None if
    only the counts tell. on_host: the counts, where they were sent to the host ahead of the rest.
    """

    gates_N: Tensor
    token_ids_N: Tensor
    counts: Counts
    num_tokens: int
    most_rows: int | None = None
    most_received: int | None = None
    on_host: CountsOnHost | None = None

    @classmethod
    def of(cls, selection: Selection, gates_N: Tensor, num_tokens: int) -> Self:
        """The pairs of a selection with their weights."""
        s = selection
        return cls(gates_N, s.token_ids_N, s.counts, num_tokens, s.most_rows, s.most_received, s.on_host)

    @classmethod
    def from_pairs(
        cls,
        token_ids_N: Tensor,
        expert_ids_N: Tensor,
        gates_N: Tensor,
        *,
        num_tokens: int,
        E: int,
        group: EPGroup,
    ) -> Self:
        """A routing from any list of (token, expert, weight), in any order: one all-gather of counts.

        Shapes:  token_ids_N, expert_ids_N (N,) integers; gates_N (N,) floating point, may require grad.
        Raises:  ValueError, on every rank: a length, a token or an expert out of range, the same pair twice.
        """
        group.raise_together(_problem_with_pairs(token_ids_N, expert_ids_N, gates_N, num_tokens, E))
        order_N = torch.argsort(expert_ids_N.long() * max(num_tokens, 1) + token_ids_N.long())
        counts_E = torch.bincount(expert_ids_N, minlength=E)
        header = torch.cat([counts_E, counts_E.new_tensor([num_tokens])])
        gathered = group.all_gather(header)
        counts_SE, tokens_S = gathered[:, :E], gathered[:, E]
        counts = Counts(counts_SE, counts_SE, counts_SE, tokens_S, torch.zeros_like(tokens_S), tokens_S.new_ones(()))
        return cls(gates_N[order_N], token_ids_N[order_N].to(INDEX_DTYPE), counts, num_tokens)


def _problem_with_pairs(
    token_ids_N: Tensor, expert_ids_N: Tensor, gates_N: Tensor, num_tokens: int, E: int
) -> str | None:
    shapes = [tuple(values.shape) for values in (token_ids_N, expert_ids_N, gates_N)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        return f"token_ids, expert_ids and gates must have one shape (N,), got {shapes}"
    if not gates_N.dtype.is_floating_point:
        return f"gates must be floating point, got {gates_N.dtype}"
    for name, ids, limit in (("token", token_ids_N, num_tokens), ("expert", expert_ids_N, E)):
        if ids.dtype.is_floating_point or ids.dtype == torch.bool:
            return f"{name}_ids must be integers, got {ids.dtype}"
        if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < limit):
            return f"{name}_ids run from {int(ids.min())} to {int(ids.max())}, allowed are 0..{limit - 1}"
    keys = expert_ids_N.long() * max(num_tokens, 1) + token_ids_N.long()
    if keys.unique().numel() != keys.numel():
        return f"{keys.numel() - keys.unique().numel()} (token, expert) pairs are given more than once"
    return None
