"""The config of a MoE layer: sizes, router, rounding and transport. Frozen dataclasses, validated when made.

Nothing here depends on the number of tokens or ranks; `MoE` checks the config against its EP group. `load_config` reads
TOML. Symbols are SonicMoE's (docs/design.md): d hidden size, n expert width, E experts, K experts per token. G
and t are the two row multiples of token rounding.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, TypeVar, get_args

Activation = Literal[
    "swiglu",
    "swiglu_clamped",
    "swiglu_clamped_7",
    "geglu",
    "geglu_erf",
    "reglu",
    "swiglu_oai",
    "gelu",
    "gelu_erf",
    "silu",
    "relu",
    "relu2",
]
ScoreFunction = Literal["softmax", "sigmoid"]
LinearDtype = Literal["float32", "input"]
Balance = Literal["none", "sequence", "batch", "global"]
# Seconds. gloo counts nanoseconds, and milliseconds in 32 bits.
MIN_TIMEOUT, MAX_TIMEOUT = 1e-3, 1e6
TransportKind = Literal["auto", "symmetric", "all_to_all", "two_hop"]
Buffers = Literal["exact", "static"]
Dispatch = Literal["auto", "push", "copy"]
RoundingMode = Literal["apportion", "nearest", "up", "down", "stochastic", "pad", "off"]

_Config = TypeVar("_Config", "MoEConfig", "RouterConfig", "RoundingConfig", "TransportConfig")

MAX_K = 16
MAX_E = 4096
MAX_G = 2**20
MAX_CAPACITY_FACTOR = 10**6
_WIDTH_MULTIPLE = 8  # of widths with batch invariance


def _check_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    limit = f">= {low}" if high is None else f"in {low}..{high}"
    if isinstance(value, bool) or not isinstance(value, int):
        fix = "; use int() to make it one" if hasattr(value, "__index__") and not isinstance(value, bool) else ""
        raise ValueError(f"{name}={value!r} must be an integer {limit}{fix}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={value} must be {limit}")


def _check_non_negative(config: object, prefix: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        # torch multiplies by no integer that is larger than its own.
        limit = 2**63 if isinstance(value, int) else float("inf")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < limit:
            fix = "; write it as a float" if isinstance(value, int) and value >= limit else ""
            raise ValueError(f"{prefix}{name}={value!r} must be a finite number >= 0{fix}")


def _check_flags(config: object, prefix: str, *names: str) -> None:
    for name in names:
        if not isinstance(value := getattr(config, name), bool):
            raise ValueError(f"{prefix}{name}={value!r} must be true or false")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """How logits become top-K and combine weights, and which losses balance the experts.

    score: "softmax" or "sigmoid" of the E logits.
    renormalize: divide a token's K scores by their sum.
    scale: factor of every combine weight (DeepSeek's routed_scaling_factor).
    linear_bias: give the router's linear layer a bias.
    linear_dtype: the arithmetic of that layer. "float32": fp32 at least, for any dtype of x. Unless x is bf16 on a GPU,
        this is a GEMM of torch, which follows torch.set_float32_matmul_precision. "input": the dtype of x, or under
        autocast the dtype to which the layer casts x. This is faster for bf16 x on a GPU, but logits tie more often;
        ties go to the smaller expert id. Scores, weights of pairs and losses are fp32 at least in both cases.
    num_groups, groups_per_token: group-limited routing. A token's experts come from its best `groups_per_token` of
        `num_groups` groups. The score of a group is the sum of its two best experts (DeepSeek-V3, arXiv 2412.19437,
        2.1.2).
    hosts_per_token: the most hosts on which plain top-K may give a token experts (node-limited routing, ibid.). It
        changes no choice: a layer raises an error when it is built if the group limits do not see to that on the hosts
        of its EP group. None: any number.
    expert_bias: auxiliary-loss-free balancing (arXiv 2408.15664): a bias per expert, added to its scores when pairs are
        selected. Combine weights do not include it.
    expert_bias_rate: how much `MoE.update_expert_bias` changes the bias of an expert. Its tokens count in
        training steps, in the backward of the layer's output: once, whatever checkpoint recomputes the layer.
    balance, balance_coef: load-balancing loss, over each "sequence", each rank's "batch", or the whole EP group
        ("global"). It counts the K experts of highest score, without expert bias and group limits.
    z_loss_coef: weight of the loss mean(logsumexp(logits)^2) (ST-MoE, arXiv 2202.08906).
    jitter: in training, multiply the router's input by noise uniform(1 - jitter, 1 + jitter) (Switch, arXiv
        2101.03961).
    check_logits: count NaN and inf logits in every step, and raise on all ranks if there are any. The host then waits
        for the device.
    """

    score: ScoreFunction = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    linear_bias: bool = False
    linear_dtype: LinearDtype = "float32"
    num_groups: int = 1
    groups_per_token: int = 1
    hosts_per_token: int | None = None
    expert_bias: bool = False
    expert_bias_rate: float = 0.001
    balance: Balance = "none"
    balance_coef: float = 0.0
    z_loss_coef: float = 0.0
    jitter: float = 0.0
    check_logits: bool = False

    def __post_init__(self) -> None:
        _check_one_of("router.score", self.score, get_args(ScoreFunction))
        _check_one_of("router.linear_dtype", self.linear_dtype, get_args(LinearDtype))
        _check_one_of("router.balance", self.balance, get_args(Balance))
        _check_flags(self, "router.", "renormalize", "linear_bias", "expert_bias", "check_logits")
        _check_non_negative(self, "router.", "scale", "expert_bias_rate", "balance_coef", "z_loss_coef", "jitter")
        _check_int("router.num_groups", self.num_groups, 1)
        _check_int("router.groups_per_token", self.groups_per_token, 1, self.num_groups)
        if self.hosts_per_token is not None:
            _check_int("router.hosts_per_token", self.hosts_per_token, 1)
        if self.jitter >= 1:
            raise ValueError(
                f"router.jitter={self.jitter} must be below 1: the noise is uniform(1 - jitter, 1 + jitter)"
            )
        if (self.balance == "none") != (self.balance_coef == 0):
            raise ValueError(
                f"router.balance={self.balance!r} with router.balance_coef={self.balance_coef}: "
                "set both for a load-balancing loss, or neither"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundingConfig:
    """How the counts of each (rank, expert) are rounded before dispatch, in training (docs/token_rounding.md).

    mode: the rounding method.
    G: with mode "apportion", an expert's total over the EP group is a multiple of G rows. A multiple of t.
    t: every chunk, the rows of one (source rank, expert), is a multiple of t rows. "auto", with mode "apportion": the
        largest of 128, 64, 32, 16 that divides G and changes at most 6.6 % of the pairs, by prediction; if none does,
        plain top-K with padding rows to the smallest of them. "auto" with mode "pad": the smallest that divides G; with
        the other modes: G.
    capacity_factor: the most rows that any rank receives, as a multiple of the mean number of pairs per rank; one unit
        of G or t rows is always allowed. A rank above it loses rows of its largest experts, and of an expert the pairs
        of lowest score. None: no limit.
    """

    mode: RoundingMode = "apportion"
    t: int | Literal["auto"] = "auto"
    G: int = 128
    capacity_factor: float | None = None

    @property
    def draws_numbers(self) -> bool:
        """True if rounding in training depends on random numbers, so that a layer runs its code."""
        return self.mode == "stochastic"

    def __post_init__(self) -> None:
        _check_one_of("rounding.mode", self.mode, get_args(RoundingMode))
        _check_int("rounding.G", self.G, 1, MAX_G)
        if not (isinstance(self.t, str) and self.t == "auto"):
            _check_int("rounding.t", self.t, 1, self.G)
            if self.G % self.t:
                raise ValueError(f"rounding.G={self.G} must be a multiple of rounding.t={self.t}")
        if self.capacity_factor is not None:
            _check_non_negative(self, "rounding.", "capacity_factor")
            if self.capacity_factor < 1:
                raise ValueError(
                    f"rounding.capacity_factor={self.capacity_factor} must be >= 1: below it even perfectly "
                    "balanced routing would lose tokens"
                )
            if self.capacity_factor > MAX_CAPACITY_FACTOR:
                raise ValueError(
                    f"rounding.capacity_factor={self.capacity_factor} exceeds {MAX_CAPACITY_FACTOR}; leave it out for "
                    "no limit"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class TransportConfig:
    """How rows are sent between ranks (docs/transports.md). With one rank, nothing is sent.

    kind: "symmetric" writes into the other GPUs' memory over NVLink. "all_to_all" uses torch.distributed. "two_hop"
        does between hosts, and sends a row once to each host that needs it instead of once to each rank. "auto" uses
        "symmetric" if every rank can write to every other, "two_hop" if the ranks are on several hosts with several
        ranks each, else "all_to_all", and logs which.
    buffers: "exact": the host reads the sizes once per forward. "static": the host reads no sizes in training, so a
        CUDA graph can be captured. This needs rounding.capacity_factor, and the same number of tokens on every rank and
        in every training step.
    dispatch: for "symmetric" only. "push": a kernel sends each row to the ranks that need it. "copy": copy engines send
        every row to every rank, while SMs compute. "auto": copies where the rows are needed later, that is for x and dX
        in backward, and pushes elsewhere.
    timeout: seconds to wait for a rank that does not come, before every other rank raises an error that names it; 0.001
        to 1e6, which is eleven days.
    ranks_per_host: for "auto" and "two_hop". Take every so many consecutive ranks of the EP group for a host. None: the
        ranks tell each other where they are.
    batch_invariant: send one row back for each pair, and add them on the token's rank; see MoEConfig, which sets it.
        Not for "symmetric", which adds a rank's pairs there; "auto" then chooses between the other two.
    """

    kind: TransportKind = "auto"
    buffers: Buffers = "exact"
    dispatch: Dispatch = "auto"
    timeout: float = 600.0
    ranks_per_host: int | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        _check_flags(self, "transport.", "batch_invariant")
        _check_one_of("transport.kind", self.kind, get_args(TransportKind))
        _check_one_of("transport.buffers", self.buffers, get_args(Buffers))
        _check_one_of("transport.dispatch", self.dispatch, get_args(Dispatch))
        _check_non_negative(self, "transport.", "timeout")
        if not MIN_TIMEOUT <= self.timeout <= MAX_TIMEOUT:
            raise ValueError(
                f"transport.timeout={self.timeout:g} must be within {MIN_TIMEOUT:g} and {MAX_TIMEOUT:g} seconds: "
                f"{'shorter, it' if self.timeout < 1 else 'longer, gloo overflows and'} gives up on every rank; set it "
                "to 600, say"
            )
        if self.ranks_per_host is not None:
            _check_int("transport.ranks_per_host", self.ranks_per_host, 1)
            if self.kind not in ("auto", "two_hop"):
                raise ValueError(
                    f"transport.ranks_per_host={self.ranks_per_host} has no effect on transport.kind={self.kind!r}; "
                    "set transport.kind='two_hop', or leave it out"
                )
        if self.batch_invariant and (self.kind == "symmetric" or (self.buffers, self.dispatch) != ("exact", "auto")):
            raise ValueError(
                f"batch_invariant=True with transport.kind={self.kind!r}, transport.buffers={self.buffers!r} and "
                f"transport.dispatch={self.dispatch!r}: over symmetric memory a rank adds its experts' results "
                "before it sends them, so that bits depend on ep_size; set kind='auto', buffers='exact' and "
                "dispatch='auto'"
            )
        if self.kind in ("all_to_all", "two_hop"):
            for name, value, other in (("buffers", self.buffers, "exact"), ("dispatch", self.dispatch, "auto")):
                if value != other:
                    raise ValueError(
                        f"transport.{name}={value!r} is the symmetric transport's; set transport.kind='symmetric', or "
                        f"{name}={other!r}"
                    )

    def check_rounding(self, rounding: RoundingConfig | None) -> None:
        """Raises ValueError for rounding that this transport excludes. rounding: None for no rounding.

        Static buffers need a capacity_factor; batch invariance needs every token's own top-K.
        """
        if self.batch_invariant and rounding is not None and (rounding.mode, rounding.capacity_factor) != ("off", None):
            raise ValueError(
                f"batch_invariant=True with rounding.mode={rounding.mode!r} and rounding.capacity_factor="
                f"{rounding.capacity_factor}: they change a token's experts by the rest of the batch; set mode='off' "
                "and capacity_factor=None"
            )
        if self.buffers == "static" and (rounding is None or rounding.capacity_factor is None):
            raise ValueError("transport.buffers='static' needs a bound: set rounding.capacity_factor (1.25, say)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """The config of one MoE layer.

    d: hidden size.
    n: intermediate size of one expert.
    E: experts over all ranks.
    K: experts per token.
    name: a label. `load_config` takes the file's name, unless the file sets one.
    activation: gated are swiglu, swiglu_clamped (DeepSeek-V4: gate at most 10, up within -10 and 10), swiglu_clamped_7
        (Step-3.5: 7 instead), geglu (tanh approximation of GELU), geglu_erf (exact GELU), reglu and swiglu_oai
        (gpt-oss: clamped, alpha 1.702). Not gated are gelu (tanh approximation: torch's approximate="tanh",
        transformers' gelu_pytorch_tanh), gelu_erf (exact: torch's F.gelu, transformers' gelu), silu, relu and relu2.
    bias: give both projections of every expert, and of the shared expert, a bias.
    shared_n: intermediate size of a shared expert, which computes on every token; 0 for none.
    shared_gate: multiply the shared expert's output by sigmoid(x @ gate).
    init_std: standard deviation of the initial weights.
    save_dispatched: save the R received rows for backward, instead of dispatching x a second time. With bf16 this takes
        2*R*d bytes more.
    record_launches: on GPUs, run steps as programs, with little host time, where possible (docs/how_a_step_runs.md).
        False: always run the layer's code.
    batch_invariant: a token's output and input gradient have the same bits whatever else is in the batch, at every
        ep_size (docs/batch_invariance.md). Gradients of weights are sums over the batch and depend on it.
    router, rounding, transport: see RouterConfig, RoundingConfig and TransportConfig.

    Raises ValueError for any value outside its limits.
    """

    d: int
    n: int
    E: int
    K: int
    name: str = ""
    activation: Activation = "swiglu"
    bias: bool = False
    shared_n: int = 0
    shared_gate: bool = False
    init_std: float = 0.02
    save_dispatched: bool = False
    record_launches: bool = True
    batch_invariant: bool = False
    router: RouterConfig = field(default_factory=RouterConfig)
    rounding: RoundingConfig = field(default_factory=RoundingConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)

    def __post_init__(self) -> None:
        _check_int("d", self.d, 1)
        _check_int("n", self.n, 1)
        _check_int("E", self.E, 1, MAX_E)
        _check_int("K", self.K, 1, MAX_K)
        _check_int("shared_n", self.shared_n, 0)
        if not isinstance(self.name, str):
            raise ValueError(f"name={self.name!r} must be a string")
        _check_one_of("activation", self.activation, get_args(Activation))
        for part, kind in _PARTS.items():
            if not isinstance(value := getattr(self, part), kind):
                raise ValueError(f"{part}={value!r} must be a {kind.__name__}; MoEConfig.from_dict takes nested dicts")
        _check_flags(self, "", "bias", "shared_gate", "save_dispatched", "record_launches", "batch_invariant")
        _check_non_negative(self, "", "init_std")
        if self.K > self.E:
            raise ValueError(
                f"K={self.K} experts per token exceed the E={self.E} experts there are; lower K or raise E"
            )
        if self.K == 1 < self.E and self.router.renormalize:
            raise ValueError(
                "K=1 with router.renormalize=True gives every pair the weight 1, from which a router learns nothing; "
                "set router.renormalize=False"
            )
        if self.shared_gate and not self.shared_n:
            raise ValueError("shared_gate=True needs a shared expert: set shared_n to its width")
        transport = dataclasses.replace(self.transport, batch_invariant=self.batch_invariant)
        object.__setattr__(self, "transport", transport)
        self.transport.check_rounding(self.rounding)
        self._check_invariance()
        self._check_groups()

    def _check_invariance(self) -> None:
        if not self.batch_invariant:
            return
        for name, width in (("d", self.d), ("n", self.n), ("shared_n", self.shared_n)):
            if width % _WIDTH_MULTIPLE:
                raise ValueError(f"batch_invariant=True wants {name}={width} to be a multiple of {_WIDTH_MULTIPLE}")
        for name, why in (
            ("jitter", "draws a token's noise by its place"),
            ("balance_coef", "has a gradient that depends on the batch"),
            ("z_loss_coef", "has a gradient that depends on the batch"),
        ):
            if (value := getattr(self.router, name)) != 0:
                raise ValueError(f"batch_invariant=True with router.{name}={value}, which {why}; set it to 0")

    def _check_groups(self) -> None:
        groups, per_token = self.router.num_groups, self.router.groups_per_token
        if self.E % groups:
            raise ValueError(f"E={self.E} experts do not divide into router.num_groups={groups} equal groups")
        if groups > 1 and self.E // groups < 2:
            raise ValueError(
                f"router.num_groups={groups} leaves {self.E // groups} expert a group; at least 2 are needed"
            )
        reachable = self.E // groups * per_token
        if self.K > reachable:
            raise ValueError(
                f"K={self.K} exceeds the {reachable} experts in router.groups_per_token={per_token} groups of "
                f"{self.E // groups}; raise groups_per_token or lower K"
            )

    def problem_with_hosts(self, num_hosts: int) -> str | None:
        """Returns why a token's experts may be on more than router.hosts_per_token of the hosts, or None.

        Hosts have equal numbers of consecutive experts. Groups of experts lie on one host each if their number is a
        multiple of the number of hosts, and else on as many as a group has.
        """
        router, limit = self.router, self.router.hosts_per_token
        most, groups, per_token = min(num_hosts, self.K), router.num_groups, router.groups_per_token
        if limit is None or most <= limit:
            return None
        set_to = f"router.hosts_per_token={limit} on {num_hosts} hosts"
        if groups % num_hosts and num_hosts % groups:
            return (
                f"{set_to}: router.num_groups={groups} groups do not lie on whole hosts; set num_groups to a multiple "
                f"of {num_hosts}, or use as many hosts as divide {groups}"
            )
        reached = min(most, per_token * max(1, num_hosts // groups))
        if reached <= limit:
            return None
        return (
            f"{set_to}: router.groups_per_token={per_token} of num_groups={groups} reach {reached} hosts; set "
            f"num_groups to a multiple of {num_hosts} and groups_per_token to {limit} at most, or raise hosts_per_token"
        )

    def replace(self, **changes: object) -> Self:
        """Returns a copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, object]:
        """Returns a nested dict that JSON can write. `from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        """Returns the config of a nested dict. Raises ValueError for another value, and unknown or missing keys."""
        if not isinstance(values, dict):
            raise ValueError(f"config={values!r} must be a dict of MoEConfig's fields, as to_dict returns")
        parts = {part: _build(kind, values.get(part, {}), f"{part}.") for part, kind in _PARTS.items()}
        return _build(cls, {**values, **parts}, "")


_PARTS = {"router": RouterConfig, "rounding": RoundingConfig, "transport": TransportConfig}


def _build(cls: type[_Config], values: object, prefix: str) -> _Config:
    if not isinstance(values, dict):
        raise ValueError(f"{prefix.removesuffix('.')}={values!r} must be a table of {cls.__name__}'s fields")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            hint = f"; did you mean {prefix}{close[0]}?" if close else f"; known keys: {', '.join(fields)}"
            raise ValueError(f"unknown config key {prefix}{key}{hint}")
    required = {
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - set(values)):
        raise ValueError(
            f"config lacks {', '.join(prefix + name for name in missing)}, which have no default; give them, in TOML "
            "under [moe]"
        )
    return cls(**values)


def load_config(name_or_path: str | Path) -> MoEConfig:
    """Returns the MoEConfig of a TOML file, or of a shape in the package by its name ("tiny", "qwen3_30b_a3b", ...).

    Tables: [moe] holds the scalar fields of MoEConfig; [router], [rounding] and [transport] hold the fields of the
    configs of these names. Raises FileNotFoundError, which lists the known names; ValueError for a file that is no
    TOML, unknown keys, and values outside their limits.
    """
    path = Path(name_or_path)
    shipped = Path(__file__).resolve().parent / "configs"
    if path.suffix != ".toml":
        path = shipped / f"{name_or_path}.toml"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in shipped.glob("*.toml")))
        raise FileNotFoundError(f"no config {str(name_or_path)!r}: give a path that ends in .toml or one of {names}")
    try:
        return _config_in(path)
    except RecursionError:
        raise ValueError(f"{path} nests tables or lists too deeply; the fields of a config are plain values") from None


def _config_in(path: Path) -> MoEConfig:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None
    for table in tables:
        if table not in ("moe", *_PARTS):
            known = ", ".join(f"[{name}]" for name in ("moe", *_PARTS))
            raise ValueError(f"unknown table [{table}] in {path}; known tables: {known}")
        if not isinstance(tables[table], dict):
            raise ValueError(f"{table}={tables[table]!r} in {path} must be a table [{table}]")
    moe = {"name": path.stem, **tables.get("moe", {})}
    return MoEConfig.from_dict({**moe, **{part: tables.get(part, {}) for part in _PARTS}})
