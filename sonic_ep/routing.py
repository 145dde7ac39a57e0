"""`Routing`: the (token, expert) pairs of this rank with their combine weights. A router makes it, dispatch reads it.

A token may have any number of experts, from none to all. The integers can be replayed; the weights have gradients.

Legend: S ranks of the EP group, T tokens on this rank, E experts, K experts per token, N pairs this rank sends.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from sonic_ep.async_d2h import AsyncD2H, HostCopy
from sonic_ep.checks import ID_DTYPES, problem_with_tensor
from sonic_ep.groups import EPGroup, LostRankError
from sonic_ep.groups.order import Forward

INDEX_DTYPE = torch.int32  # of every index list with an entry per pair or row


class GroupCounts(NamedTuple):
    """The counts of all ranks in one routing: int64, on the device of the routing, equal on every rank.

    chosen_SE: C[S, E], plain top-K counts. rows_SE: n[S, E], rows of each (source rank, expert) chunk. pairs_SE: how
    many of those rows are real pairs; the others are padding rows of weight zero. tokens_S: T of each rank. cut_S:
    pairs that the capacity factor removed, by destination rank. t: () row multiple of a chunk, 1 without rounding.
    """

    chosen_SE: Tensor
    rows_SE: Tensor
    pairs_SE: Tensor
    tokens_S: Tensor
    cut_S: Tensor
    t: Tensor

    @staticmethod
    def shapes(S: int, E: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes for S ranks and E experts."""
        return (S, E), (S, E), (S, E), (S,), (S,), ()


def unrounded(chosen_SE: Tensor, tokens_S: Tensor) -> GroupCounts:
    """Returns the counts of a routing that is neither rounded nor cut."""
    return GroupCounts(
        chosen_SE, chosen_SE, chosen_SE, tokens_S, tokens_S.new_zeros(tokens_S.shape), tokens_S.new_ones(())
    )


class SplitSizes(NamedTuple):
    """The sizes of one routing as host integers.

    tokens_S: tokens of each rank. rows_SQ, pairs_SQ: pair-buffer rows, and the real pairs among them, that each source
    rank sends to each destination rank.
    """

    tokens_S: tuple[int, ...]
    rows_SQ: tuple[tuple[int, ...], ...]
    pairs_SQ: tuple[tuple[int, ...], ...]

    @staticmethod
    def num_values(num_ranks: int, num_fields: int) -> int:
        """Returns the length of what `pack_split_sizes` returns, with `num_fields` status fields a rank."""
        return num_ranks * (1 + 2 * num_ranks + num_fields)

    @classmethod
    def unpacked(cls, values: list[int], num_ranks: int) -> tuple[Self, list[int]]:
        """Returns the sizes and the status fields of all ranks, rank by rank, of what `pack_split_sizes` returned."""
        S = num_ranks
        tables = [tuple(values[start : start + S]) for start in range(0, S + 2 * S * S, S)]
        return cls(tables[0], tuple(tables[1 : 1 + S]), tuple(tables[1 + S :])), values[S + 2 * S * S :]

    def num_rows(self, dst_rank: int) -> int:
        """Returns P of a destination rank."""
        return sum(rows_Q[dst_rank] for rows_Q in self.rows_SQ)

    def pairs_in(self, dst_rank: int) -> tuple[int, ...]:
        """Returns the real pairs that a destination rank receives from each source rank."""
        return tuple(pairs_Q[dst_rank] for pairs_Q in self.pairs_SQ)


