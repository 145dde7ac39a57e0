"""Token rounding in plain torch: counts of every rank in, rows of every chunk out. The twin of triton.py beside it.

Pure int64 tensor arithmetic: no floating point, no host read, no loop over ranks, experts or tokens, so every rank
computes identical results on any device. routers/rounding.py says what the modes mean and makes the rule.

Legend: S ranks of the EP group, Q destination ranks, E experts, e local experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Of the priorities that `deal_units` searches: counts and their multiples.
_SEARCH_BITS = 32


class RoundingRule(NamedTuple):
    """A RoundingConfig as integers, for one number of ranks and experts.

    mode: of the config. t: the chunk multiple below every threshold; thresholds: (pairs of the group, t from there on),
    ascending, at most 4. pads_below: with fewer pairs than that chunks keep the plain top-K pairs. capacity:
    numerator and denominator of the factor, None without.
    """

    mode: str
    G: int
    t: int
    thresholds: tuple[tuple[int, int], ...]
    pads_below: int
    capacity: tuple[int, int] | None


def apply_rule(
    chosen_SE: Tensor, tokens_S: Tensor, seed: Tensor, rule: RoundingRule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns rows_SE, pairs_SE, cut_S and t of `RoundedCounts` (routers/rounding.py), int64.

    Shapes:  chosen_SE (S, E) and tokens_S (S,) int64, plain top-K counts and tokens of every rank. seed: () integer of
             `stochastic`, 0 <= seed < 2^31.
    Example: mode "nearest", t 64, counts [[70, 100, 0]] of one rank with 170 tokens -> rows and pairs [[64, 128, 0]].
    """
    (ep_size, E), tokens_S1, total = chosen_SE.shape, tokens_S[:, None], chosen_SE.sum()
    t = torch.full_like(total, rule.t)
    for least, larger_t in rule.thresholds:
        t = torch.where(total >= least, larger_t, t)
    unit = t  # column totals are cut in this unit
    match rule.mode:
        case "off":
            rows_SE = chosen_SE
        case "pad":
            rows_SE = _up(chosen_SE, t)
        case "nearest":
            rows_SE = _nearest(chosen_SE, t)
        case "up":
            rows_SE = _up(chosen_SE, t)
        case "down":
            rows_SE = chosen_SE // t * t
        case "stochastic":
            remainder_SE = chosen_SE % t
            rows_SE = chosen_SE - remainder_SE + t * (_noise(chosen_SE, t, seed) < remainder_SE)
        case _:  # apportion
            rows_SE = _apportion(chosen_SE, tokens_S1, t, rule.G)
            unit = torch.full_like(t, rule.G)
    # Plain top-K pairs: where the mode is, or "auto" falls back to, padding.
    pads = total < rule.pads_below
    rows_SE = torch.where(pads, _up(chosen_SE, t), rows_SE)
    pairs_SE = torch.minimum(rows_SE, torch.where(pads, chosen_SE, tokens_S1))
    if rule.capacity is None:
        return rows_SE, pairs_SE, torch.zeros_like(tokens_S), t
    numerator, denominator = rule.capacity
    # Rows that one rank may receive: so many times the mean.
    capacity = total * numerator // (denominator * ep_size)
    capped_SE = _fit_capacity(rows_SE, t, torch.where(pads, t, unit), capacity)
    remaining_SE = torch.minimum(pairs_SE, capped_SE)
    cut_S = (pairs_SE - remaining_SE).sum(0).view(ep_size, E // ep_size).sum(1)
    return capped_SE, remaining_SE, cut_S, t


def _up(counts: Tensor, unit: Tensor | int) -> Tensor:
    return (counts + unit - 1) // unit * unit


def _nearest(counts: Tensor, unit: Tensor | int) -> Tensor:
    """Nearest multiple of `unit`; half goes to the even multiple."""
    floor = counts // unit
    twice = 2 * (counts - floor * unit)
    return unit * (floor + ((twice > unit) | ((twice == unit) & (floor % 2 == 1))))


def _noise(like: Tensor, below: Tensor, seed: Tensor | int) -> Tensor:
    """Integers uniform in 0..below-1, one per (rank, expert): a 32-bit mixing hash of (draw, position)."""
    mask = 0xFFFFFFFF
    index = torch.arange(like.numel(), device=like.device, dtype=torch.int64).view_as(like)
    mixed = (index * 0x9E3779B1 + (seed * 0x85EBCA6B + 0x165667B1) % 2**32) & mask
    for factor in (0x21F0AAAD, 0x735A2D97):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & mask
    return ((mixed ^ (mixed >> 15)) * below) >> 32


def _apportion(chosen_SE: Tensor, tokens_S1: Tensor, t: Tensor, G: int) -> Tensor:
    # Room for every rounded total, in padding if need be; none on a rank without tokens.
    caps_S1 = _up(tokens_S1, G) // t
    wanted_E = _nearest(chosen_SE.sum(0), G) // t
    # With the counts' own floors dealt, at most half a G is to be dealt or taken back, at worst by one rank.
    return t * deal_units(chosen_SE, t, caps_S1.expand_as(chosen_SE), wanted_E, search_bits=(3 * G).bit_length())


def deal_units(
    weights: Tensor, step: Tensor | int, caps: Tensor, wanted: Tensor, *, search_bits: int = _SEARCH_BITS
) -> Tensor:
    """Deal `wanted` units to the holders along dim 0, each to the one with the largest weight left.

    A holder's j-th unit (from 0) has priority weights - j * step; the highest priorities win, ties go to the first
    holder, and none gets more than `caps`. With weights = counts and step = t this is the largest-remainder method, and
    minimises sum |units * t - counts|; with weights = 0 it is water filling. The priority of the last unit dealt must
    be within +-2^search_bits: a binary search finds it in that many steps and one.

    Shapes:  weights, caps (holders, columns); wanted (columns,) with wanted <= caps.sum(0); int64. Result like weights.
    Example: weights [[130], [100], [20]], step 64, caps 9, wanted 4 -> priorities 130 66 2 | 100 36 | 20 -> [[2], [2],
    [0]].
    """

    def units_above(level: Tensor) -> Tensor:
        return torch.minimum((-((level - weights) // step)).clamp(min=0), caps)

    if weights.shape[0] == 1:
        return wanted[None]
    low, high = torch.full_like(wanted, -(2**search_bits)), torch.full_like(wanted, 2**search_bits)
    for _ in range(search_bits + 1):
        middle = (low + high) // 2
        fits = units_above(middle).sum(0) <= wanted
        high = torch.where(fits, middle, high)
        low = torch.where(fits, low, middle)
    units = units_above(high)
    tied = (weights - units * step == high) & (units < caps)
    left = wanted - units.sum(0)
    return units + (tied & (tied.cumsum(0) <= left))


def _fit_capacity(rows_SE: Tensor, t: Tensor, unit: Tensor, capacity: Tensor) -> Tensor:
    """Cut the columns of overfull owners, largest first, in `unit`s; a cut column's ranks give in proportion, in t."""
    ep_size, E = rows_SE.shape
    columns_eQ = (rows_SE.sum(0) // unit).view(ep_size, E // ep_size).T
    # One unit always fits: a capacity below one tile would starve the rank altogether.
    allowed_Q = torch.minimum((capacity // unit).clamp(min=1), columns_eQ.sum(0))
    capped_eQ = deal_units(torch.zeros_like(columns_eQ), 1, columns_eQ, allowed_Q)
    total_E = capped_eQ.T.reshape(E) * unit
    # In proportion: a rank with few rows for a hot expert must not lose them all.
    shares_SE = rows_SE * total_E // rows_SE.sum(0).clamp(min=1)
    return t * deal_units(shares_SE, t, rows_SE // t, total_E // t)
