"""A model of a layer's device time: what each stage takes, forward and backward, by transport.

A stage takes a fixed time and a time for each unit of work (time_constants.py, fitted to our records). No record is of
several hosts: what crosses takes its bytes over the rate of the link, which the user gives.

`stages` applies the overlap that dispatch/ has, and nothing more; docs/scaling.md#the-model says what that is for each
transport. "pairs" is an all-to-all with a row for each pair: no transport of ours, to compare with.

Legend: S ranks of the EP group, D ranks of a host, T tokens on this rank, E experts, K experts per token, e local
experts, d hidden size, n expert width, P rows of the pair buffer, J pre-activation columns (2I if gated else I).
"""

from typing import Literal, NamedTuple

from sonic_ep.cli.expected_rows import RowsPerToken, rows_per_token
from sonic_ep.cli.load import BALANCED, Load
from sonic_ep.cli.plan import Kind, Layout, columns, rounding_tile
from sonic_ep.cli.time_constants import CONSTANTS
from sonic_ep.config import MoEConfig
from sonic_ep.kernels.experts.tile_table import EXCHANGE_SHARE
from sonic_ep.routers.rounding import rule_of

Overlap = Literal["nothing", "experts", "experts and hops"]

ITEM_BYTES = 2  # bfloat16 or float16: what the records have
_TILE_ROWS = 128
_MIN_COPY_MB = 16 * 2**20 / 1e6  # dispatch/symmetric.py: tokens of fewer bytes are pushed in backward, not copied
_FORWARD_GEMMS = ("up", "down")


class Stages(NamedTuple):
    """Milliseconds of each stage that others wait for; the sum is the pass. Stages behind others count what is left."""

    forward: dict[str, float]
    backward: dict[str, float]

    @property
    def step_ms(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())


def stages(
    config: MoEConfig,
    T: int,
    layout: Layout,
    kind: Kind,
    *,
    load: Load = BALANCED,
    sustained: bool = True,
    router: bool = True,
    overlap: Overlap = "experts",
) -> Stages:
    """Returns what a layer's stages take on the slowest rank, in milliseconds of device time.

    sustained: layers run back to back, so that clocks fall; False for a device that has rested some milliseconds.
    router: False for experts, dispatch and combine alone.
    overlap: what exchanges over torch.distributed overlap. "nothing": in our records, which are older. "experts": in
    backward. "experts and hops": also one hop of two_hop the other, so that the slower one counts; to compare.
    Raises ValueError if a transport cannot cross hosts.
    """
    if kind == "symmetric" and layout.num_hosts > 1:
        raise ValueError(f"symmetric memory is for one host, not {layout.num_hosts}; take two_hop or all_to_all")
    work = _Work(config, T, layout, rows_per_token(config, layout.S, layout.D), load, sustained)
    forward, backward = _symmetric(work) if kind == "symmetric" else _over_torch_distributed(work, kind, overlap)
    if config.shared_n:
        shared = gemm_times(T, 1, config.d, config.shared_n, 2 * config.shared_n, waste=0)
        forward["shared expert"] = work.gpu(sum(shared[name] for name in _FORWARD_GEMMS))
        backward["shared expert"] = work.gpu(sum(us for name, us in shared.items() if name not in _FORWARD_GEMMS))
    if router:
        forward = {"router": _router_us(config, T, layout), **forward}
        backward["router"] = us("router, backward", (1, 4 * T * config.E * config.d / 1e9))
    return Stages({name: t / 1e3 for name, t in forward.items()}, {name: t / 1e3 for name, t in backward.items()})


def host_ms(kind: Kind) -> float:
    """Returns the milliseconds that the host takes to launch an eager step; it cannot be faster than that."""
    return CONSTANTS["host"].values[0 if kind == "symmetric" else 1] / 1e3


def us(name: str, features: tuple[float, ...]) -> float:
    """Returns the microseconds of `features` units of work, by the constants of `name`."""
    return sum(value * feature for value, feature in zip(CONSTANTS[name].values, features, strict=True))


def sent_features(S: int, sent_mb: float) -> tuple[float, float, float]:
    """Returns the work of a kernel that writes into the other ranks' memory."""
    return 1, sent_mb, sent_mb * S


