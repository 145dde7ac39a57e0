"""`sonic-ep plan --hosts`: modelled times of a layer by transport on several hosts, its bytes and memory; the fastest.

Times are by time_model.py, on the slowest rank of a skewed routing (load.py). A stage's time is the time that others
wait for. Bytes and memory are for uniform routing.

Legend: S ranks of the EP group, D ranks of a host, T tokens on this rank, K experts per token, U rows this rank sends,
X rows this rank sends in hop 1.
"""

import json
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sonic_ep.cli.expected_rows import RowsPerToken, expected_parts, rows_per_token
from sonic_ep.cli.load import BALANCED, DrawnRoutes, Load, slowest_gpu
from sonic_ep.cli.plan import (
    Kind,
    Layout,
    allocated_sizes,
    balanced_sizes,
    check_sizes,
    line,
    memory_parts,
    mib,
    rounding_lines,
    rounding_tile,
    saved_bytes,
    sent_bytes,
)
from sonic_ep.cli.time_constants import CONSTANTS
from sonic_ep.cli.time_model import ITEM_BYTES, host_ms, stages
from sonic_ep.config import MoEConfig, TransportKind
from sonic_ep.dispatch.host_memory import ROW_GROWTH

_COLUMN = 12
_ORDER = (
    *("router", "host waits", "dispatch of dO", "dispatch of x", "dispatch", "shared expert", "down_backward"),
    *("up_backward", "up", "down", "sum", "weight_up", "weight_down", "combine", "launches"),
)
_MAX_GPUS = 2**20  # whose times are drawn
_WORTH = 0.99  # of the time: more memory is taken for less than this


@dataclass(frozen=True, slots=True)
class Cluster:
    """hosts x gpus_per_host GPUs, in EP groups of `ranks` consecutive ones. link: GB/s of a GPU to other hosts."""

    hosts: int
    gpus_per_host: int
    ranks: int
    link: float

    @property
    def num_gpus(self) -> int:
        return self.hosts * self.gpus_per_host

    @property
    def layout(self) -> Layout:
        return Layout(self.ranks, min(self.ranks, self.gpus_per_host), self.link)

    def check(self, config: MoEConfig) -> None:
        """Raises ValueError for a cluster that cannot be, with the option to change."""
        counts = {"hosts": self.hosts, "gpus-per-host": self.gpus_per_host, "ranks": self.ranks}
        check_sizes(config, counts)
        if self.num_gpus > _MAX_GPUS:
            raise ValueError(f"--hosts {self.hosts} of {self.gpus_per_host} GPUs: more than {_MAX_GPUS:,}; use fewer")
        if self.ranks == 1:
            raise ValueError("--ranks 1: a rank alone sends nothing; leave out --hosts")
        larger, smaller = sorted((self.ranks, self.gpus_per_host), reverse=True)
        if larger % smaller or self.num_gpus % self.ranks:
            raise ValueError(
                f"--ranks {self.ranks} does not fit {self.hosts} hosts of {self.gpus_per_host} GPUs: give a divisor of "
                f"{self.num_gpus} that divides {self.gpus_per_host} or that it divides"
            )
        if self.layout.num_hosts > 1 and self.link == float("inf"):
            raise ValueError("--link is missing: give the GB/s that a GPU sends to other hosts, some 45 at 400 Gb/s")


class Option(NamedTuple):
    """A transport with or without save_dispatched. Keys are as in the JSON, values of a layer.

    step_ms: of the device, or the host if that takes longer. balanced_step_ms: the same for balanced routing.
    sent_bytes: to ranks of this host and to other hosts, by kind. memory_bytes: of all layers of a rank, by what it is.
    """

    transport: Kind
    save_dispatched: bool
    forward_ms: dict[str, float]
    backward_ms: dict[str, float]
    device_ms: float
    host_ms: float
    step_ms: float
    balanced_step_ms: float
    sent_bytes: dict[str, tuple[int, int]]
    memory_bytes: dict[str, int]

    @property
    def memory(self) -> int:
        return sum(self.memory_bytes.values())


def transports_on(layout: Layout) -> tuple[Kind, ...]:
    """Returns the transports that these ranks can have, and "pairs"."""
    if layout.num_hosts == 1:
        return "symmetric", "all_to_all", "pairs"
    return ("all_to_all", "pairs") if layout.D == 1 else ("two_hop", "all_to_all", "pairs")


