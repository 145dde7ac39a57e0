"""Acquire and release of the peers' buffers as two kernels, for copy engines that write between them.

A kernel that pushes begins with `wait_peers_ready` and ends with `signal_done_and_wait` (signals.py). Copy engines can
do neither, so these kernels run before and after the copies. The SMs compute during the copies.

Each is one warp on the stream of the GEMMs, never concurrent with one: a GEMM that fills every SM would delay it, and
while it waits for other ranks it would delay one program of the GEMM.

Example: two ranks copy x with copy engines. `acquire_peers` on rank 0 sets READY on both ranks to epoch 1 and waits
until rank 1 has done the same. Rank 0 copies x to rank 1. `release_peers` on rank 0, after the copy, sets ARRIVED on
both ranks to 1 and waits until rank 1 has done the same. Then x of rank 1 is in rank 0's buffer.
"""

import triton
import triton.language as tl

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.dispatch.symmetric.signal_pad import SignalPad, Stage
from sonic_ep.kernels.dispatch.symmetric.signals import signal_done_and_wait, wait_peers_ready


@fast_launch
@triton.jit(do_not_specialize=["timeout", "rank"])
def _acquire_peers(
    signals_ptr, state_ptr, host_status_ptr, timeout: tl.int64, rank, STAGE: tl.constexpr, S: tl.constexpr
):
    """Signals READY and waits for READY of all peers, see `wait_peers_ready`. Grid: (1,)."""
    wait_peers_ready(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)


@fast_launch
@triton.jit(do_not_specialize=["timeout", "rank"])
def _release_peers(
    signals_ptr, state_ptr, host_status_ptr, timeout: tl.int64, rank, STAGE: tl.constexpr, S: tl.constexpr
):
    """Signals ARRIVED, waits for ARRIVED of all peers and advances the epoch. Grid: (1,)."""
    signal_done_and_wait(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE, S)


def acquire_peers(pad: SignalPad, stage: Stage) -> None:
    """Launches the wait until all peers' buffers may be written.

    Work after it on the stream may write wherever the stage's kernel would. `release_peers` must follow before the next
    kernel of the stage.
    """
    _acquire_peers[(1,)](*pad.arguments, STAGE=stage.value, S=pad.size, num_warps=1)


def release_peers(pad: SignalPad, stage: Stage) -> None:
    """Launches the signal that this rank's writes are complete, and the wait for the writes of all peers.

    Call it when the stream is ordered after the copies. Work after it on the stream finds what all ranks have written.
    """
    _release_peers[(1,)](*pad.arguments, STAGE=stage.value, S=pad.size, num_warps=1)