def gemm_features(P: float, e: int, d: int, n: int, J: int, waste: float) -> dict[str, tuple[float, float]]:
    """Returns GFLOP and MB of each GEMM. waste: rows of an expert's last tile that hold nothing."""
    rows, weights_up, weights_down = P + waste * e, e * J * d, e * n * d
    up, down = 2 * rows * d * J, 2 * rows * d * n
    sizes = {
        "up": (up, P * d + weights_up + P * (J + n)),
        "down": (down, P * n + weights_down + P * d),
        "down_backward": (down, P * d + weights_down + 2 * P * J + P * n),
        "up_backward": (up, P * J + weights_up + P * d),
        "weight_up": (2 * P * d * J, P * J + P * d + weights_up),
        "weight_down": (2 * P * d * n, P * n + P * d + weights_down),
    }
    return {name: (flops / 1e9, values * ITEM_BYTES / 1e6) for name, (flops, values) in sizes.items()}


def gemm_times(P: float, e: int, d: int, n: int, J: int, waste: float) -> dict[str, float]:
    """Returns the microseconds of each GEMM, with clocks as they are back to back."""
    return {name: us(name, features) for name, features in gemm_features(P, e, d, n, J, waste).items()}


def exchange_us(name: str, local_mb: float, remote_mb: float, handled_mb: float, link: float) -> float:
    """Returns the microseconds of an all-to-all of rows. name: in CONSTANTS.

    local_mb, remote_mb: sent to other ranks of this host, and to other hosts, or received from them if that is more.
    handled_mb: rows of the rank's own tokens, which are packed before, or summed after.
    """
    fixed, per_mb, per_mb_handled = CONSTANTS[name].values
    return fixed + max(per_mb * local_mb, 1e3 * remote_mb / link) + per_mb_handled * handled_mb


class _Work(NamedTuple):
    """The work of a rank. Times are microseconds, of the slowest rank."""

    config: MoEConfig
    T: int
    layout: Layout
    rows: RowsPerToken
    load: Load
    sustained: bool

    def mb(self, rows_per_token: float) -> float:
        """Returns the MB of so many rows of each token."""
        return self.T * rows_per_token * self.config.d * ITEM_BYTES / 1e6

    def gpu(self, t: float) -> float:
        return t * self.load.gpu * (1 if self.sustained else CONSTANTS["rested GEMMs"].values[0])

    @property
    def gemms(self) -> dict[str, float]:
        config, S = self.config, self.layout.S
        e = config.E // S
        padding, waste = rows_of_rounding(config, self.T, S)
        P = self.T * config.K * self.load.pairs + padding * e
        times = gemm_times(P, e, config.d, config.n, columns(config), waste)
        return {name: self.gpu(t) for name, t in times.items()}

    @property
    def gather_sum(self) -> float:
        return us("gather_sum", (1, self.mb(self.config.K * self.load.pairs)))


def rows_of_rounding(config: MoEConfig, T: int, S: int) -> tuple[float, float]:
    """Returns, for an expert, the rows of weight zero that rounding adds, and those that its last tile lacks."""
    t = rounding_tile(config, T, S)
    if t is not None:
        return 0, 0
    rule = rule_of(config.rounding, S, config.E)
    return (0, _TILE_ROWS / 2) if rule.t == 1 else (S * rule.t / 2, (_TILE_ROWS - rule.t) / 2)


def _router_us(config: MoEConfig, T: int, layout: Layout) -> float:
    rounded = rounding_tile(config, T, layout.S) is not None
    logits = us("logits", (1, 2 * T * config.E * config.d / 1e9))
    return logits + us("routing" if rounded else "routing, plain top-K", (1, T * config.E / 1e6))


def _symmetric(work: _Work) -> tuple[dict[str, float], dict[str, float]]:
    S, gemms = work.layout.S, work.gemms
    overhead = CONSTANTS["layer"].values
    sent = work.mb(work.rows.local_ranks * work.load.rows)
    pairs = work.mb(work.config.K * work.load.pairs)
    push = us("push", sent_features(S, sent))
    combine = us("combine_push", (*sent_features(S, sent), pairs))
    copy = us("copy", (1, work.mb(S - 1)))
    forward = {"dispatch": push, **{name: gemms[name] for name in _FORWARD_GEMMS}, "combine": combine}
    weights = gemms["weight_up"] + gemms["weight_down"]
    backward = {"dispatch of dO": push, **{name: t for name, t in gemms.items() if name not in _FORWARD_GEMMS}}
    if not work.config.save_dispatched:
        backward["dispatch of x, not hidden"] = max(0, copy - gemms["down_backward"] - gemms["up_backward"])
    if work.mb(1) >= _MIN_COPY_MB:
        backward["sum of dX"] = work.gather_sum + us("gather_sum", (1, work.mb(work.rows.ranks)))
        backward["combine of dX, not hidden"] = max(0, copy - weights)
    else:
        backward["combine of dX"] = combine
    return forward | {"launches": overhead[0]}, backward | {"launches": overhead[1]}