def load_of(config: MoEConfig, T: int, cluster: Cluster, skew: float) -> Load:
    """Returns the load of the slowest rank of an EP group, and of the slowest GPU of all."""
    gpu = slowest_gpu(cluster.num_gpus, CONSTANTS["GPU"].values[0])
    return DrawnRoutes(config, T * cluster.ranks, skew).load(cluster.ranks, cluster.layout.D, gpu)


def memory_of(config: MoEConfig, T: int, layout: Layout, kind: Kind, layers: int) -> dict[str, int]:
    """Returns the bytes of all layers of a rank, by what they are."""
    sizes = balanced_sizes(config, T, layout.S)
    saved_as: TransportKind = "symmetric" if kind == "symmetric" else "all_to_all"
    saved = saved_bytes(config, allocated_sizes(config, sizes, saved_as), ITEM_BYTES, saved_as)
    if kind == "two_hop":
        # As many rows are received in hop 1; hop 2 forwards as many as all_to_all sends.
        X = round(T * expected_parts(config, layout.num_hosts))
        saved["lists"] += 8 * X + 4 * (X + 1)
    parts = memory_parts(config, sizes, ITEM_BYTES, layers, saved_as, saved)
    if kind == "two_hop":
        parts["buffers over symmetric memory"] = _buffers_of_hop_2(config, T, layout)
    return parts


