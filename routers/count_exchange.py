"""The one small all-gather of a step: every rank's counts, token number and health; then the decision.

A rank whose input is bad still takes part, so that all ranks raise the same error instead of waiting for it. Counts and
decision stay on the device. The host reads the ranks' conditions with the sizes, which it does late; where rows may be
sent before, a bad condition makes all counts void on the device.

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
from sonic_ep.kernels.backend import pack_rank_status, pack_split_sizes, zero_counts_on_error
from sonic_ep.kernels.route.select.reference import MAX_TOKENS
from sonic_ep.kernels.route.status.reference import BAD_LOGIT, HEADER, SEED, STATUS, TOKENS
from sonic_ep.routers.rounding import leaves_sizes_open, round_counts
from sonic_ep.routing import AsyncSplitSizes, GroupCounts

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# A condition: the kind, dtype and mode, which all ranks must share, and nothing else of a rank that is well, but
# BAD_LOGIT for each bad logit. Not zero, which is what comes of a rank that is lost.
_FIRST_CODE, _PROBLEM = 2, 16  # the first kind; where there is a problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What one rank tells the others before a step.

    counts_E: (E,) int64 plain top-K counts. by_score_E: likewise by score alone, where a loss wants them of all ranks,
    else None on every rank. bad_logits: () int64 number of NaN and inf logits, None if not asked for.
    draw: () random integer of stochastic rounding, 0 <= draw < 2^31, on that device; the first rank's serves all.
    problem: why this rank cannot go on. training, dtype: must agree over the ranks.
    """

    counts_E: Tensor
    num_tokens: int
    dtype: torch.dtype
    training: bool
    by_score_E: Tensor | None = None
    seed: Tensor | None = None
    bad_logits: Tensor | None = None
    problem: str | None = None


class GroupDecision(NamedTuple):
    """What the ranks agreed on. split_sizes: the sizes on their way there, if somebody will ask for them, and the
    reports, which must be checked; see `Routing.check`. by_score_SE: of the reports."""

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
    """Gather every rank's report, doing something else meanwhile, and decide n[S, E], identically everywhere.

    exchange: by what way; default the group's own.

    A rank with a problem raises ValueError here. `split_sizes.check` does so on the others, so that the host can go on
    launching while the reports travel: with the rank named, its problem, non-finite logits, or a training flag or dtype
    that differs between ranks; and RuntimeError if a rank was waited for in vain. While a CUDA graph is captured nobody
    checks: the steps before it told.
    """
    problem = status.problem
    if problem is None and status.num_tokens >= MAX_TOKENS:
        problem = f"T={status.num_tokens} tokens on one rank exceed the limit of {MAX_TOKENS - 1}; split the batch"
    if problem is None and status.dtype not in _DTYPES:
        problem = f"x has dtype {status.dtype}; supported are {', '.join(map(str, _DTYPES))}"
    code = _PROBLEM if problem is not None else _FIRST_CODE + 2 * _DTYPES.index(status.dtype) + status.training
    counts_E, E = status.counts_E, status.counts_E.shape[0]
    counts_E = counts_E if status.by_score_E is None else torch.cat([counts_E, status.by_score_E])
    packed = pack_rank_status(counts_E, status.num_tokens, code, bad_logits=status.bad_logits, seed=status.seed)
    gathered = (exchange or group).all_gather(packed, meanwhile)
    status_SF, chosen_SE = gathered[:, :HEADER], gathered[:, HEADER : HEADER + E]
    by_score_SE = None if status.by_score_E is None else gathered[:, HEADER + E :]
    if problem is not None:
        # What was counted need not make sense. The others raise when they read the reports.
        _raise_problems(status_SF.flatten().tolist(), problem, group, exchange)
    readable = host_may_wait(status_SF)
    zeroed_on_error = readable and exchange is not None and exchange.sends_unchecked
    if zeroed_on_error:
        zero_counts_on_error(chosen_SE, status_SF[:, STATUS], code)
    tokens_S = status_SF[:, TOKENS]
    rounded = round_counts(chosen_SE, tokens_S, rounding, training=status.training, seed=status_SF[0, SEED])
    counts = GroupCounts(chosen_SE, rounded.rows_SE, rounded.pairs_SE, tokens_S, rounded.cut_S, rounded.t)
    if status.bad_logits is not None and not readable:
        raise ValueError(
            "router.check_logits=True makes the host wait for the device, which a CUDA graph cannot capture; "
            "set router.check_logits=False"
        )
    reads_status = group.size > 1 or status.bad_logits is not None
    if not readable or not (reads_status or leaves_sizes_open(rounding, training=status.training)):
        return GroupDecision(counts, None, by_score_SE)
    values = pack_split_sizes(tokens_S, counts.rows_SE, counts.pairs_SE, status_SF)
    check = functools.partial(_raise_problems, problem=None, group=group, exchange=exchange)
    split_sizes = AsyncSplitSizes(values, group.size, check if reads_status else None, zeroed_on_error=zeroed_on_error)
    return GroupDecision(counts, split_sizes, by_score_SE)


def _raise_problems(headers: list[int], problem: str | None, group: EPGroup, exchange: Exchange | None) -> None:
    """reports: of the ranks, in order, on the host, so that they have come, if they were to come."""
    if exchange is not None:
        exchange.raise_if_lost()
    status_words = headers[STATUS::HEADER]
    if any(code & _PROBLEM for code in status_words):
        group.raise_together(problem)
    dtype_codes = [code % _PROBLEM - _FIRST_CODE for code in status_words]
    if len(set(dtype_codes)) > 1:
        described = ", ".join(
            f"rank {rank}: {_DTYPES[dtype_code // 2]} {'training' if dtype_code % 2 else 'eval'}"
            for rank, dtype_code in enumerate(dtype_codes)
        )
        raise ValueError(f"the ranks of the EP group disagree about input dtype or training mode: {described}")
    bad_logits = [code // BAD_LOGIT for code in status_words]
    if any(bad_logits):
        bad = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(bad_logits) if count)
        raise ValueError(
            f"router logits hold NaN or inf ({bad}); look for the loss or the layer that diverged before this one "
            "(router.check_logits=False skips this check)"
        )
