"""The one small all-gather of a step: every rank's counts, token number and health; then the decision.

A rank whose input is bad still takes part, so that all ranks raise the same error instead of waiting for it. Counts and
decision stay on the device. The host reads the ranks' conditions with the sizes, which it does late; where rows may be
sent before, a bad condition makes all counts void on the device.

Legend: S ranks of the EP group, E experts, F fields of a header.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.config import RoundingConfig
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.host_copy import host_may_wait
from sonic_ep.kernels.operations import host_sizes, report_of, void_unless
from sonic_ep.kernels.reports import BAD_LOGIT, CONDITION, DRAW, HEADER, TOKENS
from sonic_ep.routers.rounding import decide, leaves_sizes_open
from sonic_ep.routers.selection import MAX_TOKENS
from sonic_ep.routing import Counts, SizesOnHost

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# A condition: the kind, dtype and mode, which all ranks must share, and nothing else of a rank that is well, but
# BAD_LOGIT for each bad logit. Not zero, which is what comes of a rank that is lost.
_KIND, _PROBLEM = 2, 16  # the first kind; where there is a problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
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
    draw: Tensor | None = None
    bad_logits: Tensor | None = None
    problem: str | None = None


class Agreement(NamedTuple):
    """What the ranks agreed on. on_host: the sizes on their way there, if somebody will ask for them, and the reports,
    which must be checked; see `Routing.check`. by_score_SE: of the reports."""

    counts: Counts
    on_host: SizesOnHost | None
    by_score_SE: Tensor | None


def agree(
    report: Report,
    rounding: RoundingConfig,
    group: EPGroup,
    exchange: Exchange | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> Agreement:
    """Gather every rank's report, doing something else meanwhile, and decide n[R, E], identically everywhere.

    exchange: by what way; default the group's own.

    A rank with a problem raises ValueError here. `on_host.check` does so on the others, so that the host can go on
    launching while the reports travel: with the rank named, its problem, non-finite logits, or a training flag or dtype
    that differs between ranks; and RuntimeError if a rank was waited for in vain. While a CUDA graph is captured nobody
    checks: the steps before it told.
    """
    problem = report.problem
    if problem is None and report.num_tokens >= MAX_TOKENS:
        problem = f"T={report.num_tokens} tokens on one rank exceed the limit of {MAX_TOKENS - 1}; split the batch"
    if problem is None and report.dtype not in _DTYPES:
        problem = f"x has dtype {report.dtype}; supported are {', '.join(map(str, _DTYPES))}"
    condition = _PROBLEM if problem is not None else _KIND + 2 * _DTYPES.index(report.dtype) + report.training
    counted, E = report.counts_E, report.counts_E.shape[0]
    counted = counted if report.by_score_E is None else torch.cat([counted, report.by_score_E])
    told = report_of(counted, report.num_tokens, condition, bad_logits=report.bad_logits, draw=report.draw)
    gathered = (exchange or group).all_gather(told, meanwhile)
    reports_SF, chosen_SE = gathered[:, :HEADER], gathered[:, HEADER : HEADER + E]
    by_score_SE = None if report.by_score_E is None else gathered[:, HEADER + E :]
    if problem is not None:
        # What was counted need not make sense. The others raise when they read the reports.
        _raise_problems(reports_SF.flatten().tolist(), problem, group, exchange)
    readable = host_may_wait(reports_SF)
    void_if_wrong = readable and exchange is not None and exchange.sends_unchecked
    if void_if_wrong:
        void_unless(chosen_SE, reports_SF[:, CONDITION], condition)
    tokens_S = reports_SF[:, TOKENS]
    decision = decide(chosen_SE, tokens_S, rounding, training=report.training, draw=reports_SF[0, DRAW])
    counts = Counts(chosen_SE, decision.rows_SE, decision.pairs_SE, tokens_S, decision.cut_S, decision.t)
    if report.bad_logits is not None and not readable:
        raise ValueError(
            "router.check_logits=True makes the host wait for the device, which a CUDA graph cannot capture; "
            "set router.check_logits=False"
        )
    reads_reports = group.size > 1 or report.bad_logits is not None
    if not readable or not (reads_reports or leaves_sizes_open(rounding, training=report.training)):
        return Agreement(counts, None, by_score_SE)
    values = host_sizes(tokens_S, counts.rows_SE, counts.pairs_SE, reports_SF)
    check = functools.partial(_raise_problems, problem=None, group=group, exchange=exchange)
    on_host = SizesOnHost(values, group.size, check if reads_reports else None, void_if_wrong=void_if_wrong)
    return Agreement(counts, on_host, by_score_SE)


def _raise_problems(reports: list[int], problem: str | None, group: EPGroup, exchange: Exchange | None) -> None:
    """reports: of the ranks, in order, on the host, so that they have come, if they were to come."""
    if exchange is not None:
        exchange.raise_if_lost()
    conditions = reports[CONDITION::HEADER]
    if any(condition & _PROBLEM for condition in conditions):
        group.raise_together(problem)
    kinds = [condition % _PROBLEM - _KIND for condition in conditions]
    if len(set(kinds)) > 1:
        described = ", ".join(
            f"rank {rank}: {_DTYPES[kind // 2]} {'training' if kind % 2 else 'eval'}" for rank, kind in enumerate(kinds)
        )
        raise ValueError(f"the ranks of the EP group disagree about input dtype or training mode: {described}")
    bad_logits = [condition // BAD_LOGIT for condition in conditions]
    if any(bad_logits):
        bad = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(bad_logits) if count)
        raise ValueError(
            f"router logits hold NaN or inf ({bad}); look for the loss or the layer that diverged before this one "
            "(router.check_logits=False skips this check)"
        )
