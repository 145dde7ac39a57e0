"""The one all-gather of a step: every rank's counts, number of tokens and status. Then the rounding of the counts.

A rank with bad input takes part too, so that all ranks raise the same error and none waits for it. Counts and rounded
counts stay on the device. The host reads the rank status late, together with the sizes. If rows may be sent before
that, the device goes on with counts of zero when any rank has an error (kernels/route/status/reference.py).

Legend: S ranks of the EP group, E experts, F fields of a table.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.async_d2h import host_may_wait
from sonic_ep.config import RoundingConfig
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.groups.frames import FRAME_INTS, problem_with_calls
from sonic_ep.groups.order import NO_ORDER, Ran, problem_with_orders
from sonic_ep.kernels.backend import (
    allows_spare_capacity,
    pack_rank_status,
    pack_split_sizes,
    zero_counts_on_error,
)
from sonic_ep.kernels.program.trace import by_torch, current_trace
from sonic_ep.kernels.route.select.reference import MAX_TOKENS
from sonic_ep.kernels.route.status.reference import BAD_LOGIT, HEADER, LAYER, NO_UPDATES, ORDER, SEED, STATUS, TOKENS
from sonic_ep.routers.rounding import leaves_sizes_open, round_counts
from sonic_ep.routing import AsyncSplitSizes, GroupCounts

# Of x: what a status word can name.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# The status word. A rank without a problem sends _FIRST_CODE + 2 * (index of its dtype) + (1 if training), which must
# be equal on all ranks, plus BAD_LOGIT for each non-finite logit. A rank with a problem sends _PROBLEM. The word of a
# lost peer is 0, so no code is 0. With experts that a caller gives, a rank in training has codes of their own, because
# those are not rounded. A layer with a number adds LAYER * (2 * number + (1 if it needs a backward)).
_FIRST_CODE, _GIVEN_CODE, _PROBLEM = 2, 10, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank's message to the others before a step. Tensors are on one device.

    counts_E: (E,) int64 plain top-K counts. by_score_E: (E,) int64 counts of the top-K by score alone, if a loss needs
    them from all ranks, else None on every rank. num_tokens: T. dtype (of x), training: must be equal on all ranks.
    seed: () integer of stochastic rounding, 0 <= seed < 2^31; all ranks use rank 0's. bad_logits: () int64 number of
    NaN and inf logits, None if not requested. problem: why this rank cannot continue, or None. layer: the number of the
    layer, equal on all ranks that give one; 0 for none. needs_backward: whether this rank will run a backward, equal on
    all ranks that give a number; False without one. bias_updates: () int64, NO_UPDATES plus the number of updates of
    the expert bias, equal on all ranks that give it; not sent with a seed. has_given_experts: whether a caller gives
    the experts of the tokens; in training it must be equal on all ranks.
    """

    counts_E: Tensor
    num_tokens: int
    dtype: torch.dtype
    training: bool
    by_score_E: Tensor | None = None
    seed: Tensor | None = None
    bad_logits: Tensor | None = None
    problem: str | None = None
    layer: int = 0
    needs_backward: bool = False
    bias_updates: Tensor | None = None
    has_given_experts: bool = False

    @property
    def code(self) -> int:
        """The code in the status word of a rank without a problem."""
        dtype = DTYPES.index(self.dtype)
        if self.training and self.has_given_experts:
            return _GIVEN_CODE + dtype
        return _FIRST_CODE + 2 * dtype + self.training


def _description_of(code: int) -> str:
    if code >= _GIVEN_CODE:
        return f"{DTYPES[code - _GIVEN_CODE]} training with routed_experts"
    dtype, training = divmod(code - _FIRST_CODE, 2)
    return f"{DTYPES[dtype]} {'training' if training else 'eval'}"


