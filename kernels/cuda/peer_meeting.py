"""`begin` and `finish` as kernels of their own: for what copy engines write between the two, while the SMs compute.

Both are one warp and never run beside a GEMM: a kernel that fills every SM would keep them out, and they, waiting for
other ranks, would keep one of its programs out.
"""

import triton
import triton.language as tl

from sonic_ep.kernels.cuda.launch import launched
from sonic_ep.kernels.cuda.peers import begin, finish
from sonic_ep.kernels.peers import Meeting, Stage


@launched
@triton.jit(do_not_specialize=["patience", "rank"])
def _come(flags_ptr, state_ptr, report_ptr, patience, rank, STAGE: tl.constexpr, S: tl.constexpr):
    begin(flags_ptr, state_ptr, report_ptr, patience, rank, STAGE, S)


@launched
@triton.jit(do_not_specialize=["patience", "rank"])
def _go(flags_ptr, state_ptr, report_ptr, patience, rank, STAGE: tl.constexpr, S: tl.constexpr):
    finish(flags_ptr, state_ptr, report_ptr, patience, rank, STAGE, S)


def come(meeting: Meeting, stage: Stage) -> None:
    """After it, what is launched may write where the stage's kernel would. `go` must follow before another meeting."""
    _come[(1,)](*meeting.arguments, STAGE=stage.value, S=meeting.size, num_warps=1)


def go(meeting: Meeting, stage: Stage) -> None:
    """After it, what all ranks have written is here."""
    _go[(1,)](*meeting.arguments, STAGE=stage.value, S=meeting.size, num_warps=1)
