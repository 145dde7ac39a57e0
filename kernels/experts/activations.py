"""Activations of the expert MLP: one object each, with its value and derivative.

Gated activations read interleaved columns: gate is H[:, 2i] and up is H[:, 2i + 1]. In a GEMM epilogue one thread then
holds both. `interleave` and `concatenate` convert weights and biases from and to [gate; up].

Legend: P rows of the pair buffer, J pre-activation columns (2I if gated else I), I expert width.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

_GPT_OSS_ALPHA = 1.702
_GPT_OSS_LIMIT = 7.0
_SWIGLU_LIMIT = 10.0  # of DeepSeek-V4's experts, and of most others that clamp SwiGLU
_SWIGLU_LIMIT_7 = 7.0  # of the last layers of Step-3.5


class Activation(ABC):
    """An elementwise activation (P, J) -> (P, I), computed in the dtype of its input. I is J / 2 if `gated`, else J."""

    gated: bool = False
    name: str

    @abstractmethod
    def forward(self, h_PJ: Tensor) -> Tensor:
        """Returns A = act(H)."""

    @abstractmethod
    def backward(self, da_PI: Tensor, h_PJ: Tensor) -> Tensor:
        """Returns dH (P, J), given dA (P, I) and H (P, J)."""


def _silu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    s = x.sigmoid()
    return x * s, s * (1 + x * (1 - s))


def _gelu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """The tanh approximation of GELU, as in the GPU kernels (Hendrycks and Gimpel, arXiv 1606.08415, section 2)."""
    c = (2 / torch.pi) ** 0.5
    t = torch.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)


def _gelu_erf_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    """GELU itself, x Phi(x), with Phi and phi the standard normal distribution and its density (F.gelu's default)."""
    cdf = 0.5 * (1 + torch.erf(x * 0.5**0.5))
    density = torch.exp(-0.5 * x * x) / (2 * torch.pi) ** 0.5
    return x * cdf, cdf + x * density


def _relu_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    return F.relu(x), (x > 0).to(x.dtype)


def _relu2_and_slope(x: Tensor) -> tuple[Tensor, Tensor]:
    r = F.relu(x)
    return r * r, 2 * r


_CURVES = {
    "swiglu": _silu_and_slope,
    "geglu": _gelu_and_slope,
    "geglu_erf": _gelu_erf_and_slope,
    "reglu": _relu_and_slope,
    "silu": _silu_and_slope,
    "gelu": _gelu_and_slope,
    "gelu_erf": _gelu_erf_and_slope,
    "relu": _relu_and_slope,
    "relu2": _relu2_and_slope,
}


@final
class Plain(Activation):
    """A = f(H)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.curve = _CURVES[name]

    def forward(self, h_PJ: Tensor) -> Tensor:
        return self.curve(h_PJ)[0]

    def backward(self, da_PI: Tensor, h_PJ: Tensor) -> Tensor:
        return da_PI * self.curve(h_PJ)[1]


@final
class Gated(Activation):
    """A = f(gate) * up (Shazeer, arXiv 2002.05202)."""

    gated = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.curve = _CURVES[name]

    def forward(self, h_PJ: Tensor) -> Tensor:
        return self.curve(h_PJ[:, ::2])[0] * h_PJ[:, 1::2]

    def backward(self, da_PI: Tensor, h_PJ: Tensor) -> Tensor:
        value, slope = self.curve(h_PJ[:, ::2])
        return torch.stack([da_PI * h_PJ[:, 1::2] * slope, da_PI * value], dim=-1).flatten(1)


def _clamped(h_PJ: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Returns gate, cut from above, and up, cut on both sides."""
    return h_PJ[:, ::2].clamp(max=limit), h_PJ[:, 1::2].clamp(-limit, limit)


def _cut(dgate_PI: Tensor, dup_PI: Tensor, h_PJ: Tensor, limit: float) -> Tensor:
    """Returns dH (P, J), given the gradients of `_clamped` values: nothing flows back through a cut value."""
    inside_gate, inside_up = h_PJ[:, ::2] <= limit, h_PJ[:, 1::2].abs() <= limit
    return torch.stack([dgate_PI * inside_gate, dup_PI * inside_up], dim=-1).flatten(1)


@final
class ClampedSwiGLU(Activation):
    """A = silu(g) * u with g = min(gate, limit), u = clamp(up, -limit, limit)."""

    gated = True

    def __init__(self, name: str, limit: float) -> None:
        self.name, self.limit = name, limit

    def forward(self, h_PJ: Tensor) -> Tensor:
        gate, up = _clamped(h_PJ, self.limit)
        return _silu_and_slope(gate)[0] * up

    def backward(self, da_PI: Tensor, h_PJ: Tensor) -> Tensor:
        gate, up = _clamped(h_PJ, self.limit)
        value, slope = _silu_and_slope(gate)
        return _cut(da_PI * up * slope, da_PI * value, h_PJ, self.limit)


@final
class GptOssSwiGLU(Activation):
    """A = g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7), u = clamp(up, -7, 7): gpt-oss's experts."""

    gated = True
    name = "swiglu_oai"

    def forward(self, h_PJ: Tensor) -> Tensor:
        gate, up = _clamped(h_PJ, _GPT_OSS_LIMIT)
        return gate * torch.sigmoid(_GPT_OSS_ALPHA * gate) * (up + 1)

    def backward(self, da_PI: Tensor, h_PJ: Tensor) -> Tensor:
        gate, up = _clamped(h_PJ, _GPT_OSS_LIMIT)
        s = torch.sigmoid(_GPT_OSS_ALPHA * gate)
        dgate = da_PI * (up + 1) * s * (1 + _GPT_OSS_ALPHA * gate * (1 - s))
        return _cut(dgate, da_PI * gate * s, h_PJ, _GPT_OSS_LIMIT)


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Gated("swiglu"),
    "swiglu_clamped": ClampedSwiGLU("swiglu_clamped", _SWIGLU_LIMIT),
    "swiglu_clamped_7": ClampedSwiGLU("swiglu_clamped_7", _SWIGLU_LIMIT_7),
    "geglu": Gated("geglu"),
    "geglu_erf": Gated("geglu_erf"),
    "reglu": Gated("reglu"),
    "swiglu_oai": GptOssSwiGLU(),
    "gelu": Plain("gelu"),
    "gelu_erf": Plain("gelu_erf"),
    "silu": Plain("silu"),
    "relu": Plain("relu"),
    "relu2": Plain("relu2"),
}


def activation_named(name: str) -> Activation:
    """Returns the activation that a MoEConfig names. Raises ValueError for an unknown name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def interleave(concatenated: Tensor) -> Tensor:
    """Returns a copy with gate and up alternating along dim 1: [g0, g1, u0, u1] -> [g0, u0, g1, u1]. Differentiable."""
    return interleave_split(*concatenated.chunk(2, 1))


def interleave_split(w1: Tensor, up: Tensor | None) -> Tensor:
    """Returns `interleave` of gate and up in two tensors, w1 and `up`. If `up` is None, returns w1 itself."""
    return w1 if up is None else torch.stack([w1, up], 2).flatten(1, 2)


def concatenate(interleaved: Tensor) -> Tensor:
    """Returns a copy with all of gate before up along dim 1: [g0, u0, g1, u1] -> [g0, g1, u0, u1]. Differentiable."""
    return torch.cat(interleaved.unflatten(1, (-1, 2)).unbind(2), 1)
