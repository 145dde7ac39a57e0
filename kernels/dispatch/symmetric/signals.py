"""Signals between ranks: how a kernel that writes into the memory of other ranks begins and ends.

A signal is an int64 in symmetric memory. In NVSHMEM's terms, `put_signal` is a signal_op with SIGNAL_SET, and
`wait_signals` is a signal_wait_until with CMP_GE. The data are plain stores to mapped peer memory. Every rank has two
signals for each stage and source rank:

    READY    the source's buffers of this stage may be written
    ARRIVED  everything that the source has written here is complete

Protocol of a kernel, between `wait_peers_ready` and `signal_done_and_wait`:

1. Program 0 puts READY at all peers. Earlier kernels on the stream have read the buffers, so they are free.
2. Every program waits for READY of all peers, then stores into their buffers.
3. Every program takes a ticket when its stores are issued. The one with the last ticket puts ARRIVED at all peers.
4. The same program waits for ARRIVED of all peers and advances the epoch. When the kernel ends, all data is here.

Epochs: the kernels of a stage have the epochs 1, 2, 3, ... A rank sets its signals to the epoch of its kernel, and
waits until the signals of its peers are >= that epoch. Signals only grow, so none is reset, and a rank may be several
epochs further in another stage. The epoch is read from device memory, so a captured CUDA graph can be replayed.

Memory order: each line happens before the next, by the PTX memory model.

    sender     stores to peer memory         all threads of all programs
               barrier of the program        `tl.debug_barrier`
               ticket                        atomic add, acq_rel, gpu scope, one thread of each program
               last ticket                   the same atomic: it synchronizes with the releases of all tickets before it
               barrier of the last program   Triton broadcasts the result of a scalar atomic through shared memory
               put ARRIVED                   atomic exchange, release, sys scope, one thread for each peer
    receiver   wait for ARRIVED              atomic add of 0, acquire, sys scope, one thread for each peer
               end of the kernel
               loads of the data             later kernels on the stream

Happens-before is transitive, so the one release at sys scope covers the stores of all programs. READY works the same
way in the other direction: the end of the kernels that read the buffers, READY (release), the wait of every program
(acquire), its stores. A wait is an atomic add of 0 because Triton has no load with acquire semantics.

Progress: a program waits for other ranks and for READY of its own rank's program 0, but for no later program of its
grid. So the grid need not be resident as a whole.

Each signal is put or polled by a thread of its own, so that the round trips over NVLink overlap.

Legend: S ranks of the EP group.
"""

import triton
import triton.language as tl

from sonic_ep.kernels.dispatch.symmetric.signal_pad import MAX_RANKS, Stage

_STAGES, _RANKS = tl.constexpr(len(Stage)), tl.constexpr(MAX_RANKS)
READY, ARRIVED = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def now():
    """Returns the time in nanoseconds."""
    return tl.extra.cuda.globaltimer()  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def signal_ptr(signals_ptr, dst, source, kind: tl.constexpr, STAGE: tl.constexpr, S: tl.constexpr):
    """Returns the address of the signal on rank `dst` that `source` sets."""
    return tl.load(signals_ptr + dst).to(tl.pointer_type(tl.int64)) + (STAGE * 2 + kind) * S + source


@triton.jit
def is_empty_step(pairs_ptr, S: tl.constexpr, RANKS: tl.constexpr):
    """Returns whether no rank has a pair for any destination rank.

    Then a kernel must return without a signal or a wait, because other ranks may not have launched it.
    """
    index = tl.arange(0, RANKS * RANKS)
    return tl.max(tl.load(pairs_ptr + index, mask=index < S * S, other=0), axis=0) == 0


@triton.jit
def lost_peer(state_ptr):
    """Returns the code of the lost peer, see SignalPad.state, or 0 if there is none.

    One thread reads for the whole program: another program may set the code meanwhile, and all threads of this one must
    take the same branch.
    """
    lost = tl.atomic_add(state_ptr + 3 * _STAGES + tl.arange(0, 1), 0, sem="relaxed", scope="gpu")
    return tl.max(lost, axis=0)


@triton.jit
def all_peers(S: tl.constexpr):
    """Returns all ranks, one for each thread. Some occur twice if S is not a power of two, which is harmless."""
    return tl.arange(0, triton.next_power_of_2(S)) % S


