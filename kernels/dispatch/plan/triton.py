"""One rank's part of the plan, and the bounded plan, as two Triton kernels.

Legend: S ranks of the EP group, Q destination ranks, E experts, e local experts, C chunks (source rank, local expert),
F fields of a table.
"""

import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.dispatch.recv_index.reference import RankPlan
from sonic_ep.routing import INDEX_DTYPE

_BLOCK = 1024


@fast_launch
@triton.jit
def _plan(
    rows_ptr,
    pairs_ptr,
    table_ptr,
    expert_starts_ptr,
    pair_starts_ptr,
    pairs_to_dst_ptr,
    rank,
    S,
    e,
    TILE: tl.constexpr,
    SOURCES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Computes the plan of `rank` from rows and pairs, (S, E) int64.

    Program 0 writes table (6, C), expert_starts (e + 1,) and pair_starts (Q + 1,). Program 1 + q writes the pairs from
    each rank to destination rank q, column q of pairs_to_dst (S * Q,). Grid: (1 + S,). Example: see reference.py.
    """
    source, expert = tl.arange(0, SOURCES), tl.arange(0, EXPERTS)
    is_source, is_expert = source < S, expert < e
    dst = tl.program_id(0) - 1
    if dst >= 0:
        to_dst = source[:, None] * (S * e) + dst * e + expert[None, :]
        pairs = tl.load(pairs_ptr + to_dst, mask=is_source[:, None] & is_expert[None, :], other=0).to(tl.int32)
        tl.store(pairs_to_dst_ptr + source * S + dst, tl.sum(pairs, axis=1), mask=is_source)
        return
    inside = is_source[:, None] & is_expert[None, :]
    arriving = source[:, None] * (S * e) + rank * e + expert[None, :]
    rows = tl.load(rows_ptr + arriving, mask=inside, other=0).to(tl.int32)
    pairs = tl.load(pairs_ptr + arriving, mask=inside, other=0).to(tl.int32)
    head_rows = rows // TILE * TILE
    tail_rows = rows - head_rows
    rows_e = tl.sum(rows, axis=0)
    starts_e = tl.cumsum(rows_e, axis=0) - rows_e
    head_starts = starts_e[None, :] + tl.cumsum(head_rows, axis=0) - head_rows
    tail_starts = (starts_e + tl.sum(head_rows, axis=0))[None, :] + tl.cumsum(tail_rows, axis=0) - tail_rows
    pairs_S = tl.sum(pairs, axis=1)
    first_pairs = (tl.cumsum(pairs_S, axis=0) - pairs_S)[:, None] + tl.cumsum(pairs, axis=1) - pairs
    C = S * e
    table_ptr += source[:, None] * e + expert[None, :]
    tl.store(table_ptr, rows, mask=inside)
    tl.store(table_ptr + C, pairs, mask=inside)
    tl.store(table_ptr + 2 * C, head_rows, mask=inside)
    tl.store(table_ptr + 3 * C, head_starts, mask=inside)
    tl.store(table_ptr + 4 * C, tail_starts, mask=inside)
    tl.store(table_ptr + 5 * C, first_pairs, mask=inside)
    tl.store(expert_starts_ptr + expert, starts_e, mask=is_expert)
    tl.store(expert_starts_ptr + e, tl.sum(rows_e, axis=0))
    leaving = rank * (S * e) + source[:, None] * e + expert[None, :]
    sent_Q = tl.sum(tl.load(pairs_ptr + leaving, mask=inside, other=0).to(tl.int32), axis=1)
    tl.store(pair_starts_ptr + source, tl.cumsum(sent_Q, axis=0) - sent_Q, mask=is_source)
    tl.store(pair_starts_ptr + S, tl.sum(sent_Q, axis=0))


def rank_plan(rows_SE: Tensor, pairs_SE: Tensor, rank: int, tile_rows: int) -> RankPlan:
    """See kernels/dispatch/plan/reference.py."""
    S, E = rows_SE.shape
    e = E // S

    def empty(*size: int) -> Tensor:
        return rows_SE.new_empty(size, dtype=INDEX_DTYPE)

    plan = RankPlan(empty(6, E), empty(e + 1), empty(S + 1), empty(S * S))
    _plan[(1 + S,)](
        rows_SE.contiguous(),
        pairs_SE.contiguous(),
        *plan,
        rank,
        S,
        e,
        TILE=tile_rows,
        SOURCES=next_power_of_2(S),
        EXPERTS=next_power_of_2(e),
        num_warps=8,
    )
    return plan


@triton.jit
def _copy_if(values_ptr, out_ptr, size, index, fits):
    """Copies the block `index` of values, or writes zeros if the step does not fit."""
    tl.store(out_ptr + index, tl.load(values_ptr + index, mask=(index < size) & fits, other=0), mask=index < size)


@fast_launch
@triton.jit(do_not_specialize=["tokens", "max_rows", "max_pairs", "least"])
def _bounded_plan(
    table_ptr,
    starts_ptr,
    pairs_to_dst_ptr,
    out_table_ptr,
    out_starts_ptr,
    out_pairs_to_dst_ptr,
    sizes_ptr,
    tokens,
    max_rows,
    max_pairs,
    least,
    S,
    e,
    SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies the plan, or writes zeros if the step does not fit the size bound.

    Every program reads the sizes of `pack_split_sizes` and decides the same. It then copies block program_id of table
    (6, C), of expert_starts (e + 1,) and of pairs_to_dst (S * S,).
    Grid: (cdiv(max(6 * C, e + 1, S * S), BLOCK),). Example: see reference.py.
    """
    source = tl.arange(0, SOURCES)
    from_to = source[:, None] * S + source[None, :]
    inside = (source < S)[:, None] & (source < S)[None, :]
    tokens_S = tl.load(sizes_ptr + source, mask=source < S, other=0)
    rows_SQ = tl.load(sizes_ptr + S + from_to, mask=inside, other=0)
    pairs_SQ = tl.load(sizes_ptr + S + S * S + from_to, mask=inside, other=0)
    fits = (tl.maximum(tl.max(tokens_S, axis=0), least) == tokens) & (
        tl.max(tl.sum(rows_SQ, axis=0), axis=0) <= max_rows
    )
    fits = fits & (tl.max(tl.sum(pairs_SQ, axis=0), axis=0) <= max_pairs)
    fits = fits & (tl.max(tl.sum(pairs_SQ, axis=1), axis=0) <= max_pairs)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _copy_if(table_ptr, out_table_ptr, 6 * S * e, index, fits)
    _copy_if(starts_ptr, out_starts_ptr, e + 1, index, fits)
    _copy_if(pairs_to_dst_ptr, out_pairs_to_dst_ptr, S * S, index, fits)


def bounded_plan(plan: RankPlan, sizes: Tensor, tokens: int, rows: int, pairs: int, least: int = 0) -> RankPlan:
    """See kernels/dispatch/plan/reference.py."""
    S, e = plan.pair_starts_Q.shape[0] - 1, plan.expert_starts_e.shape[0] - 1
    within = plan._replace(
        table_FC=plan.table_FC.new_empty(plan.table_FC.shape),
        expert_starts_e=plan.expert_starts_e.new_empty(plan.expert_starts_e.shape),
        pairs_SQ=plan.pairs_SQ.new_empty(plan.pairs_SQ.shape),
    )
    _bounded_plan[(cdiv(max(plan.table_FC.numel(), e + 1, S * S), _BLOCK),)](
        plan.table_FC,
        plan.expert_starts_e,
        plan.pairs_SQ,
        within.table_FC,
        within.expert_starts_e,
        within.pairs_SQ,
        sizes,
        tokens,
        rows,
        pairs,
        least,
        S,
        e,
        SOURCES=next_power_of_2(S),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return within
