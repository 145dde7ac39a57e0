"""Token rounding in Triton: bit for bit the results of reference.py, in one launch, or three with a capacity.

A program rounds the counts of a few experts, for all ranks. Capacity couples the experts of a destination rank: one
program per destination rank cuts the totals of its experts, then a third kernel takes what was cut from the source
ranks.

Legend: S ranks of the EP group, E experts, e local experts. Integers are int64.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.route.rounding.reference import RoundingRule

_MODES = {
    name: number for number, name in enumerate(("off", "pad", "nearest", "up", "down", "stochastic", "apportion"))
}
_OFF, _PAD, _NEAREST, _UP, _DOWN, _STOCHASTIC, _APPORTION = (tl.constexpr(number) for number in _MODES.values())
_TILE = 1024  # elements of a (ranks, experts) tile
_MAX_THRESHOLDS = 4
# Bits of the searched priorities where they have no smaller bound: counts and their multiples.
_ANY_BITS = 32


@triton.jit
def _round_up(counts, unit):
    """Returns the counts rounded up to a multiple of `unit`."""
    return (counts + unit - 1) // unit * unit


@triton.jit
def _round_to_nearest(counts, unit):
    """Returns the nearest multiple of `unit`; a half rounds to the even multiple."""
    floor = counts // unit
    twice = 2 * (counts - floor * unit)
    more = (twice > unit) | ((twice == unit) & (floor % 2 == 1))
    return unit * (floor + more.to(tl.int64))


@triton.jit
def _units_above(weights, level, step, caps):
    """Returns how many units of each holder have a priority above `level`, at most `caps`."""
    left = weights - level[None, :]
    return tl.minimum(tl.where(left > 0, (left + step - 1) // step, 0), caps)


@triton.jit
def _deal(weights, step, caps, wanted, BITS: tl.constexpr):
    """Returns `deal_units` of reference.py; holders are the first dimension."""
    high = (tl.zeros_like(wanted) + 1) << BITS
    low = -high
    for _ in tl.static_range(BITS + 1):
        middle = (low + high) >> 1
        fits = tl.sum(_units_above(weights, middle, step, caps), axis=0) <= wanted
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle)
    units = _units_above(weights, high, step, caps)
    tied = ((weights - units * step == high[None, :]) & (units < caps)).to(tl.int64)
    left = wanted - tl.sum(units, axis=0)
    return units + tl.where(tl.cumsum(tied, axis=0) <= left[None, :], tied, 0)


@triton.jit
def _noise(index, below, seed):
    """Returns `_noise` of reference.py at these positions."""
    mask = (tl.zeros_like(index) + 1 << 32) - 1
    mixed = (index * 0x9E3779B1 + ((seed * 0x85EBCA6B + 0x165667B1) & mask)) & mask
    mixed = ((mixed ^ (mixed >> 16)) * 0x21F0AAAD) & mask
    mixed = ((mixed ^ (mixed >> 16)) * 0x735A2D97) & mask
    return ((mixed ^ (mixed >> 15)) * below) >> 32


@triton.jit
def _sum(values_ptr, stride, S, E, BLOCK: tl.constexpr):
    """Returns the sum of (S, E) values with row stride `stride`."""
    total = tl.zeros([BLOCK], dtype=tl.int64)
    first = 0
    while first < S * E:
        index = first + tl.arange(0, BLOCK)
        total += tl.load(values_ptr + index // E * stride + index % E, mask=index < S * E, other=0)
        first += BLOCK
    return tl.sum(total, axis=0)


@fast_launch
@triton.jit
def _round_counts(
    chosen_ptr,
    tokens_ptr,
    seed_ptr,
    rows_ptr,
    pairs_ptr,
    t_ptr,
    pads_ptr,
    cut_ptr,
    chosen_stride,
    tokens_stride,
    S,
    E,
    least_1,
    t_1,
    least_2,
    t_2,
    least_3,
    t_3,
    least_4,
    t_4,
    base_t,
    pads_below,
    G,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    ONE_RANK: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rounds the counts, before capacity.

    A program reads the counts (S, E) and tokens of all ranks, and writes rows and pairs of EXPERTS experts for all
    ranks. Each program sums all counts, which determine t and padding. Program 0 also writes t, whether chunks have the
    plain top-K pairs (`pads`) and behind it the sum of all counts, and zeros to cut_S. EXPERTS * RANKS is about 1024.
    Grid: (cdiv(E, EXPERTS),). Example: see reference.py.
    """
    total = _sum(chosen_ptr, chosen_stride, S, E, BLOCK)
    t = tl.where(total >= least_1, t_1, base_t).to(tl.int64)
    t = tl.where(total >= least_2, t_2, t)
    t = tl.where(total >= least_3, t_3, t)
    t = tl.where(total >= least_4, t_4, t)
    pads = total < pads_below
    if tl.program_id(0) == 0:
        tl.store(t_ptr, t)
        tl.store(pads_ptr, pads.to(tl.int64))
        tl.store(pads_ptr + 1, total)
        source = tl.arange(0, RANKS)
        tl.store(cut_ptr + source, tl.zeros_like(source).to(tl.int64), mask=source < S)
    rank, expert = tl.arange(0, RANKS)[:, None], tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)[None, :]
    inside = (rank < S) & (expert < E)
    index = (rank * E + expert).to(tl.int64)
    chosen = tl.load(chosen_ptr + rank * chosen_stride + expert, mask=inside, other=0)
    tokens = tl.load(tokens_ptr + rank * tokens_stride, mask=rank < S, other=0)
    rows = chosen
    if MODE == _NEAREST:
        rows = _round_to_nearest(chosen, t)
    elif MODE == _UP:
        rows = _round_up(chosen, t)
    elif MODE == _DOWN:
        rows = chosen // t * t
    elif MODE == _STOCHASTIC:
        remainder = chosen % t
        more = _noise(index, t, tl.load(seed_ptr).to(tl.int64)) < remainder
        rows = chosen - remainder + tl.where(more, t, 0)
    elif MODE == _APPORTION:
        wanted = _round_to_nearest(tl.sum(chosen, axis=0), G) // t
        if ONE_RANK:
            rows = tl.where(inside, t * wanted[None, :], 0)
        else:
            caps = tl.where(inside, _round_up(tokens, G) // t, 0)
            rows = t * _deal(chosen, t, caps, wanted, BITS)
    rows = tl.where(pads, _round_up(chosen, t), rows)
    tl.store(rows_ptr + index, rows, mask=inside)
    tl.store(pairs_ptr + index, tl.minimum(rows, tl.where(pads, chosen, tokens)), mask=inside)


@triton.jit
def _unit(pads_ptr, t_ptr, G, MODE: tl.constexpr):
    """Returns the unit, a scalar, in which capacity cuts the total of an expert."""
    t = tl.load(t_ptr)
    unit = t
    if MODE == _APPORTION:
        unit = tl.where(tl.load(pads_ptr) != 0, t, G)
    return unit


@fast_launch
@triton.jit
def _cap_dst_ranks(
    rows_ptr,
    pads_ptr,
    t_ptr,
    capped_ptr,
    S,
    e,
    G,
    numerator,
    denominator,
    MODE: tl.constexpr,
    BITS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Cuts the totals of the experts of one destination rank to its capacity.

    A program reads rows_SE of its e experts, and writes capped_E: the rows that remain for each of them.
    Grid: (S,), one program per destination rank. Example: see reference.py.
    """
    own = tl.arange(0, EXPERTS)
    expert = tl.program_id(0) * e + own
    unit = _unit(pads_ptr, t_ptr, G, MODE)
    columns = tl.zeros([EXPERTS], dtype=tl.int64)
    rank = 0
    while rank < S:  # not a range: Triton's interpreter rejects bounds that are not constants
        columns += tl.load(rows_ptr + rank * (S * e) + expert, mask=own < e, other=0)
        rank += 1
    columns = columns // unit
    capacity = tl.load(pads_ptr + 1) * numerator // (denominator * S)
    allowed = tl.maximum(capacity // unit, 1)
    if allowed < tl.sum(columns, axis=0):  # else nothing is cut
        wanted = tl.zeros([1], dtype=tl.int64) + allowed
        remaining = _deal(tl.zeros([EXPERTS, 1], dtype=tl.int64), 1, columns[:, None], wanted, BITS)
        columns = tl.sum(remaining, axis=1)
    tl.store(capped_ptr + expert, columns * unit, mask=own < e)


@fast_launch
@triton.jit
def _cap_sources(
    rows_ptr,
    pairs_ptr,
    t_ptr,
    capped_ptr,
    cut_ptr,
    S,
    E,
    BITS: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Reduces rows_SE and pairs_SE in place to the totals capped_E, and adds the lost pairs to cut_S.

    A program handles EXPERTS experts for all ranks. The source ranks of a cut expert share its rows in proportion.
    Grid: (cdiv(E, EXPERTS),). Example: see reference.py.
    """
    rank, expert = tl.arange(0, RANKS)[:, None], tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    inside = (rank < S) & (expert < E)[None, :]
    index = rank * E + expert[None, :]
    t = tl.load(t_ptr)
    rows = tl.load(rows_ptr + index, mask=inside, other=0)
    total = tl.load(capped_ptr + expert, mask=expert < E, other=0)
    columns = tl.sum(rows, axis=0)
    if tl.max((columns != total).to(tl.int32), axis=0) != 0:  # at least one of these experts is cut
        pairs = tl.load(pairs_ptr + index, mask=inside, other=0)
        shares = rows * total[None, :] // tl.maximum(columns, 1)[None, :]
        capped = t * _deal(shares, t, rows // t, total // t, BITS)
        remaining = tl.minimum(pairs, capped)
        tl.store(rows_ptr + index, capped, mask=inside)
        tl.store(pairs_ptr + index, remaining, mask=inside)
        tl.atomic_add(cut_ptr + expert // (E // S), tl.sum(pairs - remaining, axis=0), mask=expert < E, sem="relaxed")


@functools.cache
def _thresholds(rule: RoundingRule) -> tuple[int, ...]:
    never = (1 << 62, rule.t)
    thresholds = (*rule.thresholds, *[never] * (_MAX_THRESHOLDS - len(rule.thresholds)))
    return tuple(number for threshold in thresholds for number in threshold)


def apply_rule(
    chosen_SE: Tensor, tokens_S: Tensor, seed: Tensor, rule: RoundingRule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See kernels/route/rounding/reference.py."""
    S, E = chosen_SE.shape
    rows_SE, pairs_SE = chosen_SE.new_empty(S, E), chosen_SE.new_empty(S, E)
    t, pads, cut_S = chosen_SE.new_empty(()), chosen_SE.new_empty(2), chosen_SE.new_empty(S)
    ranks = next_power_of_2(S)
    experts = min(next_power_of_2(E), max(1, _TILE // ranks))
    grid = (cdiv(E, experts),)
    assert chosen_SE.stride(1) == 1
    _round_counts[grid](
        chosen_SE,
        tokens_S,
        seed,
        rows_SE,
        pairs_SE,
        t,
        pads,
        cut_S,
        chosen_SE.stride(0),
        tokens_S.stride(0),
        S,
        E,
        *_thresholds(rule),
        rule.t,
        rule.pads_below,
        rule.G,
        MODE=_MODES[rule.mode],
        BITS=(3 * rule.G).bit_length(),
        ONE_RANK=S == 1,
        RANKS=ranks,
        EXPERTS=experts,
        BLOCK=_TILE,
        num_warps=4,
    )
    if rule.capacity is not None:
        capped_E = chosen_SE.new_empty(E)
        _cap_dst_ranks[(S,)](
            rows_SE,
            pads,
            t,
            capped_E,
            S,
            E // S,
            rule.G,
            *rule.capacity,
            MODE=_MODES[rule.mode],
            BITS=_ANY_BITS,
            EXPERTS=next_power_of_2(E // S),
            num_warps=4,
        )
        _cap_sources[grid](
            rows_SE, pairs_SE, t, capped_E, cut_S, S, E, BITS=_ANY_BITS, RANKS=ranks, EXPERTS=experts, num_warps=4
        )
    return rows_SE, pairs_SE, cut_S, t
