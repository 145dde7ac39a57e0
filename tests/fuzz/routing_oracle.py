"""Routing of all ranks by loops over Python numbers: top-K, rounding and selection, without a line of the routers.

Written from docs/token_rounding.md and the docstrings of the configs. Scores are compared by their float32 value, as
the layer documents; equal ones by the smaller id.

Legend: S ranks of the EP group, T tokens on this rank, E experts.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from sonic_ep import MoEConfig, RoundingConfig

Table = list[list[int]]  # [rank][expert]


@dataclass
class Routes:
    """What all ranks route in one step.

    selected, topk, by_score: (T, E) masks of each rank; by_score is what balance losses count. counts, rows, pairs:
    [rank][expert], top-K counts, and rows and pairs of each chunk. margin: the smallest difference, relative, of two
    scores of which one was taken and the other was not.
    """

    selected: list[Tensor]
    topk: list[Tensor]
    by_score: list[Tensor]
    counts: Table
    rows: Table
    pairs: Table
    margin: float


class _Best:
    """Takes the best of some values, and remembers the smallest margin."""

    def __init__(self) -> None:
        self.margin = float("inf")

    def take(self, values: list[float], count: int, classes: list[int] | None = None) -> list[int]:
        """The indices of the best: the highest class, then the highest value, then the smallest index."""
        classes = classes or [0] * len(values)
        order = sorted(range(len(values)), key=lambda i: (-classes[i], -values[i], i))
        if 0 < count < len(order) and classes[order[count - 1]] == classes[order[count]]:
            last, first_left = values[order[count - 1]], values[order[count]]
            self.margin = min(self.margin, (last - first_left) / max(abs(last), abs(first_left), 1e-3))
        return order[:count]


def route(scores: list[Tensor], bias: Tensor | None, config: MoEConfig, *, training: bool, drawn: Table) -> Routes:
    """scores: (T, E) float64 of each rank. drawn: the rows of the layer, which mode "stochastic" alone may choose."""
    best, E, router = _Best(), config.E, config.router
    topk, by_score, allowed = [], [], []
    for scores_TE in scores:
        ranking = (scores_TE if bias is None else scores_TE + bias.double()).tolist()
        groups = [_allowed(row, config, best) for row in ranking]
        topk.append([best.take(_fp32(row), config.K, each) for row, each in zip(ranking, groups, strict=True)])
        by_score.append([best.take(_fp32(row), config.K) for row in scores_TE.tolist()])
        allowed.append(groups)
    if not (router.expert_bias or router.num_groups > 1):
        assert by_score == topk
    counts = [[sum(e in chosen for chosen in of_rank) for e in range(E)] for of_rank in topk]
    rows, pairs = round_counts(counts, [len(each) for each in scores], config.rounding, training, drawn)
    selected = []
    for rank, scores_TE in enumerate(scores):
        mask = torch.zeros(len(scores_TE), E, dtype=torch.bool)
        for e in range(E):
            classes = [2 * (e in topk[rank][t]) or allowed[rank][t][e] for t in range(len(scores_TE))]
            mask[best.take(_fp32(scores_TE[:, e].tolist()), pairs[rank][e], classes), e] = True
        selected.append(mask)
    return Routes(selected, _masks(topk, E), _masks(by_score, E), counts, rows, pairs, best.margin)


def _fp32(values: list[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float64).float().tolist()


def _allowed(ranking: list[float], config: MoEConfig, best: _Best) -> list[int]:
    """1 for the experts of a token's best groups, by the sum of a group's two best experts."""
    number, size = config.router.num_groups, config.E // config.router.num_groups
    if number == 1:
        return [1] * config.E
    sums = [sum(sorted(ranking[g * size : (g + 1) * size])[-2:]) for g in range(number)]
    taken = best.take(_fp32(sums), config.router.groups_per_token)
    return [int(e // size in taken) for e in range(config.E)]


def _masks(ids: list[Table], E: int) -> list[Tensor]:
    return [torch.tensor([[e in row for e in range(E)] for row in each]).view(-1, E).bool() for each in ids]


def round_counts(
    counts: Table, tokens: list[int], rounding: RoundingConfig, training: bool, drawn: Table
) -> tuple[Table, Table]:
    """Rows and pairs of each chunk."""
    S, E, total = len(counts), len(counts[0]), sum(map(sum, counts))
    mode, G, capacity = rounding.mode, rounding.G, rounding.capacity_factor
    if not training:
        return counts, counts
    t, pads = chunk_multiple(rounding, S, E, total)
    pads = pads or mode in ("pad", "off")
    if pads:
        rows = [[-(-c // t) * t for c in row] for row in counts]
    elif mode == "apportion":
        columns = [
            deal([row[e] for row in counts], t, [-(-T // G) * G // t for T in tokens], _nearest(column, G) // t)
            for e, column in enumerate(map(sum, zip(*counts, strict=True)))
        ]
        rows = [[t * column[rank] for column in columns] for rank in range(S)]
    elif mode == "stochastic":
        # One of the two multiples around the count, or else none that the layer drew.
        rows = [
            [n if n % t == 0 and abs(n - c) < t else c // t * t for c, n in zip(*both, strict=True)]
            for both in zip(counts, drawn, strict=True)
        ]
    else:
        rule = {"nearest": _nearest, "up": lambda c, t: -(-c // t) * t, "down": lambda c, t: c // t * t}[mode]
        rows = [[rule(c, t) for c in row] for row in counts]
    most = counts if pads else [[T] * E for T in tokens]
    if capacity is not None:
        unit = G if mode == "apportion" and not pads else t
        rows = _within_capacity(rows, t, unit, int(total * Fraction(capacity) / S))
    return rows, [[min(n, c) for n, c in zip(*both, strict=True)] for both in zip(rows, most, strict=True)]


def chunk_multiple(rounding: RoundingConfig, S: int, E: int, total: int) -> tuple[int, bool]:
    """t, and whether "auto" pads because every t would change too many pairs."""
    G = rounding.G
    if rounding.mode == "off" or rounding.t != "auto":
        return 1 if rounding.mode == "off" else int(rounding.t), False
    multiples = [t for t in (16, 32, 64, 128) if G % t == 0] or [G]
    if rounding.mode == "pad":
        return multiples[0], False
    if rounding.mode != "apportion":
        return G, False
    small_enough = [t for t in multiples if total >= round(_change_at_rho_1(t, G, S) / 0.066 * S * E * 128)]
    return (small_enough[-1], False) if small_enough else (multiples[0], True)


def _change_at_rho_1(t: int, G: int, S: int) -> float:
    widths = [G / 2] if S == 1 else [t / 2] if t == G else [t / 2, G / (2 * S)]
    wide, narrow = max(widths), min(widths) if len(widths) > 1 else 0.0
    return (1.034 if S > 1 else 1.0) * (wide / 2 + narrow**2 / (6 * wide)) / 128


def _nearest(count: int, unit: int) -> int:
    return unit * round(Fraction(count, unit))


def deal(weights: list[int], step: int, caps: list[int], units: int) -> list[int]:
    """Deals one unit after the other to the holder with most left of its weight, ties to the first."""
    dealt = [0] * len(weights)
    for _ in range(units):
        able = [i for i in range(len(weights)) if dealt[i] < caps[i]]
        dealt[max(able, key=lambda i: (weights[i] - step * dealt[i], -i))] += 1
    return dealt


def _within_capacity(rows: Table, t: int, unit: int, capacity: int) -> Table:
    """Cuts the largest experts of an overfull destination rank; the sources of an expert share what remains of it."""
    S, E = len(rows), len(rows[0])
    e, columns = E // S, [sum(column) for column in zip(*rows, strict=True)]
    result = [[0] * E for _ in range(S)]
    for dst in range(S):
        units = [column // unit for column in columns[dst * e : (dst + 1) * e]]
        left = deal([0] * e, 1, units, min(max(1, capacity // unit), sum(units)))
        for expert, total in zip(range(dst * e, (dst + 1) * e), (unit * each for each in left), strict=True):
            held = [row[expert] for row in rows]
            shares = [n * total // max(sum(held), 1) for n in held]
            for rank, n in enumerate(deal(shares, t, [n // t for n in held], total // t)):
                result[rank][expert] = t * n
    return result
