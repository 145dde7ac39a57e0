"""Ten layers whose results are known to the bit, and what a rank tells of them: digests of all that a step gives.

Only public names of sonic_ep and fields of its configs are used, so that this file outlives what is renamed inside.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import sonic_ep
from sonic_ep import EPGroup, MoE, MoEConfig, MoEOutput

ROOT = Path(__file__).resolve().parents[2]
EP_SIZES = (1, 2, 4)  # the first is 1, on whose rank the probe runs
# K > 2: two terms have the same sum in either order.
SIZES = {"d": 40, "n": 24, "E": 8, "K": 3, "init_std": 0.5}
# Backward uses the rows that forward received. The only place that names the field.
SAVE_DISPATCHED = {"save_dispatched": True}
TILES = {"t": 4, "G": 16}
GLOBAL = {"balance": "global", "balance_coef": 0.3, "z_loss_coef": 0.05}
STATS = (
    *("entropy_T", "token_ids_N", "counts_E", "t", "tokens_without_expert", "changed_share", "capacity_cut_share"),
    *("pad_share", "rank_load_max_over_mean", "expert_load_max_over_mean"),
)


class Case(NamedTuple):
    """A layer and its input. tokens: how many a rank has, see `shape_of`. shift: added to x; far from 0 it makes some
    experts popular."""

    dtype: torch.dtype
    config: dict[str, Any]
    tokens: str = "ragged"
    shift: float = 0.0


CASES = {
    "apportion": Case(
        torch.float32,
        {"bias": True, "shared_n": 20, "shared_gate": True, "router": GLOBAL, "rounding": TILES},
    ),
    "off": Case(
        torch.float64,
        {"activation": "geglu", "router": {"renormalize": False, "linear_bias": True}, "rounding": {"mode": "off"}}
        | SAVE_DISPATCHED,
    ),
    "pad": Case(
        torch.bfloat16,
        {
            "router": {"score": "sigmoid", "num_groups": 4, "groups_per_token": 2, "expert_bias": True},
            "rounding": {"mode": "pad", **TILES},
        },
        "empty",
    ),
    "nearest": Case(
        torch.float32,
        {
            "activation": "swiglu_oai",
            "bias": True,
            "router": {"balance": "batch", "balance_coef": 0.3, "jitter": 0.1},
            "rounding": {"mode": "nearest", **TILES},
        },
    ),
    "up": Case(
        torch.float64,
        {
            "activation": "reglu",
            "router": {**GLOBAL, "linear_dtype": "input", "linear_bias": True},
            "rounding": {"mode": "up", **TILES},
        }
        | SAVE_DISPATCHED,
        "empty",
    ),
    "down": Case(
        torch.bfloat16,
        {
            "activation": "relu2",
            "bias": True,
            "shared_n": 20,
            "router": {"balance": "sequence", "balance_coef": 0.3},
            "rounding": {"mode": "down", **TILES},
        },
        "sequences",
    ),
    "stochastic": Case(
        torch.float32,
        {
            "activation": "gelu",
            "router": {"score": "sigmoid", "scale": 2.5, "expert_bias": True, "expert_bias_rate": 0.2},
            "rounding": {"mode": "stochastic", **TILES},
        }
        | SAVE_DISPATCHED,
    ),
    "apportion, capacity": Case(
        torch.float64,
        {"activation": "silu", "bias": True, "rounding": {"capacity_factor": 1.0, **TILES}},
        shift=2.0,
    ),
    "apportion, auto": Case(
        torch.bfloat16,
        {
            "shared_n": 20,
            "router": {**GLOBAL, "linear_dtype": "input", "jitter": 0.1},
            "rounding": {"t": "auto", "G": 32},
        }
        | SAVE_DISPATCHED,
        "many",
    ),
    "off, capacity": Case(
        torch.float32,
        {"K": 1, "router": {"renormalize": False}, "rounding": {"mode": "off", "capacity_factor": 1.0}}
        | SAVE_DISPATCHED,
        "empty",
        shift=2.0,
    ),
}


def digests(rank: int) -> dict[str, dict[str, str]]:
    """A worker: the digests of every case, by the tensor's name."""
    # Another copy of the package, an installed one say, would be compared with itself.
    assert Path(sonic_ep.__file__).is_relative_to(ROOT), f"{sonic_ep.__file__} is not in {ROOT}"
    return {name: {tensor: digest(values) for tensor, values in results(rank, case)} for name, case in CASES.items()}


