"""The integer decision of distributed token rounding: counts C[S, E] in, rows n[S, E] out, the same on every rank.

Pure int64 tensor arithmetic on the all-gathered counts: no floating point, no host read, no loop over ranks, experts or
tokens, so every rank computes identical results on any device. Modes (docs/token_rounding.md has the table):

  apportion   the expert's total over the group goes to the nearest multiple of G, and is dealt to the ranks in units of
              t, each unit to the rank with the largest remainder left. Default.
  nearest, up, down, stochastic
              every rank rounds its own count to a multiple of t (SonicMoE, arXiv 2512.14080, section 5; half goes to
              the even multiple, as there).
  pad         plain top-K; chunks are padded to a multiple of t with rows of weight zero.
  off         plain top-K, ragged chunks.

A rank with T tokens cannot give an expert more than T of them: a chunk that rounding makes larger is completed with
padding rows, so `pairs <= rows` everywhere and T < t is legal.

Legend: S ranks of the EP group, Q destination ranks, E experts, e local experts.
"""

import functools
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from sonic_ep.config import RoundingConfig
from sonic_ep.kernels.backend import apply_rule
from sonic_ep.kernels.route.rounding.reference import RoundingRule

CHUNK_MULTIPLES = (128, 64, 32, 16)
# Share of changed assignments that "auto" accepts; 0.066 puts rho = 2 at t = 64, where the paper's quality holds.
CHANGE_BUDGET = 0.066
# Apportionment changes this much more than independent uniform remainders would (docs/token_rounding.md, simulated).
_APPORTION_OVERHEAD = 1.034
_ALWAYS = 2**62


@dataclass(frozen=True, slots=True)
class RoundedCounts:
    """What every rank sends to every expert. All int64, on the device of the counts.

    rows_SE: n[S, E], rows of each chunk, a multiple of t. pairs_SE: how many of them are real; the rest is padding.
    cut_S: pairs per owner rank that capacity took away. t: () the chunk multiple in force (1 when off).
    """

    rows_SE: Tensor
    pairs_SE: Tensor
    cut_S: Tensor
    t: Tensor


def predicted_change(rho: float, t: int, G: int, ep_size: int) -> float:
    """Expected share of assignments that `apportion` changes at `rho` = T*K/(E*128) tiles per (rank, expert).

    The error of a chunk is uniform in +-t/2 from its own remainder plus uniform in +-G/(2 ep_size) from its part of the
    total's rounding; the mean of |a + b| for two such is max/2 + min^2/(6 max) with the half-widths.
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
    """The values of t that "auto" chooses from, largest first: those that divide G."""
    return tuple(t for t in CHUNK_MULTIPLES if t <= G and G % t == 0) or (G,)


def is_plain_topk(rounding: RoundingConfig, *, training: bool) -> bool:
    """Are the pairs those of plain top-K, whatever the counts?"""
    return not training or (rounding.mode in ("off", "pad") and rounding.capacity_factor is None)


def leaves_sizes_open(rounding: RoundingConfig, *, training: bool) -> bool:
    """Do only the counts tell how many rows a rank has?"""
    return training and not (rounding.mode == "off" and rounding.capacity_factor is None)


def max_rows(rounding: RoundingConfig, num_tokens: int, K: int, E: int, ep_size: int, *, training: bool) -> int | None:
    """What the rows of a rank with `num_tokens` cannot exceed; None where they are its T K pairs exactly.

    Alone, a rank rounds each count by less than a unit, to the nearest multiple by half of one at most. Apportionment
    moves a total by G/2 at most, and a rank's count by less than 2t more: were it higher, no rank would be below its
    own count, and the total too high.
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
    """What the rows of any owner rank cannot exceed if no rank has more than `num_tokens`; None without capacity."""
    if not training or rounding.capacity_factor is None:
        return None
    numerator, denominator = _ratio(rounding.capacity_factor)
    return max(num_tokens * K * numerator // denominator, rounding.G)  # one unit always fits


def round_counts(
    chosen_SE: Tensor,
    tokens_S: Tensor,
    rounding: RoundingConfig,
    *,
    training: bool = True,
    seed: Tensor | int = 0,
) -> RoundedCounts:
    """Decide n[S, E] from the plain top-K counts of every rank.

    Shapes:  chosen_SE (S, E) and tokens_S (S,) int64 on one device. E must be a multiple of S.
    Mode:    `rounding.mode`; without `training` always "off" and without capacity.
    draw:    non-negative seed of `stochastic` below 2^31, the same on every rank.
    """
    ep_size, E = chosen_SE.shape
    if not training or (rounding.mode == "off" and rounding.capacity_factor is None):
        one = torch.ones((), dtype=torch.int64, device=chosen_SE.device)
        return RoundedCounts(chosen_SE, chosen_SE, torch.zeros_like(tokens_S), one)
    seed_tensor = seed if isinstance(seed, Tensor) else torch.full((), seed, device=chosen_SE.device)
    return RoundedCounts(*apply_rule(chosen_SE, tokens_S, seed_tensor, rule_of(rounding, ep_size, E)))


def _auto_thresholds(ep_size: int, E: int, G: int) -> list[tuple[int, int]]:
    """(t, least group-wide number of pairs from which t is within the budget), smallest t first."""
    pairs_at_rho_1 = ep_size * E * 128
    return [
        (t, round(predicted_change(1.0, t, G, ep_size) / CHANGE_BUDGET * pairs_at_rho_1))
        for t in reversed(chunk_multiples(G))
    ]


@functools.cache
def rule_of(rounding: RoundingConfig, ep_size: int, E: int) -> RoundingRule:
    """The integers that decide on t and padding."""
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
        thresholds = tuple((least, t) for t, least in _auto_thresholds(ep_size, E, G))
        pads_below = min(least for least, _ in thresholds)
    capacity = None if rounding.capacity_factor is None else _ratio(rounding.capacity_factor)
    return RoundingRule(rounding.mode, G, t, thresholds, pads_below, capacity)


def _ratio(factor: float) -> tuple[int, int]:
    # Small integers: the numerator is multiplied by a number of pairs.
    return Fraction(factor).limit_denominator(max(1, int(10**6 / factor))).as_integer_ratio()


# What torch.compiler.assume_constant_result sets: Dynamo cannot look into a Fraction.
_ratio._dynamo_marked_constant = True  # type: ignore[attr-defined]
