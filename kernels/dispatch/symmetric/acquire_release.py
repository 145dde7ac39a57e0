"""`wait_peers_ready` and `signal_done_and_wait` as kernels of their own: for what copy engines write between the two,
while the SMs compute.

Both are one warp and never run beside a GEMM: a kernel that fills every SM would keep them out, and they, waiting for
other ranks, would keep one of its programs out.
"""

import triton
import triton.language as tl

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.dispatch.symmetric.signal_pad import SignalPad, Stage
from sonic_ep.kernels.dispatch.symmetric.signals import signal_done_and_wait, wait_peers_ready


@fast_launch
@triton.jit(do_not_specialize=["timeout", "rank"])
def _acquire_peers(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE: tl.constexpr, S: tl.constexpr):
    wait_peers_ready(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)


@fast_launch
@triton.jit(do_not_specialize=["timeout", "rank"])
def _release_peers(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE: tl.constexpr, S: tl.constexpr):
    signal_done_and_wait(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)


def acquire_peers(pad: SignalPad, stage: Stage) -> None:
    """After it, what is launched may write where the stage's kernel would. `release_peers` must follow before another
    meeting."""
    _acquire_peers[(1,)](*pad.arguments, STAGE=stage.value, S=pad.size, num_warps=1)


def release_peers(pad: SignalPad, stage: Stage) -> None:
    """After it, what all ranks have written is here."""
    _release_peers[(1,)](*pad.arguments, STAGE=stage.value, S=pad.size, num_warps=1)
