"""The formulas of this room, written a second time: differentiable, any dtype, dense over experts by one-hot products.

Nothing here comes from sonic_ep.kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

SPLIT_GATE_UP = (torch.bfloat16, torch.float16)


def _gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    # x * sigmoid(a x) is silu(a x) / a.
    return F.silu(1.702 * gate.clamp(max=7.0)) / 1.702 * (1 + up.clamp(min=-7.0, max=7.0))


_OF_GATE_AND_UP: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "swiglu_clamped": lambda gate, up: F.silu(gate.clamp(max=10.0)) * up.clamp(min=-10.0, max=10.0),
    "swiglu_clamped_7": lambda gate, up: F.silu(gate.clamp(max=7.0)) * up.clamp(min=-7.0, max=7.0),
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "geglu_erf": lambda gate, up: F.gelu(gate) * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
    "swiglu_oai": _gpt_oss,
}
_OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda h: F.gelu(h, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda h: F.relu(h).square(),
}
GATED, PLAIN = tuple(_OF_GATE_AND_UP), tuple(_OF_ONE)


def activate(name: str, h: Tensor) -> Tensor:
    """A of H whose last dimension holds gate_0, up_0, gate_1, up_1, ... (if gated)."""
    if name in _OF_ONE:
        return _OF_ONE[name](h)
    gate, up = h.unflatten(-1, (h.shape[-1] // 2, 2)).unbind(-1)
    return _OF_GATE_AND_UP[name](gate, up)


@dataclass(frozen=True)
class Shape:
    """R received rows, hidden size H, expert width I, and how many pairs each expert has."""

    R: int
    H: int
    I: int  # noqa: E741  (the house's name of the expert width)
    counts: tuple[int, ...]

    @property
    def num_pairs(self) -> int:
        return sum(self.counts)

    def __str__(self) -> str:
        return f"R{self.R}-H{self.H}-I{self.I}-e{len(self.counts)}-P{self.num_pairs}"


SHAPES = [
    Shape(63, 128, 64, (16, 3, 40, 0, 1, 33, 20, 13)),
    Shape(9, 7, 5, (0, 4, 0, 11, 1, 0)),
    Shape(20, 6, 3, (0, 0, 20, 0)),  # one expert takes all
    Shape(5, 1, 1, (2, 1)),
    Shape(11, 8, 4, (11,)),  # e = 1
    Shape(1, 4, 2, (3, 2)),  # every pair reads the same row
    Shape(6, 4, 2, (0, 0, 0)),  # P = 0
    Shape(0, 4, 2, (0, 0)),  # R = 0
]


@dataclass(frozen=True)
class Operands:
    """Operands of every operation; rows of a pair buffer stand by expert."""

    x_RH: Tensor
    w1_eJH: Tensor
    b1_eJ: Tensor
    w2_eHI: Tensor
    b2_eH: Tensor
    weights_P: Tensor
    do_RH: Tensor
    h_PJ: Tensor
    a_PI: Tensor
    dh_PJ: Tensor
    row_of_pair_P: Tensor
    expert_starts_e: Tensor

    @classmethod
    def draw(cls, shape: Shape, activation: str, dtype: torch.dtype = torch.float64) -> Self:
        """Values that fit into fp16, H wide enough to pass the clamp of swiglu_oai."""
        generator = torch.Generator().manual_seed(shape.num_pairs)
        R, H, I, P, e = shape.R, shape.H, shape.I, shape.num_pairs, len(shape.counts)  # noqa: E741
        J = 2 * I if activation in GATED else I

        def draw(*sizes: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(sizes, generator=generator, dtype=torch.float64)).to(dtype)

        return cls(
            x_RH=draw(R, H),
            w1_eJH=draw(e, J, H, scale=4 / H**0.5),
            b1_eJ=draw(e, J),
            w2_eHI=draw(e, H, I, scale=1 / I**0.5),
            b2_eH=draw(e, H),
            weights_P=draw(P),
            do_RH=draw(R, H),
            h_PJ=draw(P, J, scale=4),
            a_PI=draw(P, I),
            dh_PJ=draw(P, J),
            row_of_pair_P=torch.randint(max(R, 1), (P,), generator=generator, dtype=torch.int32),
            expert_starts_e=torch.tensor([0, *shape.counts]).cumsum(0).int(),
        )

    def to(self, dtype: torch.dtype) -> Self:
        """The same values in another dtype; index lists stay."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{name: v.to(dtype) if v.is_floating_point() else v for name, v in values.items()})

    @property
    def pair_by_expert(self) -> Tensor:
        """One-hot: the expert of each pair."""
        slots = torch.arange(self.weights_P.shape[0])[:, None]
        starts = self.expert_starts_e
        return ((slots >= starts[:-1]) & (slots < starts[1:])).to(self.x_RH.dtype)

    @property
    def pair_by_row(self) -> Tensor:
        """One-hot: the received row of each pair."""
        return (self.row_of_pair_P[:, None] == torch.arange(self.x_RH.shape[0])).to(self.x_RH.dtype)


