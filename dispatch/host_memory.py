"""Rows between the ranks of a host through each other's memory: hop 2 of the two-hop transport on GPUs.

An exchange, in which all ranks of the host take part:

    acquire_peers   the buffer of each rank may be written
    copies          copy engines write this rank's rows to its region of every peer's buffer
    release_peers   the rows of all peers are here
    a copy          puts the regions' rows behind each other, which frees the buffer for the next exchange

kernels/dispatch/symmetric/ has the signals. Dispatches and combines have a buffer and a stage each, because a combine
may start while a dispatch runs on another stream. Their sizes are on the host: hop 1 needs them there.

    bytes of a rank  =  2 * D * (the most rows that a rank of any host sends to another one, by a bound) * row_bytes

Legend: D ranks of a host, S ranks of the EP group.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from sonic_ep.dispatch.symmetric_buffers import Allocate, aligned, wait_until_unused
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import symmetric_kernels
from sonic_ep.kernels.dispatch.symmetric.signal_pad import SignalPad, Stage, num_signals
from sonic_ep.symmetric_memory import PeerMemory

ROW_GROWTH = 5 / 4  # allocated / needed rows
# Of transport.timeout. The host waits for counts in the next step at the latest, notices a lost rank there first, and
# asks all ranks which one it is. A kernel that notices first can only name the peer that it waits for.
_TIMEOUTS = 2


@final
class HostMemory:
    """group: the EP group. ranks: those of this host. allocate: see SymmetricTransport. timeout: seconds."""

    def __init__(self, group: EPGroup, ranks: range, allocate: Allocate, timeout: float) -> None:
        self._group, self._ranks, self._allocate = group, ranks, allocate
        self._number = ranks.index(group.rank)
        self._limit = _TIMEOUTS * timeout
        self._rows = 1  # of a region
        self._buffers: dict[Stage, PeerMemory] = {}
        self._signals: PeerMemory | None = None
        self._pad: SignalPad | None = None

    def reserve(self, rows: int) -> None:
        """Makes regions hold `rows` rows from the next exchange on. Equal on all ranks of the EP group."""
        if rows > self._rows:
            self._rows = round(rows * ROW_GROWTH)

    def raise_if_lost(self) -> None:
        lost = None if self._pad is None else self._pad.lost_peer()
        if lost is not None:
            stage, number = lost
            raise RuntimeError(
                f"rank {self._ranks[number]} of the EP group did not come to {stage.name.lower()} within a host in "
                f"{self._limit:g} s: it died, it is stuck, or it waits for another host; look at its log, or raise "
                "transport.timeout"
            )

    def exchange(
        self, stage: Stage, rows: Tensor, send: Sequence[int], receive: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        """Returns the received rows, `receive[d]` from each rank d of the host, in order of d.

        rows: (sum(send), ...), `send[d]` for each rank d. out: in place of a new tensor. A collective of the EP group
        where buffers grow.
        """
        self.raise_if_lost()
        region = self._rows * rows.shape[1:].numel() * rows.element_size()
        pad, buffer, own = self._signal_pad(), self._buffer(stage, region), self._number
        kernels, D = symmetric_kernels(), len(self._ranks)
        blocks = rows.contiguous().split([*send])
        kernels.acquire_peers(pad, stage)
        for peer in ((own + offset) % D for offset in range(1, D)):  # not all ranks send to the same one at once
            if send[peer]:
                buffer.view_of(peer, own * region, blocks[peer].shape, rows.dtype).copy_(blocks[peer])
        kernels.release_peers(pad, stage)
        received = [
            blocks[own]
            if source == own
            else buffer.view_of(own, source * region, (receive[source], *rows.shape[1:]), rows.dtype)
            for source in range(D)
        ]
        return torch.cat(received, out=out)

    def _buffer(self, stage: Stage, region: int) -> PeerMemory:
        needed = aligned(len(self._ranks) * region)
        if stage in self._buffers and self._buffers[stage].own.shape[0] < needed:
            wait_until_unused(self._group)
            del self._buffers[stage]  # before the larger one is allocated
        if stage not in self._buffers:
            self._buffers[stage] = self._allocate(needed)
        return self._buffers[stage]

    def _signal_pad(self) -> SignalPad:
        if self._pad is None:
            num_bytes = aligned(num_signals(len(self._ranks)) * torch.int64.itemsize)
            self._signals = self._allocate(num_bytes)
            self._pad = SignalPad.of(self._number, self._signals.addresses_S, round(self._limit * 1e9))
        return self._pad
