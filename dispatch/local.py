"""One rank: the received rows are x itself. No collective, no copy of a row.

Legend: see protocol.py.
"""

from typing import final

from torch import Tensor

from sonic_ep.dispatch.plan import Plan
from sonic_ep.dispatch.protocol import Opened, Receipt, Splits
from sonic_ep.kernels.operations import pair_lists
from sonic_ep.routing import Routing


@final
class LocalTransport:
    """The transport of ep_size = 1."""

    def open(self, routing: Routing, plan: Plan) -> Opened:
        chunks = plan.chunks(0, routing.token_ids_N.device)
        buffer = pair_lists(chunks, routing.token_ids_N, routing.gates_N, None, routing.num_tokens)
        pairs = (routing.token_ids_N.shape[0],)
        rows = (routing.num_tokens,)
        receipt = Receipt(
            row_of_pair_P=buffer.row_of_pair_P,
            pairs_by_row_V=buffer.pairs_by_row_V,
            pair_starts_R=buffer.pair_starts_R,
            slot_V=buffer.slot_V,
            expert_starts_e=chunks.expert_starts_e,
            token_of_sent_U=None,
            sent_by_token_U=None,
            sent_starts_T=None,
            splits=Splits(rows, rows, pairs, pairs),
            num_tokens=routing.num_tokens,
            num_rows=routing.num_tokens,
        )
        return Opened(receipt, buffer.gates_P)

    def dispatch(self, x_TH: Tensor, receipt: Receipt) -> Tensor:
        return x_TH

    def combine(self, rows_RH: Tensor, receipt: Receipt) -> Tensor:
        return rows_RH

    def return_pairs(self, values_P: Tensor, receipt: Receipt) -> Tensor:
        return values_P.index_select(0, receipt.slot_V)
