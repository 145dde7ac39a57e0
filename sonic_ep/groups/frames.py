"""Frames: every exchange of a group begins with as many bytes on every rank, and says there what it is.

docs/failures.md#different-calls says why. An exchange begins with one all-gather of FRAME_BYTES, into which most values
fit. The ranks compare what they are in before they exchange the rest.

Over gloo this holds for each all-gather of a tensor or of objects. All-to-alls follow from the counts of a step, so
they need no frame, unless several threads use the group: from then on they have one too. Over NCCL exchanges of objects
have frames, and the counts of a step are padded to the same size (routers/count_exchange.py), so that the two meet.

Legend: S ranks of the EP group, F fields of a table.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple, Self, final

import torch
from torch import Tensor

from sonic_ep.groups.lost_ranks import Collective, ranks_in_words

# All ranks send this much first: as many int64 as the header and counts of 1024 experts have (kernels/route/status/).
FRAME_INTS = 4 + 1024
FRAME_BYTES = FRAME_INTS * torch.int64.itemsize
# The second int64 of a frame. Of a step's counts over NCCL it is the status word, which is positive.
IN_ANOTHER_CALL = -1
OBJECT, REPORT = -1, -2  # as sizes, which may then differ: of objects, and of the reports of `EPGroup.raise_together`
# Number of bytes, IN_ANOTHER_CALL, exchange, number, layer, is_threaded. Equal on all ranks: size, backward, stage.
_HEAD = struct.Struct("=qqqqqqq?95s")
_KEY = slice(48, _HEAD.size)
_MAX_INLINE = FRAME_BYTES - _HEAD.size
SAME_CALLS = (
    "call layers, their backwards, constructions and checkpoints in the same order on every rank, and calls of "
    "one group from one thread"
)


class Frame(NamedTuple):
    """The call that a rank is in.

    size: bytes that are exchanged, equal on all ranks, or OBJECT or REPORT. num_bytes: of this rank. exchange: of
    `Order`. is_threaded: whether another thread began the last frame of this rank.
    """

    collective: Collective
    size: int
    num_bytes: int
    exchange: int
    is_threaded: bool

    def packed(self, data: Tensor) -> Tensor:
        """Returns (FRAME_BYTES,) uint8, with as much of `data` as fits."""
        number, stage, layer, in_backward = self.collective
        name = stage.encode()[:95]
        numbers = self.num_bytes, IN_ANOTHER_CALL, self.exchange, number, layer, self.is_threaded
        frame = torch.zeros(FRAME_BYTES, dtype=torch.uint8, device="cpu")
        head = bytearray(_HEAD.pack(*numbers, self.size, in_backward, name))
        frame[: _HEAD.size] = torch.frombuffer(head, dtype=torch.uint8)
        inline = data[:_MAX_INLINE]
        frame[_HEAD.size : _HEAD.size + inline.shape[0]] = inline
        return frame

    @classmethod
    def unpacked(cls, frame: Tensor) -> Self | None:
        """Returns the frame of a rank; None for the counts of a step over NCCL."""
        head = bytes(frame[: _HEAD.size].tolist())
        num_bytes, mark, exchange, number, layer, is_threaded, size, in_backward, name = _HEAD.unpack(head)
        if mark != IN_ANOTHER_CALL:
            return None
        collective = Collective(number, name.rstrip(b"\0").decode(errors="replace"), layer, in_backward)
        return cls(collective, size, num_bytes, exchange, bool(is_threaded))


@final
class FramesDifferError(Exception):
    """The ranks are in different exchanges. The message is for users.

    exchange: the number of exchanges of counts with which all ranks go on.
    """

    def __init__(self, message: str, exchange: int) -> None:
        super().__init__(message)
        self.exchange = exchange


class Found(NamedTuple):
    """The contents of all ranks' frames. parts: of each rank, if all of it fitted. is_threaded: of any rank."""

    lengths: list[int]
    parts: list[Tensor] | None
    is_threaded: bool


def inline_parts(gathered: Tensor, own: Frame) -> Found:
    """Reads (S, FRAME_BYTES) uint8 on the CPU, what was gathered. Raises FramesDifferError."""
    keys, heads_SF = gathered[:, _KEY], gathered[:, : _KEY.start].clone().view(torch.int64)
    lengths, marks, _, _, _, threaded = heads_SF.T.tolist()
    if any(mark != IN_ANOTHER_CALL for mark in marks) or not bool((keys == keys[:1]).all()):
        raise _difference([Frame.unpacked(frame) for frame in gathered], own.exchange)
    parts = None
    if max(lengths) <= _MAX_INLINE:
        parts = [frame[_HEAD.size :][:length] for frame, length in zip(gathered, lengths, strict=True)]
    return Found(lengths, parts, any(threaded))


def _difference(frames: Sequence[Frame | None], exchange: int) -> FramesDifferError:
    places = ["the counts of a layer" if frame is None else str(frame.collective) for frame in frames]
    if len(set(places)) == 1:  # the same, of other sizes
        places = [f"{place} ({_shown(frame.size)})" for place, frame in zip(places, frames, strict=True) if frame]
    by_place: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        by_place.setdefault(place, []).append(rank)
    shown = "; ".join(f"{ranks_in_words(ranks)} in {place}" for place, ranks in by_place.items())
    known = [frame.exchange for frame in frames if frame is not None]
    # Ranks in counts have counted this exchange already.
    last = max(known) if len(known) == len(frames) else exchange + 1
    return FramesDifferError(f"the ranks of the EP group are in different calls: {shown}; {SAME_CALLS}", last)


def problem_with_calls(statuses: Sequence[int]) -> str | None:
    """Returns which ranks have sent a frame where the others sent counts, or None. statuses: by rank."""
    away = [rank for rank, status in enumerate(statuses) if status == IN_ANOTHER_CALL]
    if not away:
        return None
    here = ranks_in_words(set(range(len(statuses))) - set(away))
    return (
        f"the ranks of the EP group are in different calls: {here} in the counts of a layer; {ranks_in_words(away)} in "
        f"none, but in a construction, a checkpoint or a check; {SAME_CALLS}"
    )


def _shown(size: int) -> str:
    return {OBJECT: "values", REPORT: "a check"}.get(size, f"{size} bytes")


def problem_with_splits(splits: Sequence[Sequence[int]], place: str) -> str | None:
    """Returns why an all-to-all cannot be, or None. The same on every rank.

    splits: of each rank, the rows that it sends to each, the rows that it expects of each, and the bytes of a row.
    """
    S = len(splits)
    for source in range(S):
        for destination in range(S):
            sent, expected = splits[source][destination], splits[destination][S + source]
            if sent != expected:
                return (
                    f"the ranks of the EP group are in different calls of {place}: rank {source} sends {sent} rows to "
                    f"rank {destination}, which expects {expected}; {SAME_CALLS}"
                )
    widths = [each[-1] for each in splits]
    if len(set(widths)) > 1:
        return (
            f"the ranks of the EP group send rows of different sizes in {place}: {widths} bytes by rank; {SAME_CALLS}"
        )
    return None
