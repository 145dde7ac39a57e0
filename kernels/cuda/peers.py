"""The ends of kernels that write into the memory of other ranks, `begin` and `finish` above all. See kernels/peers.py.

A flag holds how many meetings of its stage its source has come to, so it only grows: nothing is reset, a rank may be
several meetings ahead in another stage, and a captured CUDA graph can be replayed. Every rank has, by stage and source,
one flag *ready* (the source's buffers may be written) and one *arrived* (what the source writes here is complete).

Memory order: what a program's threads write is ordered before its ticket by a barrier and an atomic of release
semantics; the program with the last ticket therefore releases, to the whole system, the writes of all. Every wait ends
in an acquire. A program waits for other ranks, never for programs of its own grid.

Legend: S ranks.
"""

import triton
import triton.language as tl

from sonic_ep.kernels.peers import MOST_RANKS, Stage

_STAGES, _RANKS = tl.constexpr(len(Stage)), tl.constexpr(MOST_RANKS)
_READY, _ARRIVED = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def now():
    """Nanoseconds."""
    return tl.extra.cuda.globaltimer()  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def flag(flags_ptr, owner, source, kind: tl.constexpr, STAGE: tl.constexpr, S: tl.constexpr):
    """Where `owner` keeps the flag of `source`."""
    return tl.load(flags_ptr + owner).to(tl.pointer_type(tl.int64)) + (STAGE * 2 + kind) * S + source


@triton.jit
def nobody_sends(pairs_ptr, S: tl.constexpr, RANKS: tl.constexpr):
    """Has no rank any pair for any owner? Then no rank meets: some may not even have launched the kernel."""
    index = tl.arange(0, RANKS * RANKS)
    return tl.max(tl.load(pairs_ptr + index, mask=index < S * S, other=0), axis=0) == 0


@triton.jit
def reported(state_ptr):
    """What is reported of a rank that was waited for in vain, see Meeting; 0 while all is well."""
    return tl.load(state_ptr + 2 * _STAGES, volatile=True)


@triton.jit
def wait(flag_ptr, meeting, source, state_ptr, report_ptr, patience, STAGE: tl.constexpr):
    """Until the flag has reached `meeting`, or patience is over: then it is reported, and nobody waits any more."""
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    if seen < meeting:
        start = now()
        given_up = reported(state_ptr)
        while (seen < meeting) & (given_up == 0):
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            given_up = reported(state_ptr)
            if (seen < meeting) & (given_up == 0) & (now() - start > patience):
                given_up = tl.zeros([], tl.int64) + STAGE * _RANKS + source + 1
                tl.store(state_ptr + 2 * _STAGES, given_up)
                tl.store(report_ptr, given_up)


@triton.jit
def begin(flags_ptr, state_ptr, report_ptr, patience, rank, STAGE: tl.constexpr, S: tl.constexpr):
    """The number of this meeting, once all ranks' buffers may be written."""
    meeting = tl.load(state_ptr + STAGE) + 1
    if tl.program_id(0) == 0:
        for peer in tl.static_range(S):
            tl.atomic_xchg(flag(flags_ptr, peer, rank, _READY, STAGE, S), meeting, sem="release", scope="sys")
    for peer in tl.static_range(S):
        wait(flag(flags_ptr, rank, peer, _READY, STAGE, S), meeting, peer, state_ptr, report_ptr, patience, STAGE)
    return meeting


@triton.jit
def arrive(meeting, flags_ptr, peer, rank, STAGE: tl.constexpr, S: tl.constexpr):
    """Tell a peer that this rank's writes there are complete: those of this program, after a barrier."""
    tl.atomic_xchg(flag(flags_ptr, peer, rank, _ARRIVED, STAGE, S), meeting, sem="release", scope="sys")


@triton.jit
def wait_for(meeting, flags_ptr, state_ptr, report_ptr, patience, rank, source, STAGE: tl.constexpr, S: tl.constexpr):
    """Until what `source` writes here is complete."""
    wait(flag(flags_ptr, rank, source, _ARRIVED, STAGE, S), meeting, source, state_ptr, report_ptr, patience, STAGE)


@triton.jit
def _end(meeting, state_ptr, STAGE: tl.constexpr):
    tl.store(state_ptr + _STAGES + STAGE, 0)
    tl.store(state_ptr + STAGE, meeting)


@triton.jit
def leave(meeting, state_ptr, STAGE: tl.constexpr):
    """The end of every program of a kernel: the last of them ends the meeting."""
    ticket = tl.atomic_add(state_ptr + _STAGES + STAGE, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        _end(meeting, state_ptr, STAGE)


@triton.jit
def finish(meeting, flags_ptr, state_ptr, report_ptr, patience, rank, STAGE: tl.constexpr, S: tl.constexpr):
    """Tell all ranks that this one's writes are complete, and wait for theirs. The end of a kernel."""
    tl.debug_barrier()
    ticket = tl.atomic_add(state_ptr + _STAGES + STAGE, 1, sem="acq_rel", scope="gpu")
    if ticket == tl.num_programs(0) - 1:
        for peer in tl.static_range(S):
            arrive(meeting, flags_ptr, peer, rank, STAGE, S)
        for peer in tl.static_range(S):
            wait_for(meeting, flags_ptr, state_ptr, report_ptr, patience, rank, peer, STAGE, S)
        _end(meeting, state_ptr, STAGE)