def _buffers_of_hop_2(config: MoEConfig, T: int, layout: Layout) -> int:
    """Returns the bytes of a buffer for dispatches and one for combines, by the formula in dispatch/host_memory.py."""
    rows = layout.num_hosts * min(T, -(-T * config.K // layout.S))  # that a rank forwards to another, at most
    return 2 * layout.D * round(ROW_GROWTH * rows) * config.d * ITEM_BYTES


def options_of(config: MoEConfig, T: int, cluster: Cluster, load: Load, layers: int = 1) -> list[Option]:
    """Returns every transport of these ranks with and without save_dispatched."""
    layout, found = cluster.layout, []
    for kind in transports_on(layout):
        for saves in (False, True):
            each = config.replace(save_dispatched=saves)
            modelled, even = (stages(each, T, layout, kind, load=of) for of in (load, BALANCED))
            host = host_ms(kind)
            found.append(
                Option(
                    transport=kind,
                    save_dispatched=saves,
                    forward_ms=modelled.forward,
                    backward_ms=modelled.backward,
                    device_ms=modelled.step_ms,
                    host_ms=host,
                    step_ms=max(modelled.step_ms, host),
                    balanced_step_ms=max(even.step_ms, host),
                    sent_bytes=sent_bytes(each, T, layout, kind, ITEM_BYTES),
                    memory_bytes=memory_of(each, T, layout, kind, layers),
                )
            )
    return found


def best_of(options: list[Option], memory_gib: float | None) -> Option | None:
    """Returns the fastest option that fits, or one of less memory that is within a percent of it. None if none fits."""
    real = [each for each in options if each.transport != "pairs"]
    fits = [each for each in real if memory_gib is None or each.memory <= memory_gib * 2**30]
    least = min((each.step_ms for each in fits), default=0)
    fast = [each for each in fits if each.step_ms * _WORTH <= least]
    return min(fast, key=lambda each: (each.memory, each.step_ms), default=None)


def print_hosts_plan(
    config: MoEConfig,
    T: int,
    cluster: Cluster,
    layers: int,
    dtype: str,
    memory_gib: float | None,
    skew: float,
    *,
    as_json: bool,
) -> None:
    """Prints the plan. Raises ValueError for sizes that cannot be."""
    if getattr(torch, dtype).itemsize != ITEM_BYTES:
        raise ValueError(
            f"--dtype {dtype}: times are known for bfloat16 and float16; leave out --hosts for memory alone"
        )
    cluster.check(config)
    check_sizes(config, {"tokens": T, "layers": layers, "ranks": cluster.ranks})
    layout, load = cluster.layout, load_of(config, T, cluster, skew)
    rows, tile = rows_per_token(config, layout.S, layout.D), rounding_tile(config, T, layout.S)
    options = options_of(config, T, cluster, load, layers=layers)
    best = best_of(options, memory_gib)
    if not as_json:
        lines = _head(config, T, cluster, dtype, rows, load)
        lines += _table([option for option in options if option.save_dispatched == config.save_dispatched])
        lines += ["", f"memory, layers: {layers}", *_memory_lines(options), "", _verdict(best, tile)]
        sys.stdout.write("\n".join(lines) + "\n")
        return
    plan = {
        "config": config.name,
        "tokens": T,
        "hosts": cluster.hosts,
        "gpus_per_host": cluster.gpus_per_host,
        "ranks": cluster.ranks,
        "link_gb_s": cluster.link if layout.num_hosts > 1 else None,
        "layers": layers,
        "skew": skew,
        "load": load._asdict(),
        "rows_per_token": rows._asdict(),
        "rounding": {"mode": config.rounding.mode, "t": tile},
        "options": [option._asdict() for option in options],
        "best": best and {"transport": best.transport, "save_dispatched": best.save_dispatched},
    }
    sys.stdout.write(json.dumps(plan, indent=1) + "\n")


def _head(config: MoEConfig, T: int, cluster: Cluster, dtype: str, rows: RowsPerToken, load: Load) -> list[str]:
    layout, where = cluster.layout, f"{cluster.hosts} hosts of {cluster.gpus_per_host} GPUs"
    lines = [f"{config.name}: d={config.d}, n={config.n}, E={config.E}, K={config.K}, {config.activation}; {dtype}"]
    lines += [f"tokens a rank: {T}; {where}; EP groups of {layout.S} ranks on {layout.num_hosts} hosts"]
    if layout.num_hosts > 1:
        lines.append(f"between hosts: {cluster.link:g} GB/s a GPU")
    lines += ["", *rounding_lines(config, T, layout.S), ""]
    return [
        *lines,
        line("rows a token sends to its host's ranks", f"{rows.local_ranks:.2f}"),
        line("to ranks of other hosts", f"{rows.remote_ranks:.2f}"),
        line("to other hosts, once each", f"{rows.remote_hosts:.2f}"),
        line("busiest rank's pairs over the mean", f"{load.pairs:.2f}"),
        line("slowest GPU's time over the mean", f"{load.gpu:.2f}"),
    ]


def _stages(way: str, times: list[dict[str, float]]) -> list[str]:
    found = [_row(way, [f"{sum(each.values()):.3f}" for each in times])]
    for name in sorted({name for each in times for name in each}, key=_place):
        if any(each.get(name) for each in times):
            found.append(_row(f"  {name}", [f"{each[name]:.3f}" if name in each else "" for each in times]))
    return found


def _place(stage: str) -> tuple[int, str]:
    return next(place for place, name in enumerate(_ORDER) if stage.startswith(name)), stage


def _table(shown: list[Option]) -> list[str]:
    found = ["", "modelled, ms a layer", _row("", [option.transport for option in shown])]
    found += _stages("forward", [option.forward_ms for option in shown])
    found += _stages("backward", [option.backward_ms for option in shown])
    found += [_row("step on the device", [f"{option.device_ms:.3f}" for option in shown])]
    found += [_row("launches of an eager step", [f"{option.host_ms:.3f}" for option in shown])]
    found += [_row("step, the slower of the two", [f"{option.step_ms:.3f}" for option in shown])]
    found += [_row("the same, balanced routing", [f"{option.balanced_step_ms:.3f}" for option in shown])]
    for number, name in enumerate(("sent within the host, MiB", "sent to other hosts, MiB")):
        totals = (sum(pair[number] for pair in option.sent_bytes.values()) for option in shown)
        found.append(_row(name, [f"{total / 2**20:,.1f}" for total in totals]))
    return found


def _memory_lines(options: list[Option]) -> list[str]:
    return [
        line(option.transport + (", save_dispatched" if option.save_dispatched else ""), mib(option.memory))
        for option in options
        if option.transport != "pairs"
    ]


def _verdict(best: Option | None, tile: int | None) -> str:
    if best is None:
        return "no transport fits the memory"
    rounding = "no rounding" if tile is None else f"t={tile}"
    return f"best: {best.transport}, save_dispatched={best.save_dispatched}, {rounding}"


def _row(name: str, cells: list[str]) -> str:
    return f"  {name:34}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)
