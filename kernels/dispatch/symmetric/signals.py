"""The ends of kernels that write into the memory of other ranks, `wait_peers_ready` and `signal_done_and_wait` above
all. See kernels/dispatch/symmetric/signal_pad.py.

A flag holds how many meetings of its stage its source has come to, so it only grows: nothing is reset, a rank may be
several meetings ahead in another stage, and a captured CUDA graph can be replayed. Every rank has, by stage and source,
one flag *ready* (the source's buffers may be written) and one *arrived* (what the source writes here is complete).

Memory order: what a program's threads write is ordered before its ticket by a barrier and an atomic of release
semantics; the program with the last ticket, which a barrier hands to its threads, therefore releases, to the whole
system, the writes of all. Every wait ends in an acquire. A program waits for other ranks, never for programs of its own
grid. Flags of several ranks are set, and asked for, by a thread each: one after the other, each takes a round trip.

Legend: S ranks of the EP group.
"""

import triton
import triton.language as tl

from sonic_ep.kernels.dispatch.symmetric.signal_pad import MAX_RANKS, Stage

_STAGES, _RANKS = tl.constexpr(len(Stage)), tl.constexpr(MAX_RANKS)
READY, ARRIVED = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def now():
    """Nanoseconds."""
    return tl.extra.cuda.globaltimer()  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def signal_ptr(signals_ptr, dst, source, kind: tl.constexpr, STAGE: tl.constexpr, S: tl.constexpr):
    """Where `dst` keeps the flag of `source`."""
    return tl.load(signals_ptr + dst).to(tl.pointer_type(tl.int64)) + (STAGE * 2 + kind) * S + source


@triton.jit
def is_empty_step(pairs_ptr, S: tl.constexpr, RANKS: tl.constexpr):
    """Has no rank any pair for any owner? Then no rank meets: some may not even have launched the kernel."""
    index = tl.arange(0, RANKS * RANKS)
    return tl.max(tl.load(pairs_ptr + index, mask=index < S * S, other=0), axis=0) == 0


@triton.jit
def lost_peer(state_ptr):
    """What is reported of a rank that was waited for in vain, see Meeting; 0 while all is well. One thread asks for all
    of a program, which must not go different ways."""
    lost = tl.atomic_add(state_ptr + 3 * _STAGES + tl.arange(0, 1), 0, sem="relaxed", scope="gpu")
    return tl.max(lost, axis=0)


@triton.jit
def all_peers(S: tl.constexpr):
    """All ranks, some twice where S is no power of two: a thread for each, so that no flag waits for another."""
    return tl.arange(0, triton.next_power_of_2(S)) % S


@triton.jit
def put_signal(epoch, signals_ptr, peer, rank, kind: tl.constexpr, STAGE: tl.constexpr, S: tl.constexpr):
    """Set this rank's flag at a peer, or at a block of them, after what this program wrote before a barrier."""
    tl.atomic_xchg(signal_ptr(signals_ptr, peer, rank, kind, STAGE, S), epoch, sem="release", scope="sys")


@triton.jit
def _first_late(signal, source, epoch, S: tl.constexpr):
    """S less the first source whose flag has not reached the meeting, 0 if all have."""
    seen = tl.atomic_add(signal, 0, sem="acquire", scope="sys")
    return tl.max(tl.where(seen < epoch, S - source, 0), axis=0)


@triton.jit
def wait_signals(
    epoch,
    signals_ptr,
    state_ptr,
    host_status_ptr,
    timeout,
    rank,
    source,
    kind: tl.constexpr,
    STAGE: tl.constexpr,
    S: tl.constexpr,
):
    """Until the flags of a block of sources have reached `epoch`, or patience is over: then the first of those that
    are missing is reported, and nobody waits any more. Not 0 if it has been given up."""
    signal = signal_ptr(signals_ptr, rank, source, kind, STAGE, S)
    late = _first_late(signal, source, epoch, S)
    timed_out = tl.zeros([], tl.int64)
    if late > 0:
        start = now()
        timed_out = lost_peer(state_ptr)
        while (late > 0) & (timed_out == 0):
            late = _first_late(signal, source, epoch, S)
            if (late > 0) & (now() - start > timeout):  # by the clock of the thread that stores
                lost = tl.zeros([], tl.int64) + STAGE * _RANKS + S - late + 1
                tl.store(state_ptr + 3 * _STAGES, lost)
                tl.store(host_status_ptr, lost)
            timed_out = lost_peer(state_ptr)
    return timed_out


@triton.jit
def wait_peers_ready(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE: tl.constexpr, S: tl.constexpr):
    """Until all ranks' buffers may be written. Not 0 if that has been given up: then none may."""
    epoch = tl.load(state_ptr + STAGE) + 1
    if tl.program_id(0) == 0:
        put_signal(epoch, signals_ptr, all_peers(S), rank, READY, STAGE, S)
    return wait_signals(epoch, signals_ptr, state_ptr, host_status_ptr, timeout, rank, all_peers(S), READY, STAGE, S)


@triton.jit
def next_work_item(state_ptr, STAGE: tl.constexpr):
    """The number of the next piece of work, behind those that programs begin with: who is faster takes more."""
    return tl.num_programs(0) + tl.atomic_add(state_ptr + 2 * _STAGES + STAGE, 1, sem="relaxed", scope="gpu")


@triton.jit
def _advance_epoch(epoch, state_ptr, STAGE: tl.constexpr):
    tl.store(state_ptr + _STAGES + STAGE, 0)
    tl.store(state_ptr + 2 * _STAGES + STAGE, 0)
    tl.store(state_ptr + STAGE, epoch)


@triton.jit
def retire_program(epoch, state_ptr, STAGE: tl.constexpr):
    """The end of every program of a kernel: the last of them ends the meeting."""
    ticket = tl.atomic_add(state_ptr + _STAGES + STAGE, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        _advance_epoch(epoch, state_ptr, STAGE)


@triton.jit
def signal_done_and_wait(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE: tl.constexpr, S: tl.constexpr):
    """Tell all ranks that this one's writes are complete, and wait for theirs. The end of a kernel.

    A rank that has given up on another tells nobody: what it sends is made of what has not come, and the other, if it
    is only late, shall give up as well instead of computing on that.
    """
    epoch = tl.load(state_ptr + STAGE) + 1
    tl.debug_barrier()
    ticket = tl.atomic_add(state_ptr + _STAGES + STAGE, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        if lost_peer(state_ptr) == 0:
            put_signal(epoch, signals_ptr, all_peers(S), rank, ARRIVED, STAGE, S)
            wait_signals(epoch, signals_ptr, state_ptr, host_status_ptr, timeout, rank, all_peers(S), ARRIVED, STAGE, S)
        _advance_epoch(epoch, state_ptr, STAGE)
