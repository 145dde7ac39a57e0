"""The transport of one rank: the received rows are x itself. No collective, and no copy of an aligned x.

Legend: T tokens on this rank, H hidden size, N pairs this rank sends, R rows this rank receives, V pairs this rank
receives, P rows of the pair buffer, e local experts.
"""

from collections.abc import Callable
from functools import partial
from typing import final

from torch import Tensor

from sonic_ep.checks import starts_aligned
from sonic_ep.dispatch.plan import split_sizes_async
from sonic_ep.dispatch.protocol import DispatchHandle, HandleSizes, Pending, PreparedDispatch, Splits
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.backend import allows_spare_capacity, gather_sum, pair_lists, values_of_pairs
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.routing import Routing


@final
class LocalTransport:
    """The transport of ep_size = 1.

    Without rounding, sizes follow from T and K. With rounding, a GPU's host does not wait for the number of rows: the
    lists have capacity for the most that rounding can produce (`Routing.max_rows`), and the kernels read how many there
    are. On the CPU the lists are exact.
    """

    name = ""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self.batch_invariant = batch_invariant
        self.text = "batch_invariant" if batch_invariant else ""  # see GroupTransport

    def problem_with(self, num_tokens: int) -> str | None:
        return None

    def all_gather(
        self, values: Tensor, meanwhile: Callable[[], None] | None = None, *, used: int | None = None
    ) -> Tensor:
        return EPGroup.alone().all_gather(values, meanwhile)

    def raise_if_lost(self) -> None:
        pass

    def prepare(self, routing: Routing, plan: RankPlan, x_TH: Tensor | None = None) -> PreparedDispatch:
        token_ids_N, T = routing.token_ids_N, routing.num_tokens
        P = V = N = token_ids_N.shape[0]
        spare = routing.max_rows is not None and allows_spare_capacity(token_ids_N)
        if routing.max_rows is not None and not spare:
            sizes = split_sizes_async(routing).read()
            P, V = sizes.num_rows(0), sum(sizes.pairs_in(0))
        else:
            routing.check()
            P = P if routing.max_rows is None else routing.max_rows
        buffer = pair_lists(plan.chunks(P, V, zeroed=spare), token_ids_N, routing.weights_N, None, T)
        handle_sizes = HandleSizes(splits=Splits((T,), (T,), (V,), (V,)), num_tokens=T, num_rows=T, num_listed=N)
        handle = DispatchHandle.of(buffer, plan.expert_starts_e, (), handle_sizes)
        return PreparedDispatch(handle, buffer.weights_P)

    def dispatch(self, x_TH: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        return Pending(lambda: x_TH if starts_aligned(x_TH) else x_TH.clone())

    def combine(
        self, values_PH: Tensor, weights_P: Tensor | None, handle: DispatchHandle, *, overlap: bool = False
    ) -> Pending:
        if not overlap:
            return Pending.done(gather_sum(values_PH, handle.pairs_by_row_V, handle.pair_starts_R, weights_P))
        # Allocated before the kernel that overlaps the sums is launched. Allocated later, it could be memory that the
        # host has freed but that kernel still uses.
        sums_RH = values_PH.new_empty(handle.num_rows, values_PH.shape[1])

        def result() -> Tensor:
            lists = handle.pairs_by_row_V, handle.pair_starts_R
            return gather_sum(values_PH, *lists, weights_P, into=sums_RH, overlap_previous=True)

        return Pending(result, reserve_for="sums")

    def combine_scalars(self, parts_PZ: Tensor, handle: DispatchHandle, *, overlap: bool = False) -> Pending:
        lists = handle.slot_V, handle.pair_starts_R[-1:], handle.num_listed
        if not overlap:
            return Pending.done(values_of_pairs(parts_PZ, *lists))
        values_N = parts_PZ.new_empty(handle.num_listed)  # allocated now, as in `combine`
        return Pending(partial(values_of_pairs, parts_PZ, *lists, into=values_N, overlap_previous=True))
