"""What dispatch must bring about, by loops over tokens, and the worker that makes real ranks do it.

Every rank's data follows from (case, rank), so each expectation is computed in one process, without communication.
"""

import random
from collections import Counter
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.protocol import DispatchHandle, Splits, Transport
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.dispatch.plan.reference import Plan
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.routing import GroupCounts, Routing

Pair = tuple[int, int]  # (expert, token): sorts in send order
BufferRow = tuple[int, int, int]  # (source, expert, index in their chunk)


def pair_buffer(rows_SE: list[list[int]], dst: int, tile: int) -> list[BufferRow]:
    """The rows of an owner's pair buffer: expert by expert, every source's full tiles, then every source's tail."""
    e = len(rows_SE[0]) // len(rows_SE)
    buffer: list[BufferRow] = []
    for expert in range(dst * e, dst * e + e):
        full_tiles = [rows[expert] - rows[expert] % tile for rows in rows_SE]
        buffer += [(s, expert, i) for s, full in enumerate(full_tiles) for i in range(full)]
        buffer += [(s, expert, i) for s, full in enumerate(full_tiles) for i in range(full, rows_SE[s][expert])]
    return buffer


@dataclass(frozen=True)
class Case:
    """tokens: T of each rank. picks: how tokens choose experts. multiple: chunks are padded to multiples of it."""

    tokens: tuple[int, ...]
    H: int
    E: int
    picks: str = "any"
    multiple: int = 1
    tile: int = 4
    seed: int = 0

    @property
    def size(self) -> int:
        return len(self.tokens)

    def __str__(self) -> str:
        T = ".".join(map(str, self.tokens))
        return f"R{self.size}-T{T}-H{self.H}-E{self.E}-{self.picks}-t{self.multiple}-tile{self.tile}"

    def pairs(self, rank: int) -> list[Pair]:
        """The pairs of a rank in send order."""
        rng = random.Random(f"{self.seed} {rank}")
        return sorted((expert, token) for token in range(self.tokens[rank]) for expert in self._experts(rng))

    def _experts(self, rng: random.Random) -> list[int]:
        match self.picks:
            case "any":
                return rng.sample(range(self.E), rng.choice([0, 1, min(2, self.E), rng.randint(0, self.E), self.E]))
            case "top2":
                return rng.sample(range(self.E), 2)
            case "all":
                return list(range(self.E))
            case "last":
                return [self.E - 1]
            case "none":
                return []
        raise ValueError(self.picks)

    def pairs_SE(self) -> list[list[int]]:
        counts = [Counter(expert for expert, _ in self.pairs(rank)) for rank in range(self.size)]
        return [[count[expert] for expert in range(self.E)] for count in counts]

    def rows_SE(self) -> list[list[int]]:
        return [[-(-n // self.multiple) * self.multiple for n in counts] for counts in self.pairs_SE()]

    def dst(self, expert: int) -> int:
        return expert * self.size // self.E

    def tokens_needed(self, source: int, dst: int) -> list[int]:
        """The distinct tokens of `source` that travel to `dst`, ascending; all of them if there is one rank."""
        if self.size == 1:
            return list(range(self.tokens[0]))
        return sorted({token for expert, token in self.pairs(source) if self.dst(expert) == dst})

    def received(self, dst: int) -> list[Pair]:
        """(source, token) of each row that `dst` receives."""
        return [(s, token) for s in range(self.size) for token in self.tokens_needed(s, dst)]

    def pair_weights(self, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Never zero, so that padding shows."""
        pair_weights = (
            torch.rand(len(self.pairs(rank)), generator=self._generator(rank, 1), dtype=torch.float64) + 0.125
        )
        return pair_weights.to(dtype)

    def integers(self, rank: int, rows: int, dtype: torch.dtype, stream: int) -> Tensor:
        """Small enough that sums over ranks are exact in every dtype."""
        values = torch.randint(-8, 9, (rows, self.H), generator=self._generator(rank, stream))
        return values.to(dtype) if dtype.is_signed else values.abs().to(dtype)

    def bits(self, rank: int, dtype: torch.dtype) -> Tensor:
        """Rows of random bits: NaN, infinities and denormals among them."""
        size = (self.tokens[rank], self.H * dtype.itemsize)
        return torch.randint(256, size, generator=self._generator(rank, 2), dtype=torch.uint8).view(dtype)

    def _generator(self, rank: int, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1000 + rank * 10 + stream)

    def routing(self, rank: int, pair_weights: torch.dtype = torch.float32) -> Routing:
        pairs_SE = torch.tensor(self.pairs_SE())
        tokens_S = torch.tensor(self.tokens)
        counts = GroupCounts(
            pairs_SE,
            torch.tensor(self.rows_SE()),
            pairs_SE,
            tokens_S,
            torch.zeros_like(tokens_S),
            torch.tensor(self.multiple),
        )
        token_ids = torch.tensor([token for _, token in self.pairs(rank)], dtype=torch.int32)
        max_rows = sum(self.rows_SE()[rank]) if self.multiple > 1 else None
        return Routing(self.pair_weights(rank, pair_weights), token_ids, counts, self.tokens[rank], max_rows)

    def plan(self) -> Plan:
        return Plan.from_counts(torch.tensor(self.rows_SE()), torch.tensor(self.pairs_SE()), self.tile)


def on_device(device: str, routing: Routing, plan: RankPlan) -> tuple[Routing, RankPlan]:
    counts = GroupCounts(*(values.to(device) for values in routing.counts))
    weights_N, token_ids_N = routing.weights_N.to(device), routing.token_ids_N.to(device)
    moved = replace(routing, weights_N=weights_N, token_ids_N=token_ids_N, counts=counts)
    return moved, RankPlan(*(values.to(device) for values in plan))


@dataclass(frozen=True)
class Outcome:
    """All that one rank saw of one exchange."""

    rows: Tensor  # dispatch(random bits)
    lists: dict[str, Tensor]  # of the receipt
    transport_lists: tuple[Tensor, ...]
    splits: Splits
    num_tokens: int
    num_rows: int
    weights_P: Tensor
    roundtrip: Tensor  # combine(dispatch(integers))
    received_dot: float  # <dispatch(x), g> over the rows of this rank, for integers x and g
    sent_dot: float  # <x, combine(g)> over its tokens
    returned: Tensor  # combine_scalars(weights_P)
    wire_bytes: dict[str, int]  # of one open, two dispatches, two combines and one combine_scalars


def group_of(case: Case) -> EPGroup:
    """All ranks of this process's group, or a rank alone."""
    return EPGroup.alone() if case.size == 1 else EPGroup()


def transport_of(group: EPGroup) -> LocalTransport | AllToAllTransport:
    return LocalTransport() if group.size == 1 else AllToAllTransport(group)


def exchange(rank: int, case: Case, dtype: torch.dtype, pair_weights: torch.dtype) -> Outcome:
    """Worker: everything the contract offers, once."""
    transport = transport_of(group_of(case))
    return use(transport, rank, case, dtype, pair_weights)


def use(transport: Transport, rank: int, case: Case, dtype: torch.dtype, pair_weights: torch.dtype) -> Outcome:
    prepared = transport.prepare(case.routing(rank, pair_weights), case.plan().of_rank(rank))
    handle = prepared.handle
    rows = transport.dispatch(case.bits(rank, dtype), handle).result()
    x_TH = case.integers(rank, case.tokens[rank], dtype, stream=3)
    x_RH = transport.dispatch(x_TH, handle).result()
    g_RH = case.integers(rank, handle.num_rows, dtype, stream=4)
    g_TH = combine_rows(transport, g_RH, handle)
    return Outcome(
        rows=rows,
        lists=handle_lists(handle),
        transport_lists=handle.transport_lists,
        splits=handle.splits,
        num_tokens=handle.num_tokens,
        num_rows=handle.num_rows,
        weights_P=prepared.weights_P,
        roundtrip=combine_rows(transport, x_RH, handle),
        received_dot=dot(x_RH, g_RH),
        sent_dot=dot(x_TH, g_TH),
        returned=transport.combine_scalars(prepared.weights_P[:, None], handle).result(),
        wire_bytes=dict(getattr(transport, "wire_bytes", {})),
    )


def combine_rows(transport: Transport, rows_RH: Tensor, handle: DispatchHandle) -> Tensor:
    """Each token's sum of what comes back for it, if every received row has one pair, itself."""
    every_row = torch.arange(rows_RH.shape[0] + 1, dtype=torch.int32, device=rows_RH.device)
    handle = replace(handle, pairs_by_row_V=every_row[:-1], pair_starts_R=every_row)
    return transport.combine(rows_RH, None, handle).result()


def handle_lists(handle: DispatchHandle) -> dict[str, Tensor]:
    values = {f.name: getattr(handle, f.name) for f in fields(DispatchHandle)}
    return {name: v for name, v in values.items() if isinstance(v, Tensor)}


def dot(left: Tensor, right: Tensor) -> float:
    return float((left.double() * right.double()).sum())


@dataclass(frozen=True)
class RecvLists:
    """What an owner must know of its pairs, by loops."""

    row_of_pair: list[int]
    pair_weights: list[float]
    pairs_by_row: list[int]
    pair_starts: list[int]
    slots: list[int]
    expert_starts: list[int]


def recv_lists(case: Case, dst: int, pair_weights: torch.dtype) -> RecvLists:
    """The owner's side of a receipt and weights_P."""
    row_number = {key: row for row, key in enumerate(case.received(dst))}
    pairs_of_row: list[list[int]] = [[] for _ in row_number]
    slot_of_pair: dict[BufferRow, int] = {}
    row_of_pair, weights_P, experts = [], [], []
    chunks = {
        (s, k): [t for expert, t in case.pairs(s) if expert == k] for s in range(case.size) for k in range(case.E)
    }
    gate_of = [
        dict(zip(case.pairs(s), case.pair_weights(s, pair_weights).tolist(), strict=True)) for s in range(case.size)
    ]
    for slot, (s, expert, i) in enumerate(pair_buffer(case.rows_SE(), dst, case.tile)):
        chunk = chunks[s, expert]
        token = chunk[min(i, len(chunk) - 1)]  # padding repeats the last pair of its chunk
        row_of_pair.append(row_number[s, token])
        experts.append(expert)
        weights_P.append(gate_of[s][expert, token] if i < len(chunk) else 0.0)
        if i < len(chunk):
            pairs_of_row[row_number[s, token]].append(slot)
            slot_of_pair[s, expert, i] = slot
    own = [k for k in range(case.E) if case.dst(k) == dst]
    return RecvLists(
        row_of_pair,
        weights_P,
        [slot for slots in pairs_of_row for slot in slots],
        [sum(map(len, pairs_of_row[:row])) for row in range(len(pairs_of_row) + 1)],
        [slot_of_pair[key] for key in sorted(slot_of_pair)],
        [sum(expert < k for expert in experts) for k in [*own, own[-1] + 1]],
    )
