"""kernels/reports.py in Triton, a launch each.

Legend: see there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.cuda.launch import launched
from sonic_ep.kernels.cuda.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.reports import BAD_LOGIT, CONDITION, DRAW, HEADER, TOKENS

_BLOCK = 1024
_TOKENS, _CONDITION, _DRAW = (tl.constexpr(place) for place in (TOKENS, CONDITION, DRAW))
_HEADER, _BAD_LOGIT = tl.constexpr(HEADER), tl.constexpr(BAD_LOGIT)


@launched
@triton.jit(do_not_specialize=["num_tokens", "condition"])
def _report_of(
    counts_ptr,
    bad_logits_ptr,
    draw_ptr,
    report_ptr,
    num_tokens,
    condition,
    E,
    HAS_BAD_LOGITS: tl.constexpr,
    HAS_DRAW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(report_ptr + _HEADER + index, tl.load(counts_ptr + index, mask=index < E, other=0), mask=index < E)
    if tl.program_id(0) == 0:
        told = tl.load(bad_logits_ptr) * _BAD_LOGIT + condition if HAS_BAD_LOGITS else condition
        tl.store(report_ptr + _TOKENS, num_tokens)
        tl.store(report_ptr + _CONDITION, told)
        tl.store(report_ptr + _DRAW, tl.load(draw_ptr) if HAS_DRAW else 0)


@launched
@triton.jit(do_not_specialize=["healthy"])
def _void_unless(
    counts_ptr,
    conditions_ptr,
    counts_stride,
    conditions_stride,
    healthy,
    S,
    E,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rank = tl.arange(0, RANKS)
    conditions = tl.load(conditions_ptr + rank * conditions_stride, mask=rank < S, other=healthy)
    if tl.max((conditions != healthy).to(tl.int32), axis=0) == 0:
        return
    index = tl.arange(0, BLOCK)
    while tl.min(index, axis=0) < S * E:
        tl.store(counts_ptr + index // E * counts_stride + index % E, 0, mask=index < S * E)
        index += BLOCK


def report_of(
    counts_E: Tensor, num_tokens: int, condition: int, *, bad_logits: Tensor | None = None, draw: Tensor | None = None
) -> Tensor:
    """See kernels/reports.py."""
    E = counts_E.shape[0]
    report = torch.empty(HEADER + E, dtype=torch.int64, device=counts_E.device)
    _report_of[(cdiv(E, _BLOCK),)](
        counts_E.contiguous(),
        counts_E if bad_logits is None else bad_logits,
        counts_E if draw is None else draw,
        report,
        num_tokens,
        condition,
        E,
        HAS_BAD_LOGITS=bad_logits is not None,
        HAS_DRAW=draw is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return report


def void_unless(counts_SE: Tensor, conditions_S: Tensor, healthy: int) -> None:
    """See kernels/reports.py."""
    S, E = counts_SE.shape
    assert counts_SE.stride(1) == 1
    _void_unless[(1,)](
        counts_SE,
        conditions_S,
        counts_SE.stride(0),
        conditions_S.stride(0),
        healthy,
        S,
        E,
        RANKS=next_power_of_2(S),
        BLOCK=_BLOCK,
        num_warps=4,
    )