def _over_torch_distributed(work: _Work, kind: Kind, overlap: Overlap) -> tuple[dict[str, float], dict[str, float]]:
    gemms = work.gemms
    dispatches, combines = _two_hops(work) if kind == "two_hop" else _one_hop(work, kind)
    if overlap == "experts and hops":
        dispatches, combines = {"": max(dispatches.values())}, {"": max(combines.values())}
    sums = {} if kind == "pairs" else {"sum of pairs": work.gather_sum}
    forward = {"host waits": CONSTANTS["host waits"].values[0], **_named("dispatch", dispatches)}
    forward |= {name: gemms[name] for name in _FORWARD_GEMMS} | sums | _named("combine", combines)
    backward, saved = _named("dispatch of dO", dispatches), work.config.save_dispatched
    if overlap != "nothing":
        of_x, of_dx = 0.0 if saved else sum(dispatches.values()), sum(combines.values())
        return forward, backward | _behind_experts(gemms, sums, of_x, of_dx)
    if not saved:
        backward |= _named("dispatch of x", dispatches)
    backward |= {name: t for name, t in gemms.items() if name not in _FORWARD_GEMMS}
    return forward, backward | sums | _named("combine of dX", combines)


def _behind_experts(gemms: dict[str, float], sums: dict[str, float], of_x: float, of_dx: float) -> dict[str, float]:
    """Returns the backward of experts that hide the exchanges of x and dX, and what is not hidden of them.

    The exchanges come one after the other, and dW1 needs x. GEMMs are slower for the SMs that they leave.
    """
    slower = EXCHANGE_SHARE / (EXCHANGE_SHARE - 1)
    of_hidden = {name: gemms[name] * (slower if of_x else 1) for name in ("down_backward", "up_backward")}
    backward = of_hidden | sums | {"weight_down": gemms["weight_down"] * slower}
    dx_starts = max(of_x, sum(of_hidden.values()) + sum(sums.values()))
    backward["dispatch of x, not hidden"] = max(0, of_x - sum(backward.values()))
    backward["weight_up"] = gemms["weight_up"] * slower
    backward["combine of dX, not hidden"] = max(0, dx_starts + of_dx - sum(backward.values()))
    return backward


def _named(what: str, hops: dict[str, float]) -> dict[str, float]:
    return {f"{what}{hop}": t for hop, t in hops.items()}


def _one_hop(work: _Work, kind: Kind) -> tuple[dict[str, float], dict[str, float]]:
    rows, load = work.rows, work.load
    if kind == "pairs":
        sent, handled = (rows.local_pairs * load.pairs, rows.remote_pairs * load.pairs), work.config.K
        names, least = ("dispatch of pairs", "combine of pairs"), (0.0, 0.0)
    else:
        sent, handled = (rows.local_ranks * load.rows, rows.remote_ranks * load.rows), rows.ranks
        names, least = ("dispatch", "combine"), CONSTANTS["least exchange"].values
    dispatch, combine = (
        max(lowest, exchange_us(name, work.mb(sent[0]), work.mb(sent[1]), work.mb(handled), work.layout.link))
        for name, lowest in zip(names, least, strict=True)
    )
    return {"": dispatch}, {"": combine}


def _two_hops(work: _Work) -> tuple[dict[str, float], dict[str, float]]:
    """A rank forwards the rows that the ranks of its number sent to its host: as many as it sends by all_to_all.

    Of these, (D - 1) / D go to other ranks.
    """
    rows, load, D = work.rows, work.load, work.layout.D
    remote, local = work.mb(rows.remote_hosts * load.hosts), work.mb(rows.ranks * load.rows * (D - 1) / D)
    hops = []
    for name, least in zip(("dispatch", "combine"), CONSTANTS["least exchange"].values, strict=True):
        across = exchange_us(name, 0, remote, work.mb(rows.hosts), work.layout.link)
        within = exchange_us(name, local, 0, work.mb(rows.ranks), work.layout.link)
        hops.append({" across hosts": max(least, across), " within a host": max(least, within)})
    return hops[0], hops[1]
