"""One rank: the received rows are x itself. No collective, no copy of a row that starts where kernels can read it.

Legend: see protocol.py.
"""

from collections.abc import Callable
from functools import partial
from typing import final

from torch import Tensor

from sonic_ep.checks import starts_aligned
from sonic_ep.dispatch.plan import sizes_on_host
from sonic_ep.dispatch.protocol import Combining, Opened, Receipt, Splits
from sonic_ep.dispatch.room import RowsForecast
from sonic_ep.groups import EPGroup
from sonic_ep.host_copy import host_may_wait
from sonic_ep.kernels.operations import gather_sum, lists_take_room, pair_lists, values_of_pairs
from sonic_ep.kernels.pair_lists import RankPlan
from sonic_ep.routing import Routing, SizesOnHost


@final
class LocalTransport:
    """The transport of ep_size = 1.

    The host waits for the plan only where rounding leaves sizes open, and not before the lists are made, or what the
    experts compute on them where the next step is like the last one. If `static`, and while a CUDA graph is captured,
    it does not wait: rows and lists keep the most room that they can need.
    """

    name, sends_unchecked = "", False
    STATIC = "static"

    def __init__(self, *, static: bool = False) -> None:
        self._static = static
        self._forecast = RowsForecast()
        self.text = self.STATIC if static else ""  # as an operation of a compiled graph takes it

    def problem_with(self, num_tokens: int) -> str | None:
        return None

    def all_gather(self, values: Tensor, meanwhile: Callable[[], None] | None = None) -> Tensor:
        return EPGroup.alone().all_gather(values, meanwhile)

    def raise_if_lost(self) -> None:
        pass

    def open(self, routing: Routing, plan: RankPlan, x_TH: Tensor | None = None, whose: int | None = None) -> Opened:
        token_ids_N, T = routing.token_ids_N, routing.num_tokens
        P = V = N = token_ids_N.shape[0]
        arriving, rows = None, None
        if routing.most_rows is not None:
            P = routing.most_rows
            takes_room = lists_take_room(token_ids_N.device)
            waits = not (takes_room and self._static) and host_may_wait(token_ids_N)
            arriving = sizes_on_host(routing) if waits else None
            if arriving is not None and takes_room:
                rows = self._forecast.rows(whose, T)
            elif arriving is not None:
                P, V = _rows_and_pairs(arriving)
        spare = routing.most_rows is not None and (arriving is None or rows is not None)
        buffer = pair_lists(plan.chunks(P, V, zeroed=spare), token_ids_N, routing.gates_N, None, T)

        def opened(P: int, V: int) -> Opened:
            receipt = Receipt.of(
                buffer,
                plan.expert_starts_e,
                (),
                Splits((T,), (T,), (V,), (V,)),
                num_tokens=T,
                num_rows=T,
                num_listed=N,
            )
            return Opened(receipt, buffer.gates_P).with_lists_of(P, V)

        if arriving is None:
            routing.check()
            return opened(P, V)

        def settle() -> tuple[Opened, bool]:
            P, V = _rows_and_pairs(arriving)
            self._forecast.note(whose, P, T)
            return opened(P, V), True

        if rows is None or arriving.arrived:
            return settle()[0]
        return opened(P, V).ahead(rows, settle)

    def dispatch(self, x_TH: Tensor, receipt: Receipt) -> Tensor:
        return x_TH if starts_aligned(x_TH) else x_TH.clone()

    def prefetch(self, x_TH: Tensor, receipt: Receipt) -> Callable[[], Tensor]:
        return lambda: self.dispatch(x_TH, receipt)

    def keep(self, rows_RH: Tensor) -> Tensor:
        return rows_RH

    def combine(self, rows_RH: Tensor, receipt: Receipt) -> Tensor:
        return rows_RH

    def combine_pairs(self, values_PH: Tensor, weights_P: Tensor | None, receipt: Receipt) -> Tensor:
        return gather_sum(values_PH, receipt.pairs_by_row_V, receipt.pair_starts_R, weights_P)

    def start_combine_pairs(self, values_PH: Tensor, weights_P: Tensor | None, receipt: Receipt) -> Combining:
        # Taken before what runs beside is launched: none of that may still use this memory.
        sums_RH = values_PH.new_empty(receipt.num_rows, values_PH.shape[1])

        def result() -> Tensor:
            lists = receipt.pairs_by_row_V, receipt.pair_starts_R
            return gather_sum(values_PH, *lists, weights_P, into=sums_RH, beside=True)

        return Combining(result, beside=True)

    def return_pairs(self, values_P: Tensor, receipt: Receipt) -> Tensor:
        return values_of_pairs(values_P[:, None], receipt.slot_V, receipt.pair_starts_R[-1:], receipt.num_listed)

    def start_return_pairs(self, parts_PN: Tensor, receipt: Receipt) -> Callable[[], Tensor]:
        values_N = parts_PN.new_empty(receipt.num_listed)  # now, as in start_combine_pairs
        num_pairs = receipt.pair_starts_R[-1:]
        return partial(
            values_of_pairs, parts_PN, receipt.slot_V, num_pairs, receipt.num_listed, into=values_N, beside=True
        )


def _rows_and_pairs(arriving: SizesOnHost) -> tuple[int, int]:
    sizes = arriving.read()
    return sizes.num_rows(0), sum(sizes.pairs_in(0))
