"""`SharedExpert`: a dense MLP that computes on every token, in addition to the routed experts.

Plain torch, because torch computes dense MLPs well. Source: DeepSeekMoE, arXiv 2401.06066.
"""

from collections.abc import Callable
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonic_ep.config import MoEConfig
from sonic_ep.initialization import fill_normal
from sonic_ep.kernels.batch_invariant.blocks import padded
from sonic_ep.routers.linear import linear_in_blocks


@final
class SharedExpert(nn.Module):
    """Linear layers, with biases if config.bias.

    up: weight (2 * shared_n, d), [gate; up] halves, if gated, else (shared_n, d). down: weight (d, shared_n).
    gate: with config.shared_gate, weight (1, d) without bias, else None; the sigmoid of its output multiplies the
    expert's output per token (Qwen2-MoE).
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation, self.batch_invariant = config.activation, config.batch_invariant
        self.gated = config.activation in _GATED
        n, d = config.shared_n, config.d
        self.up = nn.Linear(d, 2 * n if self.gated else n, bias=config.bias, device=device, dtype=dtype)
        self.down = nn.Linear(n, d, bias=config.bias, device=device, dtype=dtype)
        self.gate = nn.Linear(d, 1, bias=False, device=device, dtype=dtype) if config.shared_gate else None

    @torch.no_grad()
    def initialize(self, std: float, generator: torch.Generator) -> None:
        """Sets weights to normal(0, std) and biases to zero."""
        for linear in (self.up, self.down, self.gate):
            if linear is not None and not linear.weight.is_meta:
                fill_normal(linear.weight, std, generator)
                if linear.bias is not None:
                    linear.bias.zero_()

    def forward(self, x_TH: Tensor) -> Tensor:
        """Returns the expert's output (T, d) for rows (T, d)."""
        if self.batch_invariant:
            return self._output(padded(x_TH), linear_in_blocks)[: x_TH.shape[0]]
        return self._output(x_TH, lambda linear, rows: linear(rows))

    def _output(self, x_TH: Tensor, apply: Callable[[nn.Linear, Tensor], Tensor]) -> Tensor:
        h = apply(self.up, x_TH)
        out = apply(self.down, _GATED[self.activation](*h.chunk(2, -1)) if self.gated else _PLAIN[self.activation](h))
        return out if self.gate is None else out * torch.sigmoid(apply(self.gate, x_TH))


def _swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


_GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "swiglu_clamped": lambda gate, up: F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0),
    "swiglu_clamped_7": lambda gate, up: F.silu(gate.clamp(max=7.0)) * up.clamp(-7.0, 7.0),
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "geglu_erf": lambda gate, up: F.gelu(gate) * up,
    "reglu": lambda gate, up: F.relu(gate) * up,
    "swiglu_oai": _swiglu_oai,
}
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda h: F.gelu(h, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda h: F.relu(h).square(),
}