def results(rank: int, case: Case) -> Iterator[tuple[str, Tensor | None]]:
    """All that a training step and an evaluation give to this rank."""
    layer, (x, dout) = built(case), inputs(rank, case)
    torch.manual_seed(7 + rank)  # of jitter and stochastic rounding
    output = layer(x)
    ((output.y * dout).sum() + output.aux_loss).backward()
    yield from (("y", output.y), ("aux_loss", output.aux_loss), ("x.grad", x.grad))
    yield from ((f"{name}.grad", parameter.grad) for name, parameter in layer.named_parameters())
    yield from stats_of(output)
    if layer.config.router.expert_bias:
        layer.update_expert_bias()
    yield from layer.named_buffers()
    with torch.no_grad():
        yield "y of eval", layer.eval()(x).y


def stats_of(output: MoEOutput) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"stats.{name}", getattr(output.stats, name)) for name in STATS)
    # By position: the names of these are not public.
    yield from ((f"stats.counts[{place}]", values) for place, values in enumerate(output.stats.counts))


def built(case: Case) -> MoE:
    """The layer. Biases start at zero, which would hide mistakes: they are filled."""
    layer = MoE(MoEConfig.from_dict({**SIZES, **case.config}), EPGroup(), seed=3, dtype=case.dtype)
    with torch.no_grad():
        for values in (*layer.parameters(), *layer.buffers()):
            if not values.any():
                values.copy_(0.3 * torch.randn(values.shape, generator=torch.Generator().manual_seed(9)))
    return layer


def inputs(rank: int, case: Case) -> tuple[Tensor, Tensor]:
    """x and the gradient of the output."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, dout = torch.randn(2, *shape_of(case.tokens, rank), SIZES["d"], generator=generator).to(case.dtype)
    return (x + case.shift).requires_grad_(True), dout


def shape_of(tokens: str, rank: int) -> tuple[int, ...]:
    """(T,) or (B, L) of a rank."""
    if tokens == "sequences":
        return 2 + rank, 13
    return ({"ragged": 37 + 9 * rank, "empty": 0 if rank == 1 else 33 + rank, "many": 350 + rank}[tokens],)


def digest(values: Tensor | None) -> str:
    """16 digits of the SHA-256 of a tensor's dtype, shape and bytes."""
    if values is None:
        return "none"
    content = values.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy()
    return hashlib.sha256(f"{values.dtype} {tuple(values.shape)} ".encode() + content.tobytes()).hexdigest()[:16]


def probe(_: int) -> str:
    """A worker: one digest of plain torch operations. Where it differs, so may the layers, with nothing wrong."""
    parts = [digest(values) for dtype in (torch.float32, torch.float64, torch.bfloat16) for values in plain(dtype)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def plain(dtype: torch.dtype) -> Iterator[Tensor]:
    """Torch's own arithmetic, in the sizes of the layers."""
    generator = torch.Generator().manual_seed(1)
    for T in (1, 4, 13, 37, 64, 351):
        x_TH = torch.randn(T, 40, generator=generator).to(dtype)
        w_JH = torch.randn(48, 40, generator=generator).to(dtype)
        h_TJ = x_TH @ w_JH.T
        yield from (h_TJ, h_TJ.T @ x_TH, h_TJ @ w_JH, x_TH @ w_JH[:8].T)
        for name in ("exp", "sigmoid", "tanh", "erf"):
            yield getattr(torch, name)(x_TH)
        yield from (x_TH.softmax(1), x_TH.logsumexp(1), x_TH.sum(0), x_TH.sum(1), x_TH.sum())
        tokens = torch.randint(0, T, (3 * T,), generator=generator)
        yield torch.zeros_like(x_TH).index_add_(0, tokens, x_TH.repeat(3, 1))
