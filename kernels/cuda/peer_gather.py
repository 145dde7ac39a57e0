"""A few integers of every rank for all: each rank pushes its own and a flag, then takes what has arrived.

Two kernels, so that others can run between them. There are two places for what arrives, and meetings take turns at
them: a rank cannot come to the meeting after next before all have come to the next one, that is, before they have taken
what arrived at this one. So nobody asks whether a place is free.

Legend: S ranks, F integers of a rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import KernelInterface

from sonic_ep.kernels.cuda.launch import launched
from sonic_ep.kernels.cuda.peers import ARRIVED, leave, reported, tell, wait_for
from sonic_ep.kernels.peers import Meeting, Stage

PLACES = 2
_BLOCK = 512


@triton.jit
def _place(places_ptr, owner, source, meeting, room, S: tl.constexpr, PLACES: tl.constexpr):
    """Where `owner` keeps what `source` says at this meeting."""
    return tl.load(places_ptr + owner).to(tl.pointer_type(tl.int64)) + (meeting % PLACES * S + source) * room


@triton.jit
def _copy(from_ptr, to_ptr, F, there, BLOCK: tl.constexpr):
    """Past the first-level cache, which knows nothing of what others write. Zeros unless `there`."""
    offset = 0
    while offset < F:
        index = offset + tl.arange(0, BLOCK)
        values = tl.load(from_ptr + index, mask=(index < F) & there, other=0, cache_modifier=".cg")
        tl.store(to_ptr + index, values, mask=index < F)
        offset += BLOCK


@launched
@triton.jit(do_not_specialize=["patience", "rank", "F", "room"])
def _announce(
    values_ptr,
    places_ptr,
    flags_ptr,
    state_ptr,
    report_ptr,
    patience,
    rank,
    F,
    room,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a peer."""
    meeting, peer = tl.load(state_ptr + STAGE) + 1, tl.program_id(0)
    _copy(values_ptr, _place(places_ptr, peer, rank, meeting, room, S, PLACES), F, True, BLOCK)
    tl.debug_barrier()
    tell(meeting, flags_ptr, peer, rank, ARRIVED, STAGE, S)


@launched
@triton.jit(do_not_specialize=["patience", "rank", "F", "room"])
def _take_all(
    places_ptr,
    out_ptr,
    flags_ptr,
    state_ptr,
    report_ptr,
    patience,
    rank,
    F,
    room,
    STAGE: tl.constexpr,
    S: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a source."""
    meeting, source = tl.load(state_ptr + STAGE) + 1, tl.program_id(0)
    one = source + tl.arange(0, 1)
    wait_for(meeting, flags_ptr, state_ptr, report_ptr, patience, rank, one, ARRIVED, STAGE, S)
    tl.debug_barrier()
    place_ptr = _place(places_ptr, rank, source, meeting, room, S, PLACES)
    _copy(place_ptr, out_ptr + source * F, F, reported(state_ptr) == 0, BLOCK)
    leave(meeting, state_ptr, STAGE)


def announce(meeting: Meeting, values_F: Tensor, places_S: Tensor, room: int) -> None:
    """Tell every rank these integers. `take_all` must follow on every rank before the next `announce`.

    values_F: (F,) int64. places_S: (S,) int64 addresses of each rank's (PLACES, S, room) int64, room >= F, the same
    for meetings that follow each other.
    """
    _launch(_announce, meeting, (values_F, places_S), values_F.shape[0], room)


def take_all(meeting: Meeting, places_S: Tensor, count: int, room: int) -> Tensor:
    """(S, F) int64: what every rank has announced, once it has; zeros if a rank was waited for in vain."""
    gathered_SF = torch.empty(meeting.size, count, dtype=torch.int64, device=places_S.device)
    _launch(_take_all, meeting, (places_S, gathered_SF), count, room)
    return gathered_SF


def _launch(
    kernel: KernelInterface[Any], meeting: Meeting, tensors: tuple[Tensor, Tensor], count: int, room: int
) -> None:
    kernel[(meeting.size,)](
        *tensors,
        *meeting.arguments,
        count,
        room,
        STAGE=Stage.COUNTS.value,
        S=meeting.size,
        PLACES=PLACES,
        BLOCK=_BLOCK,
        num_warps=4,
    )