class GroupDecision(NamedTuple):
    """The result of `gather_counts`.

    counts: the same on every rank. split_sizes: the async D2H copy of the sizes and the rank status, which must be
    checked (`Routing.check`); None if the host needs neither or a CUDA graph is captured. by_score_SE: (S, E) int64,
    every rank's `RankStatus.by_score_E`, or None.
    """

    counts: GroupCounts
    split_sizes: AsyncSplitSizes | None
    by_score_SE: Tensor | None


def gather_counts(
    status: RankStatus,
    rounding: RoundingConfig,
    group: EPGroup,
    exchange: Exchange | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> GroupDecision:
    """Gathers all ranks' status and counts, and rounds the counts to n[S, E], identically on every rank. A collective.

    exchange: the transport whose all-gather is used; default is the group's own. meanwhile: called while the all-gather
    is in flight, to launch work that does not need its result.

    Raises:  ValueError on a rank with a problem: `status.problem`, too many tokens, or an unsupported dtype. ValueError
             if logits are to be checked while a CUDA graph is captured.
    Other ranks raise later, in `split_sizes.check`, so that their hosts can go on launching: ValueError, which names
             the rank, for its problem, for non-finite logits, or for a training flag, dtype, layer, need of a
             backward or number of bias updates that differs between ranks, and for another order of the backwards since
             the last exchange; RuntimeError for a lost peer. While a CUDA graph is captured nothing is checked: eager
             steps before the capture must have passed.
    """
    problem = status.problem
    if problem is None and status.num_tokens >= MAX_TOKENS:
        problem = f"T={status.num_tokens} tokens on one rank exceed the limit of {MAX_TOKENS - 1}; split the batch"
    if problem is None and status.dtype not in DTYPES:
        problem = f"x has dtype {status.dtype}; supported are {', '.join(map(str, DTYPES))}"
    code = _PROBLEM if problem is not None else status.code
    counts_E, E = status.counts_E, status.counts_E.shape[0]
    if status.by_score_E is not None:
        counts_E = by_torch(_joined, (2 * E,), counts_E.dtype, counts_E, status.by_score_E)
    word = code + LAYER * (2 * status.layer + status.needs_backward)
    seed = status.bias_updates if status.seed is None and group.size > 1 else status.seed
    order = _order_to_send(group, counts_E)
    # Of one size for layers of every size, and for other exchanges of the group, see groups/frames.py.
    values = {"bad_logits": status.bad_logits, "seed": seed, "width": FRAME_INTS if group.size > 1 else 0}
    packed = pack_rank_status(counts_E, status.num_tokens, word, order, **values)
    gathered = (exchange or group).all_gather(packed, meanwhile, used=HEADER + counts_E.shape[0])
    status_SF, chosen_SE = gathered[:, :HEADER], gathered[:, HEADER : HEADER + E]
    by_score_SE = None if status.by_score_E is None else gathered[:, HEADER + E : HEADER + 2 * E]
    if problem is not None:
        # The counts may be meaningless. The other ranks raise when they read the status.
        raise_problems(status_SF.flatten().tolist(), group.order.sent, problem, group, exchange)
    readable = host_may_wait(status_SF)
    zeroed_on_error = readable and group.size > 1
    if zeroed_on_error:
        chosen_SE = zero_counts_on_error(chosen_SE, status_SF, code)
    tokens_S = status_SF[:, TOKENS]
    counts = round_counts(chosen_SE, tokens_S, rounding, training=status.training, seed=status_SF[0, SEED])
    if status.bad_logits is not None and not readable:
        raise ValueError(
            "router.check_logits=True makes the host wait for the device, which a CUDA graph cannot capture; "
            "set router.check_logits=False"
        )
    reads_status = group.size > 1 or status.bad_logits is not None
    # On one rank lists have capacity for the most rows, where they may.
    reads_sizes = leaves_sizes_open(rounding, training=status.training) and not allows_spare_capacity(status_SF)
    if not readable or not (reads_status or reads_sizes):
        return GroupDecision(counts, None, by_score_SE)
    values = pack_split_sizes(tokens_S, counts.rows_SE, counts.pairs_SE, status_SF)
    check = functools.partial(raise_problems, sent=group.order.sent, problem=None, group=group, exchange=exchange)
    split_sizes = AsyncSplitSizes(
        values,
        group.size,
        check if reads_status else None,
        zeroed_on_error=zeroed_on_error,
        exchange=group.order.exchange,
    )
    return GroupDecision(counts, split_sizes, by_score_SE)


def _joined(one_E: Tensor, two_E: Tensor) -> Tensor:
    return torch.cat([one_E, two_E])


def _order_to_send(group: EPGroup, counts_E: Tensor) -> int:
    """Returns what `pack_rank_status` gets: the order of this rank's backwards, of which it starts a new list.

    In a traced pass, the size that is the order in each run. Neither there nor in a CUDA graph is this an exchange,
    because nothing runs.
    """
    if group.size == 1:
        return NO_ORDER
    trace = current_trace()
    if trace is not None:
        return trace.size("order")
    return group.order.send() if host_may_wait(counts_E) else NO_ORDER


def raise_problems(
    status_fields: list[int], sent: list[Ran], problem: str | None, group: EPGroup, exchange: Exchange | None
) -> None:
    """Raises what is wrong on any rank. status_fields: HEADER integers of each rank, rank by rank, on the host.

    sent: of `Order`, after that exchange. problem: this rank's own. A lost peer is checked first: its fields are zero.
    """
    if exchange is not None:
        exchange.raise_if_lost()
    words = status_fields[STATUS::HEADER]
    if (elsewhere := problem_with_calls(words)) is not None:
        raise ValueError(elsewhere)
    orders = status_fields[ORDER::HEADER]
    if len(set(orders)) > 1:  # first: it is about steps that have passed, and will not show again
        raise ValueError(problem_with_orders(group.all_gather_object(sent, stage="orders of backwards"), orders))
    # Twice the number of the layer, plus 1 if it needs a backward: of ranks with a number.
    layers = {rank: word // LAYER for rank, word in enumerate(words) if word >= LAYER}
    status_words = [word % LAYER for word in words]
    if any(code & _PROBLEM for code in status_words):
        group.raise_together(problem, stage="the report of a problem")
    codes = {rank: word % _PROBLEM for rank, word in enumerate(status_words)}
    _check_alike(codes, "disagree about input dtype or training mode: {}", _description_of)
    _check_alike(
        {rank: layer // 2 for rank, layer in layers.items()},
        "are in different MoE layers, counted as they were built ({}); call the layers in the same order on every rank",
        "number {}".format,
    )
    _check_alike(
        layers,
        "disagree whether this training step has a backward ({}), in which some would wait for the others; use "
        "torch.no_grad, and freeze weights and inputs, on all ranks alike",
        lambda layer: "yes" if layer % 2 else "no",
    )
    _check_alike(
        {rank: seed - NO_UPDATES for rank, seed in enumerate(status_fields[SEED::HEADER]) if seed >= NO_UPDATES},
        "disagree how often the expert bias was updated since it was set or loaded ({}), so their biases differ; call "
        "update_expert_bias, and load weights, on all ranks alike",
    )
    bad_logits = [code // BAD_LOGIT for code in status_words]
    if any(bad_logits):
        bad = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(bad_logits) if count)
        raise ValueError(
            f"router logits hold NaN or inf ({bad}); look for the loss or the layer that diverged before this one "
            "(router.check_logits=False skips this check)"
        )


def _check_alike(values: dict[int, int], message: str, shown: Callable[[int], str] = str) -> None:
    """Raises ValueError if values, by rank, differ. message: with {} where they are `shown`."""
    if len(set(values.values())) > 1:
        described = ", ".join(f"rank {rank}: {shown(value)}" for rank, value in values.items())
        raise ValueError(f"the ranks of the EP group {message.format(described)}")