@final
class AsyncSplitSizes:
    """An async D2H copy of the split sizes and the rank statuses, see AsyncD2H.

    on_device: the result of `pack_split_sizes` (kernels/dispatch/split_sizes/reference.py) for `num_ranks` ranks.
    check: gets the status fields of all ranks, rank by rank, and raises if one has an error; None if none can have one.
    zeroed_on_error: True if the device zeroes all counts on an error (kernels/route/status/reference.py). Then no rank
    sends anything, whatever was launched.
    known: the sizes, if the host has them already; nothing is copied then. copy: one that a program has started, in
    place of a copy of `on_device`.
    exchange: the number of the exchange of counts, see `Forward`; 0 for none. sizes_read: the sizes, if they are known,
    or `read` has returned them.
    """

    def __init__(
        self,
        on_device: Tensor,
        num_ranks: int,
        check: Callable[[list[int]], None] | None = None,
        *,
        zeroed_on_error: bool = False,
        known: SplitSizes | None = None,
        copy: HostCopy | None = None,
        exchange: int = 0,
    ) -> None:
        self.on_device, self.exchange = on_device, exchange
        self._copy = copy or (AsyncD2H(on_device) if known is None else None)
        self._num_ranks = num_ranks
        self._check = check
        self.sizes_read = known
        # The error of the first check, which may use a collective; later calls raise it without one. Not the exception
        # object, which would hold its frames.
        self._raised: tuple[type[Exception], str] | None = None
        self._zeroed_on_error = zeroed_on_error

    def read(self) -> SplitSizes:
        """Blocks until the sizes arrive and returns them. Raises the error of `check`, in every call."""
        if self._raised is not None:
            kind, message = self._raised
            raise kind(message)
        if self.sizes_read is None:
            assert self._copy is not None
            sizes, status_fields = SplitSizes.unpacked(self._copy.read().tolist(), self._num_ranks)
            try:
                if self._check is not None:
                    self._check(status_fields)
            except (RuntimeError, ValueError) as error:
                self._raised = type(error), str(error)
                raise
            self.sizes_read, self._check = sizes, None
        return self.sizes_read

    def wait(self, group: EPGroup) -> None:
        """Returns once `read` would not block. Raises LostRankError, see `EPGroup.wait_until`."""
        copy = self._copy
        if copy is not None:
            group.wait_until(lambda: copy.is_ready, stage="counts")

    @property
    def may_launch_unchecked(self) -> bool:
        """True if kernels that send rows may be launched before the check.

        Either no rank can have an error, or an error makes all counts zero on the device.
        """
        return self._check is None or self._zeroed_on_error

    def check(self) -> None:
        """Raises as `read` does. Blocks only if there is something to check. A traced copy is checked elsewhere."""
        if self._check is not None and not (self._copy is not None and self._copy.is_traced):
            self.read()


class BalanceCounts(NamedTuple):
    """The counts of a balance loss.

    ids_TK: int64, K experts of each token. times_SE: int64, how many tokens of each rank have each expert in ids_TK;
    only the "global" loss reads it.
    """

    ids_TK: Tensor
    times_SE: Tensor


@dataclass(frozen=True, slots=True)
class PairLists:
    """Pairs of this rank, and the plain top-K that they come from.

    topk_ids_TK: int64, plain top-K. token_ids_N: int32 token of each pair, by expert, then token; -1 in spare entries,
    see Routing. expert_ids_N: int64 expert of each pair. chosen_N: bool, False for pairs that rounding added.
    """

    topk_ids_TK: Tensor
    token_ids_N: Tensor
    expert_ids_N: Tensor
    chosen_N: Tensor


