"""`sonic-ep plan`: what a layer of a config needs on every rank: memory, bytes between ranks, rounding.

Sizes are for balanced routing, in which every expert is as likely as any other. A GPU allocates somewhat more.
docs/memory.md and docs/transports.md have the formulas.

Legend: T tokens on this rank, S ranks of the EP group, D ranks of a host, d hidden size, E experts, K experts per
token, e local experts, U rows this rank sends, R rows this rank receives, V pairs this rank receives, P rows of the
pair buffer, J pre-activation columns (2I if gated else I).
"""

import sys
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from sonic_ep.cli.expected_rows import expected_parts, rows_per_token
from sonic_ep.config import MoEConfig, TransportKind
from sonic_ep.dispatch.bounded_steps import bound_of
from sonic_ep.dispatch.size_bound import SizeBound
from sonic_ep.dispatch.symmetric_buffers import LIST_GROWTH
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.routers.rounding import is_plain_topk, max_received, max_rows, predicted_change, rule_of

_MIB = 2**20
# Per parameter besides the weight: a gradient like the weight, and fp32 master weight and two moments of Adam.
_OPTIMIZER_BYTES = 12
# Of the gradient of the router's weight: as many sums as kernels/route/linear makes for usual sizes, 8 to 11.
_PARTIAL_SUMS = 10


Kind = Literal["symmetric", "all_to_all", "two_hop", "pairs"]


@dataclass(frozen=True, slots=True)
class Layout:
    """S ranks on S / D hosts. link: GB/s that a rank can send to other hosts, while it receives as much."""

    S: int
    D: int
    link: float = float("inf")

    @property
    def num_hosts(self) -> int:
        return self.S // self.D


class Sizes(NamedTuple):
    """Of one step of one rank. U, R: distinct (token, destination rank) rows, those that stay on the rank included."""

    T: int
    S: int
    U: int
    R: int
    V: int
    P: int


def balanced_sizes(config: MoEConfig, T: int, S: int) -> Sizes:
    """Returns the expected sizes, without rows of rounding."""
    rows, pairs = round(T * expected_parts(config, S)), T * config.K
    return Sizes(T, S, rows, rows, pairs, pairs)


def allocated_sizes(config: MoEConfig, sizes: Sizes, kind: TransportKind) -> Sizes:
    """Returns the sizes for which a training step of these `sizes` allocates lists and H on a GPU.

    kind: see `saved_bytes`.
    """
    T, S, U, R, V, P = sizes
    if S == 1:
        P = max_rows(config.rounding, T, config.K, config.E, S, training=True) or P
        return Sizes(T, S, U, R, _listed_pairs(config, T, S), P)
    if kind != "symmetric":
        return sizes
    received = max_received(config.rounding, T, config.K, training=True)
    if config.transport.buffers == "static" and received is not None:
        return Sizes(T, S, U, R, received, received)
    if config.record_launches:
        _, P, V = bound_of(SizeBound(T, P, V))
    return Sizes(T, S, U, R, V, P)


def _listed_pairs(config: MoEConfig, T: int, S: int) -> int:
    """Returns the length of a rank's lists of the pairs that it sends."""
    limit = max_rows(config.rounding, T, config.K, config.E, S, training=True)
    if limit is None or is_plain_topk(config.rounding, training=True):
        return T * config.K
    return min(limit, T * config.E)


