"""The plan of a rank and its sizes, on the device of a routing's counts. kernels/dispatch/plan/ says what a plan is."""

from sonic_ep.kernels.backend import pack_split_sizes, rank_plan
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.kernels.experts.tile_table import TILE_ROWS
from sonic_ep.routing import AsyncSplitSizes, GroupCounts, Routing


def plan_for(counts: GroupCounts, rank: int) -> RankPlan:
    """The plan of one rank, on the device of the counts; nothing waits."""
    return rank_plan(counts.rows_SE, counts.pairs_SE, rank, TILE_ROWS)


def split_sizes_async(routing: Routing) -> AsyncSplitSizes:
    """The sizes of a routing on their way to the host: sent ahead by its router, or else from now on."""
    if routing.split_sizes is not None:
        return routing.split_sizes
    counts = routing.counts
    values = pack_split_sizes(counts.tokens_S, counts.rows_SE, counts.pairs_SE, None)
    return AsyncSplitSizes(values, counts.rows_SE.shape[0])