@dataclass(frozen=True, slots=True)
class RoutedPairs(PairLists):
    """The integers of one routing on this rank. Replaying them reproduces the routing exactly.

    counts: see GroupCounts. max_rows, max_received, split_sizes: see Routing. balance_counts: the counts of the balance
    loss; None if they are topk_ids_TK and counts.chosen_SE.
    """

    counts: GroupCounts
    max_rows: int | None
    max_received: int | None = None
    split_sizes: AsyncSplitSizes | None = None
    balance_counts: BalanceCounts | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """This rank's pairs in send order (by expert, then token), and the counts of all ranks.

    weights_N: (N,) combine weights, floating point, differentiable. token_ids_N: (N,) int32. Both lists may have spare
    entries after the pairs. The counts give the true number, and the weight of a spare entry has no effect.
    num_tokens: T. counts: see GroupCounts.
    max_rows: an upper bound of the rows of this rank's chunks; None if there are no spare entries and no padding rows,
    so that pairs and rows both number N.
    max_received: an upper bound of the rows that any destination rank receives, if no rank has more than T tokens; None
    without a capacity factor.
    split_sizes: the async D2H copy of sizes and rank statuses, if the router started one.
    exchange: the number of the exchange of counts, if `split_sizes` does not have it; else 0.
    """

    weights_N: Tensor
    token_ids_N: Tensor
    counts: GroupCounts
    num_tokens: int
    max_rows: int | None = None
    max_received: int | None = None
    split_sizes: AsyncSplitSizes | None = None
    exchange: int = 0

    def forward_in(self, group: EPGroup) -> Forward:
        """Returns which forward begins with this routing, the same on every rank."""
        exchange = self.exchange if self.split_sizes is None else self.split_sizes.exchange
        return Forward(group.layer, exchange or group.order.exchange)

    @property
    def tile_aligned(self) -> bool:
        """True if rounding or capacity made the counts: experts then usually have whole tiles of rows."""
        return self.max_rows is not None

    def check(self) -> None:
        """Raises the error that the rank statuses show, the same on all ranks. Blocks until they arrive.

        Does nothing if the router sent no status to the host, or the check has passed before.
        Call it before anything is exchanged, unless `split_sizes.may_launch_unchecked`; then call it after the launch.

        Raises:  ValueError or RuntimeError, see `gather_counts` in routers/count_exchange.py.
        """
        if self.split_sizes is not None:
            self.split_sizes.check()

    @contextmanager
    def status_first(self) -> Generator[None, None, None]:
        """A context in which an error of the rank statuses is raised in place of any other error.

        Not of the loss of a rank, after which the statuses may never arrive.
        """
        try:
            yield
        except LostRankError:
            raise
        except Exception:
            self.check()
            raise

    @classmethod
    def of(cls, routed_pairs: RoutedPairs, weights_N: Tensor, num_tokens: int) -> Self:
        """Returns the routing of these pairs and their combine weights."""
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
        """Returns the routing of any list of (token, expert, weight), in any order.

        A collective: gathers the counts of all ranks. The host waits for it.

        Shapes:  token_ids_N, expert_ids_N (N,) integers; weights_N (N,) floating point, may require grad.
        Raises:  ValueError, on every rank, if on any rank: an argument is no tensor, shapes, dtypes or devices are
                 wrong, a token or an expert is out of range, a pair is given twice, or E is not a multiple of ep_size.
                 Also if E, the dtype of weights_N or the order of backwards differs between ranks.
        """
        problem = _problem_with_pairs(token_ids_N, expert_ids_N, weights_N, num_tokens, E)
        if problem is None and E % group.size:
            problem = f"E={E} experts do not divide over ep_size={group.size} ranks"
        group.enter_layer(0)
        group.raise_together(
            problem, stage="Routing.from_pairs", E=E, weights_dtype=str(getattr(weights_N, "dtype", None))
        )
        group.order.send()
        order_N = torch.argsort(expert_ids_N.long() * max(num_tokens, 1) + token_ids_N.long())
        counts_E = torch.bincount(expert_ids_N, minlength=E)
        header = torch.cat([counts_E, counts_E.new_tensor([num_tokens])])
        gathered = group.all_gather(header, stage="Routing.from_pairs")
        counts = unrounded(gathered[:, :E], gathered[:, E])
        sorted_ids_N = token_ids_N[order_N].to(INDEX_DTYPE)
        return cls(weights_N[order_N], sorted_ids_N, counts, num_tokens, exchange=group.order.exchange)


_WEIGHT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _problem_with_pairs(
    token_ids_N: Tensor, expert_ids_N: Tensor, weights_N: Tensor, num_tokens: int, E: int
) -> str | None:
    for name, values in (("token_ids", token_ids_N), ("expert_ids", expert_ids_N), ("weights", weights_N)):
        if (problem := problem_with_tensor(name, values)) is not None:
            return problem
    for name, size, least in (("num_tokens", num_tokens, 0), ("E", E, 1)):
        if type(size) is not int or size < least:
            return f"{name}={size!r} must be an integer of at least {least}"
    devices = {str(values.device) for values in (token_ids_N, expert_ids_N, weights_N)}
    if len(devices) > 1:
        return f"token_ids, expert_ids and weights must be on one device, got {', '.join(sorted(devices))}"
    if devices == {"meta"}:
        return "token_ids, expert_ids and weights are on meta, where there are no values; give real ones"
    shapes = [tuple(values.shape) for values in (token_ids_N, expert_ids_N, weights_N)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        return f"token_ids, expert_ids and weights must have one shape (N,), got {shapes}"
    if weights_N.dtype not in _WEIGHT_DTYPES:
        return f"weights must be floating point, got {weights_N.dtype}; use weights.float()"
    for name, ids, limit in (("token", token_ids_N, num_tokens), ("expert", expert_ids_N, E)):
        if ids.dtype not in ID_DTYPES:
            return f"{name}_ids must be integers, got {ids.dtype}; use {name}_ids.long(), on any rank alike"
        if ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < limit):
            return f"{name}_ids run from {int(ids.min())} to {int(ids.max())}, allowed are 0..{limit - 1}"
    keys = expert_ids_N.long() * max(num_tokens, 1) + token_ids_N.long()
    if keys.unique().numel() != keys.numel():
        return f"{keys.numel() - keys.unique().numel()} (token, expert) pairs are given more than once"
    return None
