"""The transport over any torch.distributed backend: dropless all-to-all of distinct rows.

Forward takes three all-to-alls: index lists with weights (sizes known from the plan), rows out, rows back. Backward
takes rows out (dO), by setting x once more, rows back (dX) and dS back. A receiver reads from the index lists how many
rows each source will send: rows are numbered densely, so the largest index tells. That and the sender's own row counts
are read on the host once a forward; it is this transport's only host sync.

Legend: see protocol.py; S source ranks, Q owner ranks.
"""

from collections import Counter
from typing import final

import torch
from torch import Tensor

from sonic_ep.dispatch.plan import Plan
from sonic_ep.dispatch.protocol import Opened, Receipt, Splits, owner_lists
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.operations import gather_sum
from sonic_ep.routing import INDEX_DTYPE, Routing


@final
class AllToAllTransport:
    """Variable-size all-to-all over `group`.

    wire_bytes counts what this rank has sent to other ranks, by kind: "lists", "dispatch", "combine", "return_pairs".
    """

    def __init__(self, group: EPGroup) -> None:
        self.group = group
        self.wire_bytes: Counter[str] = Counter()

    def open(self, routing: Routing, plan: Plan) -> Opened:
        rank, size = self.group.rank, self.group.size
        token_ids_N = routing.token_ids_N.long()
        pairs_out, pairs_in = plan.pairs_SQ[rank], plan.pairs_SQ[:, rank]
        device = token_ids_N.device
        owner_N = _owners(pairs_out, token_ids_N.shape[0], device)
        needed_QT = torch.zeros(size, routing.num_tokens, dtype=torch.bool, device=device)
        needed_QT[owner_N, token_ids_N] = True
        row_of_pair_N = (needed_QT.cumsum(1) - 1)[owner_N, token_ids_N].to(INDEX_DTYPE)
        message = _pack(row_of_pair_N, routing.gates_N)
        splits = (tuple(pairs_out.tolist()), tuple(pairs_in.tolist()))
        received = self._exchange("lists", message, *splits)
        row_in_source_V, gates_V = _unpack(received, routing.gates_N.dtype)
        source_V = _owners(pairs_in, row_in_source_V.shape[0], device)
        rows_in = torch.zeros(size, dtype=INDEX_DTYPE, device=device)
        rows_in.scatter_reduce_(0, source_V, row_in_source_V + 1, reduce="amax")
        rows = torch.stack([needed_QT.sum(1), rows_in.long()]).cpu()
        base_S = (rows[1].cumsum(0) - rows[1]).to(device)
        num_rows = int(rows[1].sum())
        gates_P, lists = owner_lists(plan, rank, row_in_source_V + base_S[source_V], gates_V, num_rows)
        receipt = Receipt(
            **lists,
            **_token_lists(needed_QT, int(rows[0].sum())),
            splits=Splits(tuple(rows[0].tolist()), tuple(rows[1].tolist()), *splits),
            num_tokens=routing.num_tokens,
            num_rows=num_rows,
        )
        return Opened(receipt, gates_P)

    def dispatch(self, x_TH: Tensor, receipt: Receipt) -> Tensor:
        assert receipt.token_of_sent_U is not None
        packed_UH = x_TH.index_select(0, receipt.token_of_sent_U)
        return self._exchange("dispatch", packed_UH, receipt.splits.rows_out, receipt.splits.rows_in)

    def combine(self, rows_RH: Tensor, receipt: Receipt) -> Tensor:
        assert receipt.sent_starts_T is not None
        assert receipt.sent_by_token_U is not None
        back_UH = self._exchange("combine", rows_RH, receipt.splits.rows_in, receipt.splits.rows_out)
        return gather_sum(back_UH, receipt.sent_by_token_U, receipt.sent_starts_T)

    def return_pairs(self, values_P: Tensor, receipt: Receipt) -> Tensor:
        values_V = values_P[receipt.slot_V]
        return self._exchange("return_pairs", values_V, receipt.splits.pairs_in, receipt.splits.pairs_out)

    def _exchange(self, kind: str, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
        row_bytes = rows[:1].numel() * rows.element_size() if rows.shape[0] else 0
        self.wire_bytes[kind] += (sum(send) - send[self.group.rank]) * row_bytes
        return self.group.all_to_all(rows, send, receive)


def _owners(counts_S: Tensor, total: int, device: torch.device) -> Tensor:
    """(total,) rank of each element of a list that holds counts_S[s] consecutive elements of rank s."""
    return torch.repeat_interleave(counts_S.to(device), output_size=total)


def _pack(row_ids_N: Tensor, gates_N: Tensor) -> Tensor:
    """(N, bytes): row index and weight of each pair, so that both travel in one exchange."""
    parts = (row_ids_N, gates_N)
    return torch.cat([part[:, None].contiguous().view(torch.uint8) for part in parts], dim=1)


def _unpack(message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    def column(first: int, last: int, kind: torch.dtype) -> Tensor:
        # clone: a view of another item size needs an aligned start.
        return message[:, first:last].clone(memory_format=torch.contiguous_format).view(kind).flatten()

    index_bytes = INDEX_DTYPE.itemsize
    return column(0, index_bytes, INDEX_DTYPE), column(index_bytes, index_bytes + dtype.itemsize, dtype)


def _token_lists(needed_QT: Tensor, num_sent: int) -> dict[str, Tensor]:
    """The token's side of a receipt: sent rows by owner, and grouped by token."""
    token_of_sent_U = torch.nonzero_static(needed_QT, size=num_sent)[:, 1]
    sent_per_token = needed_QT.sum(0)
    return {
        "token_of_sent_U": token_of_sent_U.to(INDEX_DTYPE),
        "sent_by_token_U": token_of_sent_U.argsort(stable=True).to(INDEX_DTYPE),
        "sent_starts_T": torch.nn.functional.pad(sent_per_token.cumsum(0), (1, 0)).to(INDEX_DTYPE),
    }
