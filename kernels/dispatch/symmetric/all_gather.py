"""An all-gather of a few integers of every rank, in two kernels, so that other kernels can run between them.

The first kernel pushes this rank's integers and an ARRIVED signal to every rank. The second waits for the signals and
copies what has arrived to a tensor.

There is no READY signal. Two slots for arriving integers alternate by epoch, so epoch k + 2 writes to the slot of epoch
k. A rank starts epoch k + 2 after its wait for epoch k + 1, for which every rank has started k + 1. By stream order,
every rank had read its slot of epoch k before that.

Example: two ranks, F = 2, epoch 1, slot 1. Rank 0 gathers [3, 5] and rank 1 gathers [4, 0]. Rank 0 writes [3, 5] to row
0 of slot 1 on both ranks and sets its ARRIVED signal on both to 1. After the wait both ranks have [[3, 5], [4, 0]].
Epoch 2 uses slot 0.

Legend: S ranks of the EP group, F fields of a table.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import KernelInterface

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.dispatch.symmetric.signal_pad import SignalPad, Stage
from sonic_ep.kernels.dispatch.symmetric.signals import ARRIVED, lost_peer, put_signal, retire_program, wait_signals
from sonic_ep.kernels.program.trace import new_empty

NUM_SLOTS = 2
_BLOCK = 512


@triton.jit
def _slot(slots_ptr, dst, source, epoch, capacity, S: tl.constexpr, NUM_SLOTS: tl.constexpr):
    """Returns the address on rank `dst` to which `source` writes. Memory there: (NUM_SLOTS, S, capacity) int64."""
    return tl.load(slots_ptr + dst).to(tl.pointer_type(tl.int64)) + (epoch % NUM_SLOTS * S + source) * capacity


@triton.jit
def _copy(from_ptr, to_ptr, F, has_arrived, BLOCK: tl.constexpr):
    """Copies F integers, or writes zeros if they have not arrived.

    Loads bypass the L1 cache, which is not coherent with the stores of other ranks.
    """
    offset = 0
    while offset < F:
        index = offset + tl.arange(0, BLOCK)
        values = tl.load(from_ptr + index, mask=(index < F) & has_arrived, other=0, cache_modifier=".cg")
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
    timeout: tl.int64,
    rank,
    F,
    capacity,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pushes this rank's integers to one peer, and puts ARRIVED there. A program handles one peer. Grid: (S,).

    Reads values (F,). Writes row `rank` of the epoch's slot on the peer. Does not advance the epoch.
    """
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
    timeout: tl.int64,
    rank,
    F,
    capacity,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Waits for the integers of one source and copies them to row `source` of out, (S, F). Grid: (S,).

    A program handles one source. It writes zeros if a peer is lost. The program with the last ticket advances the
    epoch.
    """
    epoch, source = tl.load(state_ptr + STAGE) + 1, tl.program_id(0)
    one = source + tl.arange(0, 1)
    wait_signals(epoch, signals_ptr, state_ptr, host_status_ptr, timeout, rank, one, ARRIVED, STAGE, S)
    tl.debug_barrier()
    slot_ptr = _slot(slots_ptr, rank, source, epoch, capacity, S, NUM_SLOTS)
    _copy(slot_ptr, out_ptr + source * F, F, lost_peer(state_ptr) == 0, BLOCK)
    retire_program(epoch, state_ptr, STAGE)


def all_gather_start(pad: SignalPad, values_F: Tensor, slots_S: Tensor, capacity: int) -> None:
    """Launches the push of this rank's integers to every rank.

    `all_gather_wait` must follow on every rank before the next `all_gather_start`.

    Shapes: values_F (F,) int64. slots_S (S,) int64 addresses of each rank's slots, (NUM_SLOTS, S, capacity) int64 with
            capacity >= F. Slots and capacity stay the same from call to call, unless all ranks synchronize in between.
    """
    _launch(_all_gather_start, pad, (values_F, slots_S), values_F.shape[0], capacity)


def all_gather_wait(pad: SignalPad, slots_S: Tensor, count: int, capacity: int) -> Tensor:
    """Launches the wait for all ranks' integers. Returns them, (S, F) int64 with F = `count`.

    After a timeout, the rows of missing peers and all rows that are copied later are zero.
    """
    gathered_SF = new_empty(slots_S, (pad.size, count), torch.int64)
    _launch(_all_gather_wait, pad, (slots_S, gathered_SF), count, capacity)
    return gathered_SF


def _launch(
    kernel: KernelInterface[Callable],
    pad: SignalPad,
    tensors: tuple[Tensor, Tensor],
    count: int,
    capacity: int,
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
