"""A rank's plan and its sizes, computed on the device of the counts. kernels/dispatch/plan/reference.py defines it."""

from sonic_ep.kernels.backend import pack_split_sizes, rank_plan
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.kernels.experts.tile_table import TILE_ROWS
from sonic_ep.routing import AsyncSplitSizes, GroupCounts, Routing


def plan_for(counts: GroupCounts, rank: int) -> RankPlan:
    """Returns the plan of one rank, on the device of the counts. The host does not wait."""
    return rank_plan(counts.rows_SE, counts.pairs_SE, rank, TILE_ROWS)


def split_sizes_async(routing: Routing) -> AsyncSplitSizes:
    """Returns the async D2H copy of a routing's sizes: the one that its router started, or else one that starts now."""
    if routing.split_sizes is not None:
        return routing.split_sizes
    counts = routing.counts
    values = pack_split_sizes(counts.tokens_S, counts.rows_SE, counts.pairs_SE, None)
    return AsyncSplitSizes(values, counts.rows_SE.shape[0])
