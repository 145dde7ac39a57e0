"""A few integers of every rank for all: each rank pushes its own and a flag, then takes what has arrived.

Two kernels, so that others can run between them. There are two places for what arrives, and meetings take turns at
them: a rank cannot come to the meeting after next before all have come to the next one, that is, before they have taken
what arrived at this one. So nobody asks whether a place is free.

Legend: S ranks of the EP group, F fields of a table.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import KernelInterface

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.dispatch.symmetric.signal_pad import SignalPad, Stage
from sonic_ep.kernels.dispatch.symmetric.signals import ARRIVED, lost_peer, put_signal, retire_program, wait_signals

NUM_SLOTS = 2
_BLOCK = 512


@triton.jit
def _slot(slots_ptr, dst, source, epoch, capacity, S: tl.constexpr, NUM_SLOTS: tl.constexpr):
    """Where `dst` keeps what `source` says at this meeting."""
    return tl.load(slots_ptr + dst).to(tl.pointer_type(tl.int64)) + (epoch % NUM_SLOTS * S + source) * capacity


@triton.jit
def _copy(from_ptr, to_ptr, F, there, BLOCK: tl.constexpr):
    """Past the first-level cache, which knows nothing of what others write. Zeros unless `there`."""
    offset = 0
    while offset < F:
        index = offset + tl.arange(0, BLOCK)
        values = tl.load(from_ptr + index, mask=(index < F) & there, other=0, cache_modifier=".cg")
        tl.store(to_ptr + index, values, mask=index < F)
        offset += BLOCK


@fast_launch
@triton.jit(do_not_specialize=["timeout", "rank", "F", "capacity"])
def _all_gather_start(
    values_ptr,
    slots_ptr,
    signals_ptr,
    state_ptr,
    host_status_ptr,
    timeout,
    rank,
    F,
    capacity,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a peer."""
    epoch, peer = tl.load(state_ptr + STAGE) + 1, tl.program_id(0)
    _copy(values_ptr, _slot(slots_ptr, peer, rank, epoch, capacity, S, NUM_SLOTS), F, True, BLOCK)
    tl.debug_barrier()
    put_signal(epoch, signals_ptr, peer, rank, ARRIVED, STAGE, S)


@fast_launch
@triton.jit(do_not_specialize=["timeout", "rank", "F", "capacity"])
def _all_gather_wait(
    slots_ptr,
    out_ptr,
    signals_ptr,
    state_ptr,
    host_status_ptr,
    timeout,
    rank,
    F,
    capacity,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a source."""
    epoch, source = tl.load(state_ptr + STAGE) + 1, tl.program_id(0)
    one = source + tl.arange(0, 1)
    wait_signals(epoch, signals_ptr, state_ptr, host_status_ptr, timeout, rank, one, ARRIVED, STAGE, S)
    tl.debug_barrier()
    slot_ptr = _slot(slots_ptr, rank, source, epoch, capacity, S, NUM_SLOTS)
    _copy(slot_ptr, out_ptr + source * F, F, lost_peer(state_ptr) == 0, BLOCK)
    retire_program(epoch, state_ptr, STAGE)


def all_gather_start(pad: SignalPad, values_F: Tensor, slots_S: Tensor, capacity: int) -> None:
    """Tell every rank these integers. `all_gather_wait` must follow on every rank before the next `all_gather_start`.

    values_F: (F,) int64. slots_S: (S,) int64 addresses of each rank's (PLACES, S, room) int64, room >= F, the same
    for meetings that follow each other.
    """
    _launch(_all_gather_start, pad, (values_F, slots_S), values_F.shape[0], capacity)


def all_gather_wait(pad: SignalPad, slots_S: Tensor, count: int, capacity: int) -> Tensor:
    """(S, F) int64: what every rank has announced, once it has; zeros if a rank was waited for in vain."""
    gathered_SF = torch.empty(pad.size, count, dtype=torch.int64, device=slots_S.device)
    _launch(_all_gather_wait, pad, (slots_S, gathered_SF), count, capacity)
    return gathered_SF


def _launch(
    kernel: KernelInterface[Any], pad: SignalPad, tensors: tuple[Tensor, Tensor], count: int, capacity: int
) -> None:
    kernel[(pad.size,)](
        *tensors,
        *pad.arguments,
        count,
        capacity,
        STAGE=Stage.COUNTS.value,
        S=pad.size,
        NUM_SLOTS=NUM_SLOTS,
        BLOCK=_BLOCK,
        num_warps=4,
    )
