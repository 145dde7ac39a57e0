"""The transport of ranks that write into each other's memory: NVLink, no collective of a library, one wait of the host.

Every stage is one kernel (kernels/peers.py): it meets the other ranks, writes where they read, and ends when theirs
have ended. The host waits once in a forward, for the sizes of the plan, which are those of the buffers too.

Buffers are shared by all that use the transport: index lists and returned values once, rows by the width of a row. A
source owns a region of `stride` rows in each of them, stride being the most tokens of any rank: rows are received with
gaps, `num_rows` is S * stride, and nobody needs to know how many rows the others send.

    bytes of a rank  =  3 * S * stride * row_bytes, for each row width, + 20 a pair, + flags

A dispatch alternates between two row buffers, so what it returns stays valid until the second dispatch after it. All
kernels must be launched on streams that wait for each other, as autograd does.

Legend: see protocol.py; S ranks of the group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from sonic_ep.dispatch.plan import PlanSizes
from sonic_ep.dispatch.protocol import Opened, Receipt, Splits
from sonic_ep.groups import EPGroup
from sonic_ep.host_copy import HostCopy, host_may_wait
from sonic_ep.kernels.operations import pair_lists, peer_kernels, sent_rows
from sonic_ep.kernels.pair_lists import RankPlan
from sonic_ep.kernels.peers import Meeting, flags_of
from sonic_ep.peer_memory import PeerMemory
from sonic_ep.routing import INDEX_DTYPE, Routing

_ALIGNMENT = 256  # bytes, of everything in a buffer
_ROOM = 5 / 4  # lists grow by it, since their lengths change from step to step
DEFAULT_PATIENCE = 600.0


@dataclass(frozen=True, slots=True)
class _Rows:
    """Three buffers of rows of one width: two that dispatches take turns at, and one for combine."""

    memory: PeerMemory
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Index lists and returned values. capacity: pairs. The widest values that weights may have."""

    memory: PeerMemory
    capacity: int

    @property
    def rows_at(self) -> int:
        return 0

    @property
    def gates_at(self) -> int:
        return _aligned(self.capacity * INDEX_DTYPE.itemsize)

    @property
    def values_at(self) -> int:
        return self.gates_at + _aligned(self.capacity * 8)

    @property
    def counts_at(self) -> int:
        return self.values_at + _aligned(self.capacity * 8)

    @staticmethod
    def num_bytes(capacity: int, size: int) -> int:
        return _aligned(capacity * INDEX_DTYPE.itemsize) + 2 * _aligned(capacity * 8) + _aligned(4 * size)