def up(o: Operands, *, bias: bool) -> Tensor:
    """H = X[row_of_pair] W1^T + b1."""
    h_PJ = torch.einsum("ph,pe,ejh->pj", o.pair_by_row @ o.x_RH, o.pair_by_expert, o.w1_eJH)
    return h_PJ + o.pair_by_expert @ o.b1_eJ if bias else h_PJ


def down(o: Operands, a_PI: Tensor, *, bias: bool) -> Tensor:
    """Y = A W2^T + b2."""
    y_PH = torch.einsum("pi,pe,ehi->ph", a_PI, o.pair_by_expert, o.w2_eHI)
    return y_PH + o.pair_by_expert @ o.b2_eH if bias else y_PH


def down_backward(o: Operands, activation: str, *, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dH, s A and dS of sum_p <dO[row_of_pair_p], s_p Y_p>, by autograd."""
    h_PJ, s_P = o.h_PJ.clone().requires_grad_(), o.weights_P.clone().requires_grad_()
    a_PI = activate(activation, h_PJ)
    z_PH = s_P[:, None] * down(o, a_PI, bias=bias)
    dh_PJ, ds_P = torch.autograd.grad(z_PH, (h_PJ, s_P), o.pair_by_row @ o.do_RH)
    return dh_PJ, (s_P[:, None] * a_PI).detach(), ds_P


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def assert_rounded_once(
    actual: Tensor, exact: Tensor, name: str = "result", computed: torch.dtype = torch.float64
) -> None:
    """`actual` is `exact` (float64), computed in fp32 at least and rounded once to its dtype.

    computed: torch.float32 if a float64 result depends on operands that were computed in fp32.
    """
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, wanted {tuple(exact.shape)}"
    assert exact.dtype == torch.float64
    noise = (1e-12 if actual.dtype == computed == torch.float64 else 1e-5) * max(1.0, largest(exact))
    half_ulp = 0.5 * torch.finfo(actual.dtype).eps if actual.dtype in SPLIT_GATE_UP else 0.0
    excess = (actual.double() - exact).abs() - half_ulp * exact.abs() - noise
    # Negated, so that NaN fails.
    bad = ~(excess <= 0)
    assert not bad.any(), (
        f"{name} ({actual.dtype}): {int(bad.sum())} of {bad.numel()} values off, by {excess.max():.3g}"
    )


def assert_no_worse_than_low_precision(actual: Tensor, exact32: Tensor, low: Tensor, name: str = "result") -> None:
    """quack's rule: an error below twice that of the plain torch formula in the same dtype, and 1e-5."""
    error, limit = largest(actual.float() - exact32), 2 * largest(low.float() - exact32) + 1e-5
    assert error < limit, f"{name} ({actual.dtype}): error {error:.3g}, limit {limit:.3g}"