def saved_bytes(config: MoEConfig, sizes: Sizes, item_bytes: int, kind: TransportKind) -> dict[str, int]:
    """Returns the bytes that a layer saves for backward, the router's aside, by what they are.

    kind: "symmetric" or "all_to_all"; for S = 1 the same.
    """
    T, S, U, R, V, P = sizes
    R = S * T if kind == "symmetric" and S > 1 else R  # a region for all tokens of each source rank
    name, rows = ("received rows", R) if config.save_dispatched else ("x", T)
    found = {
        name: rows * config.d * item_bytes,
        "H": P * columns(config) * item_bytes,
        "lists": 4 * P + 4 * P + 8 * V + 4 * (R + 1) + 4 * (config.E // S + 1),
    }
    if S > 1:
        found["lists"] += 4 * S * T + 4 * S + 4 * S * S if kind == "symmetric" else 8 * U + 4 * (T + 1)
    return found


def router_bytes(config: MoEConfig, T: int, S: int) -> int:
    """Returns the bytes that a router saves on a GPU: logits, the experts of each token, token and expert of a pair."""
    return 4 * T * config.E + 8 * T * config.K + 12 * _listed_pairs(config, T, S)


def router_backward_bytes(config: MoEConfig, T: int) -> int:
    """Returns the bytes that backward of a router takes on a GPU: the gradient of the logits, it and the weight split
    in four bf16 values each, and partial sums of the weight's gradient."""
    return (4 + 8) * T * config.E + (8 + 4 * _PARTIAL_SUMS) * config.d * config.E


def backward_stages(config: MoEConfig, sizes: Sizes, item_bytes: int) -> list[tuple[int, int]]:
    """Returns what the largest stages of a backward take on a GPU: bytes besides what is saved, and of dW1 and dW2.

    The router's are not among them. In a program they exist in all stages, as far as they share an allocation.

    sizes: those allocated. For S > 1 over symmetric memory, with so many tokens that sums are copied.
    """
    hidden, rows = sizes.P * config.n * item_bytes, sizes.P * config.d * item_bytes
    h, sums = sizes.P * columns(config) * item_bytes, sizes.S * sizes.T * config.d * item_bytes
    dw2 = config.E // sizes.S * config.d * config.n * item_bytes
    both = dw2 + config.E // sizes.S * columns(config) * config.d * item_bytes
    if sizes.S == 1:
        return [(h + hidden, 0), (hidden, dw2), (rows + sums, both)]
    dx = sizes.T * config.d * item_bytes
    return [(h + hidden, 0), (hidden + rows + sums, 0), (hidden + sums, dw2), (sums + dx, both)]


def sent_bytes(config: MoEConfig, T: int, layout: Layout, kind: Kind, item_bytes: int) -> dict[str, tuple[int, int]]:
    """Returns the bytes that a rank sends in forward and backward, to ranks of its host and to other hosts, by kind."""
    rows, row_bytes = rows_per_token(config, layout.S, layout.D), config.d * item_bytes
    sent = {
        "pairs": (rows.local_pairs, rows.remote_pairs),
        "two_hop": (rows.ranks * (layout.D - 1) / layout.D, rows.remote_hosts),
    }.get(kind, (rows.local_ranks, rows.remote_ranks))
    dispatches = 2 if config.save_dispatched else 3
    needed = T * layout.D * (layout.num_hosts - 1) if kind == "two_hop" else 0
    pairs = T * rows.local_pairs, T * rows.remote_pairs
    return {
        "lists": (round(8 * pairs[0]), round(8 * pairs[1]) + needed),
        "dispatch": (round(dispatches * T * sent[0] * row_bytes), round(dispatches * T * sent[1] * row_bytes)),
        "combine": (round(2 * T * sent[0] * row_bytes), round(2 * T * sent[1] * row_bytes)),
        "combine_scalars": (round(4 * pairs[0]), round(4 * pairs[1])),
    }


def symmetric_buffers(config: MoEConfig, sizes: Sizes, item_bytes: int) -> int:
    """Returns the bytes of the buffers that all layers of a group share, signals and counts aside."""
    return 3 * sizes.S * sizes.T * config.d * item_bytes + round(20 * LIST_GROWTH * sizes.V)


def expert_parameters(config: MoEConfig, S: int) -> int:
    """Returns the parameters of this rank's experts."""
    J = columns(config)
    biases = J + config.d if config.bias else 0
    return config.E // S * (J * config.d + config.d * config.n + biases)


def columns(config: MoEConfig) -> int:
    """Returns J."""
    return 2 * config.n if activation_named(config.activation).gated else config.n


def check_sizes(config: MoEConfig, options: dict[str, int]) -> None:
    """Raises ValueError for an option below 1, and for "ranks" that do not divide the experts."""
    for name, value in options.items():
        if value < 1:
            raise ValueError(f"--{name} {value} must be at least 1")
    S = options["ranks"]
    if config.E % S:
        raise ValueError(f"E={config.E} experts cannot be divided over {S} ranks; use a divisor of {config.E}")


def print_plan(config: MoEConfig, T: int, S: int, layers: int, dtype: str, memory_gib: float | None) -> None:
    """Prints the plan. Raises ValueError for sizes that cannot be."""
    item_bytes = getattr(torch, dtype).itemsize
    check_sizes(config, {"tokens": T, "ranks": S, "layers": layers})
    sizes = balanced_sizes(config, T, S)
    lines = [f"{config.name}: d={config.d}, n={config.n}, E={config.E}, K={config.K}, {config.activation}; {dtype}"]
    lines += [f"tokens a rank: {T}; ranks: {S}; experts a rank: {config.E // S}; balanced routing", ""]
    lines += [*rounding_lines(config, T, S), ""]
    lines += [line("pairs a rank computes", f"{sizes.P:,}"), line("rows a rank sends", f"{sizes.U:,}")]
    if S > 1:
        sent = sent_bytes(config, T, Layout(S, S), "all_to_all", item_bytes)
        lines += [line(f"to other ranks, {name}", mib(sum(pair))) for name, pair in sent.items()]
    lines += ["", *_memory(config, sizes, item_bytes, layers, memory_gib)]
    sys.stdout.write("\n".join(lines) + "\n")


def rounding_tile(config: MoEConfig, T: int, S: int) -> int | None:
    """Returns t, if a training step of T tokens a rank is rounded; None if it is padded, or plain top-K."""
    rule, pairs = rule_of(config.rounding, S, config.E), S * T * config.K
    if pairs < rule.pads_below:
        return None
    return next((t for least, t in sorted(rule.thresholds, reverse=True) if pairs >= least), rule.t)


def rounding_lines(config: MoEConfig, T: int, S: int) -> list[str]:
    """Returns what a training step of T tokens a rank is rounded to."""
    rounding, t = config.rounding, rounding_tile(config, T, S)
    mean = T * config.K / config.E
    found = [line("tokens of a rank for an expert", f"{mean:,.1f}")]
    if t is None:
        multiple = rule_of(rounding, S, config.E).t
        return [*found, line("rounding", f"none, padded to {multiple}" if multiple > 1 else "none")]
    found.append(line("rounding", f"{rounding.mode}, t={t}, G={rounding.G}"))
    if rounding.mode == "apportion":
        share = predicted_change(mean / 128, t, rounding.G, S)
        found.append(line("assignments changed, predicted", f"{share:.1%}"))
    return found


def memory_parts(
    config: MoEConfig, sizes: Sizes, item_bytes: int, layers: int, kind: TransportKind, saved: dict[str, int]
) -> dict[str, int]:
    """Returns the bytes of all layers of a rank, by what they are. saved: see `saved_bytes`."""
    parameters, allocated = expert_parameters(config, sizes.S), allocated_sizes(config, sizes, kind)
    is_static = config.transport.buffers == "static"
    buffers = symmetric_buffers(config, allocated if is_static else sizes, item_bytes) if kind == "symmetric" else 0
    has_stages = kind == "symmetric" or sizes.S == 1
    stages = backward_stages(config, allocated, item_bytes) if has_stages else []
    in_router = router_backward_bytes(config, sizes.T)
    return {
        "experts, weights and gradients": 2 * item_bytes * parameters * layers,
        "experts, Adam in fp32": _OPTIMIZER_BYTES * parameters * layers,
        "saved for backward": (sum(saved.values()) + router_bytes(config, sizes.T, sizes.S)) * layers,
        "backward of a layer": max((taken + in_router for taken, _ in stages), default=0),
        "buffers over symmetric memory": buffers,
    }


def _memory(config: MoEConfig, sizes: Sizes, item_bytes: int, layers: int, memory_gib: float | None) -> list[str]:
    kind: TransportKind = "symmetric" if sizes.S > 1 else "all_to_all"
    saved = saved_bytes(config, allocated_sizes(config, sizes, kind), item_bytes, kind)
    parts = memory_parts(config, sizes, item_bytes, layers, kind, saved)
    found = [line(f"a layer saves, {name}", mib(value)) for name, value in saved.items()]
    found += [line("a layer saves, router", mib(router_bytes(config, sizes.T, sizes.S))), "", f"layers: {layers}"]
    found += [line(name, mib(value)) for name, value in parts.items() if value]
    total = sum(parts.values())
    found.append(line("in all", mib(total)))
    if memory_gib is not None:
        rest = memory_gib * 2**30 - total
        text = f"{mib(round(rest))} of {memory_gib:g} GiB" if rest >= 0 else f"{mib(round(-rest))} too little"
        found.append(line("left for the rest of the model", text))
    return found


def line(name: str, value: str) -> str:
    """Returns a line of what is printed."""
    return f"  {name:34} {value:>16}"


def mib(num_bytes: int) -> str:
    """Returns the bytes as text, in MiB."""
    return f"{num_bytes / _MIB:,.1f} MiB"
