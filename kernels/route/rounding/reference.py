"""Token rounding in plain torch: from the counts of every rank to the rows of every chunk. The twin of triton.py.

A chunk is the rows of one (source rank, expert). Everything is int64 tensor arithmetic: no floating point, no host
read, no loop over ranks, experts or tokens. So every rank computes identical results on any device. routers/rounding.py
defines the modes and makes the rule.

Legend: S ranks of the EP group, Q destination ranks, E experts, e local experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Bits of the priorities that `deal_units` searches: counts and their multiples.
_SEARCH_BITS = 32


class RoundingRule(NamedTuple):
    """A RoundingConfig as integers, for one number of ranks and experts.

    mode: the config's. G: the row multiple of an expert's total. t: the chunk multiple below every threshold.
    thresholds: at most 4 of (least number of pairs in the group, chunk multiple from there on), ascending.
    pads_below: if the group has fewer pairs, chunks have the plain top-K pairs and padding rows. capacity: numerator
    and denominator of the capacity factor, or None.
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
    """Rounds the counts. Returns rows_SE, pairs_SE, cut_S and t of `GroupCounts` (sonic_ep/routing.py), int64.

    Shapes:  chosen_SE (S, E) and tokens_S (S,) int64: plain top-K counts and tokens of every rank. seed: () integer of
             mode "stochastic", 0 <= seed < 2^31.
    Example: two ranks. Expert 0 has 100 pairs, so 128 rows; expert 1 has 190, so 128; t is 64.

        >>> import torch
        >>> from sonic_ep.kernels.route.rounding.reference import RoundingRule, apply_rule
        >>> chosen_SE, tokens_S, seed = torch.tensor([[70, 90], [30, 100]]), torch.tensor([170, 170]), torch.tensor(0)
        >>> rule = RoundingRule("apportion", G=128, t=64, thresholds=(), pads_below=0, capacity=None)
        >>> [values.tolist() for values in apply_rule(chosen_SE, tokens_S, seed, rule)]
        [[[64, 64], [64, 64]], [[64, 64], [64, 64]], [0, 0], 64]
    """
    (ep_size, E), tokens_S1, total = chosen_SE.shape, tokens_S[:, None], chosen_SE.sum()
    t = torch.full_like(total, rule.t)
    for least, larger_t in rule.thresholds:
        t = torch.where(total >= least, larger_t, t)
    unit = t  # capacity cuts an expert's total in this unit
    match rule.mode:
        case "off":
            rows_SE = chosen_SE
        case "pad":
            rows_SE = _round_up(chosen_SE, t)
        case "nearest":
            rows_SE = _round_to_nearest(chosen_SE, t)
        case "up":
            rows_SE = _round_up(chosen_SE, t)
        case "down":
            rows_SE = chosen_SE // t * t
        case "stochastic":
            remainder_SE = chosen_SE % t
            rows_SE = chosen_SE - remainder_SE + t * (_noise(chosen_SE, t, seed) < remainder_SE)
        case _:  # apportion
            rows_SE = _apportion(chosen_SE, tokens_S1, t, rule.G)
            unit = torch.full_like(t, rule.G)
    # Plain top-K pairs with padding rows: in modes "pad" and "off" (t = 1), or where t = "auto" falls back to padding.
    pads = total < rule.pads_below
    rows_SE = torch.where(pads, _round_up(chosen_SE, t), rows_SE)
    pairs_SE = torch.minimum(rows_SE, torch.where(pads, chosen_SE, tokens_S1))
    if rule.capacity is None:
        return rows_SE, pairs_SE, torch.zeros_like(tokens_S), t
    numerator, denominator = rule.capacity
    # Rows that one rank may receive: the capacity factor times the mean.
    capacity = total * numerator // (denominator * ep_size)
    capped_SE = _fit_capacity(rows_SE, t, torch.where(pads, t, unit), capacity)
    remaining_SE = torch.minimum(pairs_SE, capped_SE)
    cut_S = (pairs_SE - remaining_SE).sum(0).view(ep_size, E // ep_size).sum(1)
    return capped_SE, remaining_SE, cut_S, t


def _round_up(counts: Tensor, unit: Tensor | int) -> Tensor:
    """Returns the counts rounded up to a multiple of `unit`."""
    return (counts + unit - 1) // unit * unit


def _round_to_nearest(counts: Tensor, unit: Tensor | int) -> Tensor:
    """Returns the nearest multiple of `unit`; a half rounds to the even multiple."""
    floor = counts // unit
    twice = 2 * (counts - floor * unit)
    return unit * (floor + ((twice > unit) | ((twice == unit) & (floor % 2 == 1))))


def _noise(like: Tensor, below: Tensor, seed: Tensor | int) -> Tensor:
    """Returns integers uniform in 0..below-1, one per (rank, expert): a 32-bit mixing hash of (seed, position)."""
    mask = 0xFFFFFFFF
    index = torch.arange(like.numel(), device=like.device, dtype=torch.int64).view_as(like)
    mixed = (index * 0x9E3779B1 + (seed * 0x85EBCA6B + 0x165667B1) % 2**32) & mask
    for factor in (0x21F0AAAD, 0x735A2D97):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & mask
    return ((mixed ^ (mixed >> 15)) * below) >> 32


def _apportion(chosen_SE: Tensor, tokens_S1: Tensor, t: Tensor, G: int) -> Tensor:
    """Returns rows_SE: each expert's total rounded to a multiple of G, dealt to the ranks in units of t."""
    # The caps allow every rounded total, with padding rows if necessary, and no rows on a rank without tokens.
    caps_S1 = _round_up(tokens_S1, G) // t
    wanted_E = _round_to_nearest(chosen_SE.sum(0), G) // t
    # The priority of the last unit is within +-3G: the wanted total differs from the sum of the counts by at most G/2,
    # which at worst one rank takes or gives.
    return t * deal_units(chosen_SE, t, caps_S1.expand_as(chosen_SE), wanted_E, search_bits=(3 * G).bit_length())


def deal_units(
    weights: Tensor, step: Tensor | int, caps: Tensor, wanted: Tensor, *, search_bits: int = _SEARCH_BITS
) -> Tensor:
    """Deals `wanted` units to the holders along dim 0, each unit to the holder with the largest remaining weight.

    Unit j of a holder (from 0) has priority weights - j * step. The highest priorities win, ties go to the first
    holder, and no holder gets more than `caps`. With weights = counts and step = t this is the largest-remainder
    method, which minimises sum |units * t - counts|. With weights = 0 it is water filling. The priority of the last
    unit dealt must be within +-2^search_bits: a binary search finds it in search_bits + 1 steps.

    Shapes:  weights and caps (holders, columns), wanted (columns,) with wanted <= caps.sum(0), all int64. Returns units
             (holders, columns) int64.
    Example: three holders with priorities 130 66 2 | 100 36 -28 | 20 -44.

        >>> import torch
        >>> from sonic_ep.kernels.route.rounding.reference import deal_units
        >>> weights, caps = torch.tensor([[130], [100], [20]]), torch.full((3, 1), 9)
        >>> deal_units(weights, 64, caps, torch.tensor([4])).tolist()
        [[2], [2], [0]]
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
    """Returns rows_SE cut so that each destination rank receives at most `capacity` rows, but at least one unit.

    Each expert's total is a column. A destination rank above capacity loses `unit` rows at a time from its largest
    column. The source ranks of a cut column share what remains in proportion to their rows, in multiples of t.
    Example: rank 0 has expert 0 and may receive 160 rows, so 2 units of 64.

        >>> import torch
        >>> from sonic_ep.kernels.route.rounding.reference import _fit_capacity
        >>> rows_SE, t = torch.tensor([[128, 64], [128, 0]]), torch.tensor(64)
        >>> _fit_capacity(rows_SE, t, t, torch.tensor(160)).tolist()
        [[64, 64], [64, 0]]
    """
    ep_size, E = rows_SE.shape
    columns_eQ = (rows_SE.sum(0) // unit).view(ep_size, E // ep_size).T
    # One unit is always allowed: with a capacity below one tile the rank would get no rows at all.
    allowed_Q = torch.minimum((capacity // unit).clamp(min=1), columns_eQ.sum(0))
    capped_eQ = deal_units(torch.zeros_like(columns_eQ), 1, columns_eQ, allowed_Q)
    total_E = capped_eQ.T.reshape(E) * unit
    # In proportion, because a source rank with few rows for an overloaded expert must not lose all of them.
    shares_SE = rows_SE * total_E // rows_SE.sum(0).clamp(min=1)
    return t * deal_units(shares_SE, t, rows_SE // t, total_E // t)