@triton.jit
def put_signal(epoch, signals_ptr, peer, rank, kind: tl.constexpr, STAGE: tl.constexpr, S: tl.constexpr):
    """Sets this rank's signal on a peer, or on a block of peers, to `epoch`. A release at sys scope.

    It covers the stores of the whole program if a barrier is between them and this call.
    """
    tl.atomic_xchg(signal_ptr(signals_ptr, peer, rank, kind, STAGE, S), epoch, sem="release", scope="sys")


@triton.jit
def _first_late(signal, source, epoch, S: tl.constexpr):
    """Returns S - (the first source whose signal is below `epoch`), or 0 if there is none. An acquire at sys scope."""
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
    """Waits until the signals of a block of sources are >= `epoch`, or until the timeout. An acquire at sys scope.

    Returns 0 if they are, otherwise the code of the lost peer. After `timeout` ns it stores the code of the first
    missing source to `state` and `host_status`. All programs of this rank then stop waiting, also in later kernels.
    """
    signal = signal_ptr(signals_ptr, rank, source, kind, STAGE, S)
    late = _first_late(signal, source, epoch, S)
    timed_out = tl.zeros([], tl.int64)
    if late > 0:
        start = now()
        timed_out = lost_peer(state_ptr)
        while (late > 0) & (timed_out == 0):
            late = _first_late(signal, source, epoch, S)
            if (late > 0) & (now() - start > timeout):  # threads read different times: the storing thread decides
                lost = tl.zeros([], tl.int64) + STAGE * _RANKS + S - late + 1
                tl.store(state_ptr + 3 * _STAGES, lost)
                tl.store(host_status_ptr, lost)
            timed_out = lost_peer(state_ptr)
    return timed_out


@triton.jit
def wait_peers_ready(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE: tl.constexpr, S: tl.constexpr):
    """Signals READY to all peers and waits for theirs. Every program calls it before its first store to a peer.

    Returns 0 if the peers' buffers may be written, otherwise the code of the lost peer; then none may be written.
    """
    epoch = tl.load(state_ptr + STAGE) + 1
    if tl.program_id(0) == 0:
        put_signal(epoch, signals_ptr, all_peers(S), rank, READY, STAGE, S)
    return wait_signals(epoch, signals_ptr, state_ptr, host_status_ptr, timeout, rank, all_peers(S), READY, STAGE, S)


@triton.jit
def next_work_item(state_ptr, STAGE: tl.constexpr):
    """Fetches the next work item of a grid that balances its load dynamically: a fast program processes more items.

    Programs start with the items 0 to num_programs - 1; this returns those from num_programs on.
    """
    return tl.num_programs(0) + tl.atomic_add(state_ptr + 2 * _STAGES + STAGE, 1, sem="relaxed", scope="gpu")


@triton.jit
def _advance_epoch(epoch, state_ptr, STAGE: tl.constexpr):
    """Resets the tickets and work items of a stage and completes its epoch. Called by the last program of a kernel."""
    tl.store(state_ptr + _STAGES + STAGE, 0)
    tl.store(state_ptr + 2 * _STAGES + STAGE, 0)
    tl.store(state_ptr + STAGE, epoch)


@triton.jit
def retire_program(epoch, state_ptr, STAGE: tl.constexpr):
    """Takes a ticket at the end of a program. The program with the last ticket advances the epoch."""
    ticket = tl.atomic_add(state_ptr + _STAGES + STAGE, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        _advance_epoch(epoch, state_ptr, STAGE)


@triton.jit
def signal_done_and_wait(signals_ptr, state_ptr, host_status_ptr, timeout, rank, STAGE: tl.constexpr, S: tl.constexpr):
    """Signals ARRIVED to all peers, waits for theirs, and advances the epoch. Every program calls it last.

    Only the program with the last ticket signals and waits. If this rank has lost a peer, it does neither, because what
    it wrote may derive from data that never came. Its peers then time out too, instead of computing on that data.
    """
    epoch = tl.load(state_ptr + STAGE) + 1
    tl.debug_barrier()
    ticket = tl.atomic_add(state_ptr + _STAGES + STAGE, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        if lost_peer(state_ptr) == 0:
            put_signal(epoch, signals_ptr, all_peers(S), rank, ARRIVED, STAGE, S)
            wait_signals(epoch, signals_ptr, state_ptr, host_status_ptr, timeout, rank, all_peers(S), ARRIVED, STAGE, S)
        _advance_epoch(epoch, state_ptr, STAGE)
