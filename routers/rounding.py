"""Token rounding across ranks: from the top-K counts C[S, E] to the rows n[S, E] of every chunk, equal on all ranks.

A chunk is the rows of one (source rank, expert). t is the row multiple of a chunk, G the multiple of an expert's total
over the group. docs/token_rounding.md defines the modes, and says what holds for the rows; kernels/route/rounding/
computes them. "nearest" and the other modes in which a rank rounds its own counts are those of SonicMoE (arXiv
2512.14080, section 5).

Legend: S ranks of the EP group, E experts.
"""

import functools
from fractions import Fraction

import torch
from torch import Tensor

from sonic_ep.config import RoundingConfig
from sonic_ep.kernels.backend import apply_rule
from sonic_ep.kernels.route.rounding.reference import RoundingRule
from sonic_ep.routing import GroupCounts, unrounded

CHUNK_MULTIPLES = (128, 64, 32, 16)
# The share of changed pairs that t="auto" accepts. With 0.066, t = 64 is used from rho = 2 on, where SonicMoE's paper
# reports no loss of quality.
CHANGE_BUDGET = 0.066
# Simulated changes under apportionment / changes under independent uniform remainders (docs/token_rounding.md).
_APPORTION_OVERHEAD = 1.034
_ALWAYS = 2**62  # more pairs than any group has


def predicted_change(rho: float, t: int, G: int, ep_size: int) -> float:
    """Returns the expected share of pairs that `apportion` changes, at `rho` = T*K/(E*128) tiles per (rank, expert).

    The error of a chunk is a + b: a is its own remainder, uniform in +-t/2, and b its part of the total's rounding,
    uniform in +-G/(2 ep_size). The mean of |a + b| is max/2 + min^2/(6 max), max and min being the two half-widths.
    """
    own, shared = t / 2, G / (2 * ep_size)
    if ep_size == 1:
        own, shared = shared, 0.0
    elif t == G:
        shared = 0.0
    wide, narrow = max(own, shared), min(own, shared)
    mean_error = wide / 2 + narrow**2 / (6 * wide)
    overhead = 1.0 if ep_size == 1 else _APPORTION_OVERHEAD
    return overhead * mean_error / (128 * rho)


def chunk_multiples(G: int) -> tuple[int, ...]:
    """Returns the values of t among which "auto" chooses, largest first: those that divide G, or else G."""
    return tuple(t for t in CHUNK_MULTIPLES if t <= G and G % t == 0) or (G,)


def is_plain_topk(rounding: RoundingConfig, *, training: bool) -> bool:
    """Returns True if the pairs are as in plain top-K for any counts."""
    return not training or (rounding.mode in ("off", "pad") and rounding.capacity_factor is None)


def leaves_sizes_open(rounding: RoundingConfig, *, training: bool) -> bool:
    """Returns True if a rank's number of rows depends on the counts; otherwise it is T * K."""
    return training and not (rounding.mode == "off" and rounding.capacity_factor is None)


def max_rows(rounding: RoundingConfig, num_tokens: int, K: int, E: int, ep_size: int, *, training: bool) -> int | None:
    """Returns an upper bound of the rows that a rank with `num_tokens` sends; None if they are exactly its T K pairs.

    A rank that rounds its own counts raises each by less than one unit, or by at most half a unit if to the nearest
    multiple. Apportionment raises an expert's total by at most G/2, and a rank's count by less than G/2 + 2t: if it
    rose by more, no other rank would be below its own count, and the total would be too high.
    """
    if not leaves_sizes_open(rounding, training=training):
        return None
    t = rounding.G if rounding.t == "auto" else rounding.t
    if rounding.mode == "off":
        unit = 0
    elif rounding.mode == "apportion" and ep_size > 1:
        unit = rounding.G // 2 + 2 * t
    elif rounding.mode == "nearest":
        unit = t // 2
    else:
        unit = max(t, rounding.G)
    return num_tokens * K + E * unit


def max_received(rounding: RoundingConfig, num_tokens: int, K: int, *, training: bool) -> int | None:
    """Returns an upper bound of the rows that any destination rank receives, if no rank has more than `num_tokens`.

    None without a capacity factor, or outside training.
    """
    if not training or rounding.capacity_factor is None:
        return None
    numerator, denominator = _ratio(rounding.capacity_factor)
    return max(num_tokens * K * numerator // denominator, rounding.G)  # capacity always admits one unit


def round_counts(
    chosen_SE: Tensor,
    tokens_S: Tensor,
    rounding: RoundingConfig,
    *,
    training: bool = True,
    seed: Tensor | int = 0,
) -> GroupCounts:
    """Rounds the plain top-K counts of every rank to n[S, E].

    Shapes:  chosen_SE (S, E) plain top-K counts and tokens_S (S,) tokens of each rank, int64 on one device. E must be a
             multiple of S.
    Mode:    `rounding.mode`; outside `training` always "off", without capacity.
    seed:    () integer for mode "stochastic", 0 <= seed < 2^31, equal on every rank.
    """
    ep_size, E = chosen_SE.shape
    if not leaves_sizes_open(rounding, training=training):
        return unrounded(chosen_SE, tokens_S)
    seed_tensor = torch.full((), seed, device=chosen_SE.device) if isinstance(seed, int) else seed
    rows_SE, pairs_SE, cut_S, t = apply_rule(chosen_SE, tokens_S, seed_tensor, rule_of(rounding, ep_size, E))
    return GroupCounts(chosen_SE, rows_SE, pairs_SE, tokens_S, cut_S, t)


@functools.cache
def rule_of(rounding: RoundingConfig, ep_size: int, E: int) -> RoundingRule:
    """Returns the config as the integers that the kernels use (kernels/route/rounding/reference.py)."""
    G, thresholds = rounding.G, ()
    pads_below = _ALWAYS if rounding.mode in ("pad", "off") else 0
    if rounding.mode == "off":
        t = 1
    elif rounding.t != "auto":
        t = rounding.t
    elif rounding.mode == "pad":
        t = chunk_multiples(G)[-1]
    elif rounding.mode != "apportion":
        t = G
    else:
        t = chunk_multiples(G)[-1]
        pairs_at_rho_1 = ep_size * E * 128
        # The least number of pairs in the group at which each t is within the budget.
        thresholds = tuple(
            (round(predicted_change(1.0, each, G, ep_size) / CHANGE_BUDGET * pairs_at_rho_1), each)
            for each in reversed(chunk_multiples(G))
        )
        pads_below = min(least for least, _ in thresholds)
    capacity = None if rounding.capacity_factor is None else _ratio(rounding.capacity_factor)
    return RoundingRule(rounding.mode, G, t, thresholds, pads_below, capacity)


def _ratio(factor: float) -> tuple[int, int]:
    # Small integers, because the numerator is multiplied by a number of pairs.
    return Fraction(factor).limit_denominator(max(1, int(10**6 / factor))).as_integer_ratio()


# torch.compiler.assume_constant_result sets this. Dynamo cannot trace Fraction.
_ratio._dynamo_marked_constant = True  # type: ignore[attr-defined]