@final
class SymmetricTransport:
    """Writes into the other ranks' memory. `allocate` gives that memory; patience: seconds to wait for a rank.

    Every call raises RuntimeError, with rank and stage, once a rank has been waited for in vain.
    """

    def __init__(
        self, group: EPGroup, allocate: Callable[[int], PeerMemory], *, patience: float = DEFAULT_PATIENCE
    ) -> None:
        self.group = group
        self._allocate = allocate
        self._patience = patience
        self._flags: PeerMemory | None = None
        self._meeting: Meeting | None = None
        self._pairs: _Pairs | None = None
        self._rows: dict[int, _Rows] = {}
        self._turn = 0
        self._programs = 2

    def open(self, routing: Routing, plan: RankPlan) -> Opened:
        if not host_may_wait(plan.sizes):
            raise RuntimeError("sizes of buffers are read on the host, which a CUDA graph cannot capture")
        meeting, S, T = self._meet(), self.group.size, routing.num_tokens
        kernels = peer_kernels()
        arriving = HostCopy(torch.cat([plan.sizes, routing.counts.tokens_S.to(INDEX_DTYPE)]))
        sent = sent_rows(routing.token_ids_N, plan.pair_starts_Q, T)
        values = arriving.read()
        stride = max(1, int(values[-S:].max()))
        sizes = PlanSizes.read(HostCopy(values[:-S]), self.group.rank)
        pairs = self._room_for_pairs(max(map(sum, (*sizes.pairs_SQ, *zip(*sizes.pairs_SQ, strict=True)))))
        pairs_SQ = plan.sizes[1:].clone()  # its start is aligned
        kernels.push_lists(
            meeting,
            sent.row_of_pair_N,
            routing.gates_N.contiguous(),
            sent.sent_before,
            T,
            pairs_SQ,
            pairs.memory.at(pairs.rows_at),
            pairs.memory.at(pairs.gates_at),
            pairs.memory.at(pairs.counts_at),
        )
        V = sum(sizes.pairs_in)
        row_in_source_V = pairs.memory.view(pairs.rows_at, (V,), INDEX_DTYPE)
        gates_V = pairs.memory.view(pairs.gates_at, (V,), routing.gates_N.dtype)
        row_starts_S = torch.arange(0, (S + 1) * stride, stride, dtype=INDEX_DTYPE, device=gates_V.device)
        buffer = pair_lists(plan.chunks(sizes.num_rows, V), row_in_source_V, gates_V, row_starts_S, S * stride)
        receipt = Receipt(
            row_of_pair_P=buffer.row_of_pair_P,
            pairs_by_row_V=buffer.pairs_by_row_V,
            pair_starts_R=buffer.pair_starts_R,
            slot_V=buffer.slot_V,
            expert_starts_e=plan.expert_starts_e,
            own_lists=(sent.sent_before, pairs.memory.view(pairs.counts_at, (S,), INDEX_DTYPE).clone(), pairs_SQ),
            splits=Splits((stride,) * S, (stride,) * S, sizes.pairs_out, sizes.pairs_in),
            num_tokens=T,
            num_rows=S * stride,
            num_listed=routing.token_ids_N.shape[0],
        )
        return Opened(receipt, buffer.gates_P)

    def dispatch(self, x_TH: Tensor, receipt: Receipt) -> Tensor:
        sent_before, _, _ = receipt.own_lists
        rows = self._room_for_rows(x_TH, receipt)
        self._turn = 1 - self._turn
        offset = self._turn * rows.buffer_bytes
        stride = receipt.num_rows // self.group.size
        buffers_S = rows.memory.at(offset)
        peer_kernels().push_rows(self._meet(), x_TH.contiguous(), sent_before, buffers_S, stride, self._programs)
        return rows.memory.view(offset, (receipt.num_rows, x_TH.shape[1]), x_TH.dtype)

    def keep(self, rows_RH: Tensor) -> Tensor:
        return rows_RH.clone()

    def combine(self, rows_RH: Tensor, receipt: Receipt) -> Tensor:
        every_row = torch.arange(rows_RH.shape[0] + 1, dtype=INDEX_DTYPE, device=rows_RH.device)
        return self._combine(rows_RH, every_row, every_row, None, receipt)

    def combine_pairs(self, values_PH: Tensor, weights_P: Tensor | None, receipt: Receipt) -> Tensor:
        return self._combine(values_PH, receipt.pairs_by_row_V, receipt.pair_starts_R, weights_P, receipt)

    def _combine(
        self, values_PH: Tensor, items: Tensor, starts: Tensor, weights_P: Tensor | None, receipt: Receipt
    ) -> Tensor:
        sent_before, rows_in_S, _ = receipt.own_lists
        rows = self._room_for_rows(values_PH, receipt)
        offset = 2 * rows.buffer_bytes
        stride = receipt.num_rows // self.group.size
        meeting, kernels = self._meet(), peer_kernels()
        buffers_S, programs = rows.memory.at(offset), self._programs
        kernels.push_sums(meeting, values_PH, items, starts, weights_P, rows_in_S, buffers_S, stride, programs)
        back = rows.memory.view(offset, (receipt.num_rows, values_PH.shape[1]), values_PH.dtype)
        return kernels.sum_sent(meeting, back, sent_before, receipt.num_tokens, stride)

    def return_pairs(self, values_P: Tensor, receipt: Receipt) -> Tensor:
        _, _, pairs_SQ = receipt.own_lists
        meeting, pairs, N = self._meet(), self._pairs, receipt.num_listed
        assert pairs is not None
        buffers_S = pairs.memory.at(pairs.values_at)
        peer_kernels().push_values(meeting, values_P.contiguous(), receipt.slot_V, pairs_SQ, buffers_S)
        num_pairs = sum(receipt.splits.pairs_out)
        values_N = values_P.new_zeros(N)
        values_N[:num_pairs] = pairs.memory.view(pairs.values_at, (num_pairs,), values_P.dtype)
        return values_N

    def _meet(self) -> Meeting:
        """The meeting of this group, made at its first use. Raises RuntimeError if a rank is missing."""
        if self._meeting is None:
            self._flags = self._allocate(_aligned(8 * flags_of(self.group.size)))
            self._meeting = Meeting.of(self.group.rank, self._flags.addresses_S, round(self._patience * 1e9))
            device = self._flags.own.device
            if device.type == "cuda":
                self._programs = torch.cuda.get_device_properties(device).multi_processor_count
        missing = self._meeting.missing()
        if missing is not None:
            stage, rank = missing
            raise RuntimeError(
                f"rank {rank} of the EP group did not come to {stage.name.lower()} within {self._patience:g} s: it "
                "died, it is stuck, or it is slower than that; look at its log, or raise the timeout"
            )
        return self._meeting

    def _room_for_pairs(self, needed: int) -> _Pairs:
        """Every rank asks for as much at the same time."""
        if self._pairs is None or self._pairs.capacity < needed:
            capacity = max(1, round(needed * _ROOM))
            self._let_go(self._pairs is not None)
            self._pairs = None
            self._pairs = _Pairs(self._allocate(_Pairs.num_bytes(capacity, self.group.size)), capacity)
        return self._pairs

    def _room_for_rows(self, like: Tensor, receipt: Receipt) -> _Rows:
        """Likewise."""
        row_bytes = like.shape[1] * like.element_size()
        rows, needed = self._rows.get(row_bytes), _aligned(receipt.num_rows * row_bytes)
        if rows is None or rows.buffer_bytes < needed:
            self._let_go(rows is not None)
            self._rows.pop(row_bytes, None)
            del rows
            rows = self._rows[row_bytes] = _Rows(self._allocate(3 * needed), needed)
        return rows

    def _let_go(self, in_use: bool) -> None:
        """Before memory is given back: nobody may be writing to it."""
        if in_use:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.group.all_gather_object(None)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
