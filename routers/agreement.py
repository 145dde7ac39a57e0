"""The one small all-gather of a step: every rank's counts, token number and health; then the decision on the host.

A rank whose input is bad still takes part, so that all ranks raise the same error instead of waiting for it.
Reading the gathered integers is the one host sync of routing; static buffers will decide on the device instead.

Legend: S ranks of the EP group, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sonic_ep.config import RoundingConfig
from sonic_ep.groups import EPGroup
from sonic_ep.routers.rounding import decide
from sonic_ep.routers.selection import MAX_TOKENS
from sonic_ep.routing import Counts

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_HEADER = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank tells the others before a step.

    counts_E: (E,) int64 plain top-K counts. bad_logits: () int64 number of NaN and inf logits, None if not asked for.
    draw: random number of stochastic rounding, 0 <= draw < 2^31; the first rank's serves all. problem: why this rank
    cannot go on. training, dtype: must agree over the ranks.
    """

    counts_E: Tensor
    num_tokens: int
    dtype: torch.dtype
    training: bool
    draw: int = 0
    bad_logits: Tensor | None = None
    problem: str | None = None


def agree(report: Report, rounding: RoundingConfig, group: EPGroup) -> Counts:
    """Gather every rank's report and decide n[R, E], identically everywhere.

    Raises:  ValueError, on every rank, with the rank named: its problem, non-finite logits, or a training flag or dtype
             that differs between ranks.
    """
    problem = report.problem
    if problem is None and report.num_tokens >= MAX_TOKENS:
        problem = f"T={report.num_tokens} tokens on one rank exceed the limit of {MAX_TOKENS - 1}; split the batch"
    if problem is None and report.dtype not in _DTYPES:
        problem = f"x has dtype {report.dtype}; supported are {', '.join(map(str, _DTYPES))}"
    kind = 2 * _DTYPES.index(report.dtype) + report.training if report.dtype in _DTYPES else -1
    header = report.counts_E.new_tensor([report.num_tokens, problem is not None, kind, report.draw, 0])
    if report.bad_logits is not None:
        header[4] = report.bad_logits.clamp(max=2**31 - 1)
    gathered = group.all_gather(torch.cat([header, report.counts_E]).to(torch.int32)).cpu().long()
    _raise_problems(gathered, problem, group)
    tokens_S, chosen_SE = gathered[:, 0], gathered[:, _HEADER:]
    decision = decide(chosen_SE, tokens_S, rounding, training=report.training, draw=int(gathered[0, 3]))
    return Counts(chosen_SE, decision.rows_SE, decision.pairs_SE, tokens_S, decision.cut_S, decision.t)


def _raise_problems(gathered: Tensor, problem: str | None, group: EPGroup) -> None:
    if gathered[:, 1].any():
        group.raise_together(problem)
    kinds_S = gathered[:, 2].tolist()
    if len(set(kinds_S)) > 1:
        described = ", ".join(
            f"rank {rank}: {_DTYPES[kind // 2]} {'training' if kind % 2 else 'eval'}"
            for rank, kind in enumerate(kinds_S)
        )
        raise ValueError(f"the ranks of the EP group disagree about input dtype or training mode: {described}")
    if gathered[:, 4].any():
        bad = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(gathered[:, 4].tolist()) if count)
        raise ValueError(
            f"router logits hold NaN or inf ({bad}); look for the loss or the layer that diverged before this one "
            "(router.check_logits=False skips this check)"
        )
