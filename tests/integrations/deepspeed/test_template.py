"""Templates: recognised by what they compute, or refused with the reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("deepspeed")

from sonic_ep.integrations.deepspeed.template import read_template
from sonic_ep.kernels.experts.activations import activation_named

HIDDEN, WIDTH = 12, 20


class Gated(nn.Module):
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def __init__(self, names: tuple[str, str, str], curve: Callable[[Tensor], Tensor], bias: bool = False) -> None:
        super().__init__()
        self.names, self.curve = names, curve
        for name, shape in zip(names, ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)), strict=True):
            self.add_module(name, nn.Linear(*shape, bias=bias))

    def forward(self, x: Tensor) -> Any:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.curve(gate(x)) * up(x))


class Plain(nn.Module):
    def __init__(self, names: tuple[str, str], curve: Callable[[Tensor], Tensor], bias2: bool = True) -> None:
        super().__init__()
        self.names, self.curve = names, curve
        self.add_module(names[0], nn.Linear(HIDDEN, WIDTH))
        self.add_module(names[1], nn.Linear(WIDTH, HIDDEN, bias=bias2))

    def forward(self, x: Tensor) -> Any:
        first, second = (getattr(self, name) for name in self.names)
        return second(self.curve(first(x))), None


class GptOss(Gated):
    def __init__(self) -> None:
        super().__init__(LLAMA, F.silu, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).clamp(max=7.0), self.up_proj(x).clamp(-7.0, 7.0)
        return self.down_proj((up + 1) * gate * torch.sigmoid(1.702 * gate))


class Clamped(Gated):
    def __init__(self) -> None:
        super().__init__(LLAMA, F.silu)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).clamp(max=10.0), self.up_proj(x).clamp(-10.0, 10.0)
        return self.down_proj(F.silu(gate) * up)


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


LLAMA, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
KNOWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "llama": (lambda: Gated(LLAMA, F.silu), "swiglu"),
    "llama-biases": (lambda: Gated(LLAMA, F.silu, bias=True), "swiglu"),
    "mixtral": (lambda: Gated(MIXTRAL, F.silu), "swiglu"),
    "geglu": (lambda: Gated(LLAMA, tanh_gelu), "geglu"),
    "exact-geglu": (lambda: Gated(LLAMA, F.gelu), "geglu_erf"),
    "reglu": (lambda: Gated(MIXTRAL, F.relu), "reglu"),
    "clamped": (Clamped, "swiglu_clamped"),
    "gpt-oss": (GptOss, "swiglu_oai"),
    "fc": (lambda: Plain(("fc1", "fc2"), F.silu), "silu"),
    "fc-one-bias": (lambda: Plain(("fc1", "fc2"), F.silu, bias2=False), "silu"),
    "megatron": (lambda: Plain(("dense_h_to_4h", "dense_4h_to_h"), tanh_gelu), "gelu"),
    "exact-gelu": (lambda: Plain(("fc1", "fc2"), F.gelu), "gelu_erf"),
    "relu": (lambda: Plain(("fc1", "fc2"), F.relu), "relu"),
    "squared": (lambda: Plain(("up_proj", "down_proj"), lambda x: F.relu(x).square()), "relu2"),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(HIDDEN, WIDTH, bias=False), nn.SiLU(), nn.Linear(WIDTH, HIDDEN, bias=False)),
        "silu",
    ),
}


@pytest.mark.parametrize(("make", "activation"), KNOWN.values(), ids=list(KNOWN))
def test_weights_and_activation_are_found(make: Callable[[], nn.Module], activation: str) -> None:
    expert = make()
    before = {key: value.clone() for key, value in expert.state_dict().items()}
    template = read_template(expert, HIDDEN)
    assert template.activation == activation
    values = template.values(expert)
    x = torch.randn(9, HIDDEN)
    h = activation_named(activation).forward(F.linear(x, values["w1"], values.get("b1")))
    wanted = expert(x)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    torch.testing.assert_close(F.linear(h, values["w2"], values.get("b2")), wanted)
    torch.testing.assert_close(template.entries(values), before, atol=0, rtol=0)


def test_zero_weights_hide_nothing() -> None:
    expert = Gated(LLAMA, F.silu)
    nn.init.zeros_(expert.down_proj.weight)
    assert read_template(expert, HIDDEN).activation == "swiglu"


def test_weights_without_data_are_enough() -> None:
    with torch.device("meta"):
        expert = Gated(LLAMA, tanh_gelu)
    assert read_template(expert, HIDDEN).activation == "geglu"


class WithNorm(Gated):
    def __init__(self) -> None:
        super().__init__(LLAMA, F.silu)
        self.norm = nn.LayerNorm(HIDDEN)


class WithBuffer(Gated):
    def __init__(self) -> None:
        super().__init__(LLAMA, F.silu)
        self.register_buffer("scale", torch.ones(()))


class GateAndUpSwapped(Gated):
    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(gate(x) * F.silu(up(x)))


class OneBias(Gated):
    def __init__(self) -> None:
        super().__init__(LLAMA, F.silu)
        self.gate_proj = nn.Linear(HIDDEN, WIDTH)


class OnOtherDevices(Gated):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("this kernel needs a GPU")


def frozen_gate() -> nn.Module:
    expert = Gated(LLAMA, F.silu)
    expert.gate_proj.requires_grad_(False)
    return expert


class OfTwoWidths(Gated):
    def __init__(self) -> None:
        super().__init__(LLAMA, F.silu)
        self.gate_proj = nn.Linear(HIDDEN, WIDTH - 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.pad(F.silu(self.gate_proj(x)), (0, 1)) * self.up_proj(x))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(HIDDEN, HIDDEN), "none of the MLPs below"),
        (lambda: nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)), "none of the MLPs below"),
        (WithNorm, "none of the MLPs below"),
        (WithBuffer, "none of the MLPs below"),
        (lambda: GateAndUpSwapped(LLAMA, F.silu), "computes something else with .* gate_proj, up_proj, down_proj"),
        (lambda: Plain(("fc1", "fc2"), torch.tanh), "computes something else with .* fc1, fc2"),
        (
            lambda: nn.Sequential(
                nn.Linear(HIDDEN, WIDTH), nn.Sequential(nn.SiLU(), nn.Dropout(0.1)), nn.Linear(WIDTH, HIDDEN)
            ),
            "computes something else with .* 0, 2",
        ),
        (OneBias, "of gate and up only one has a bias"),
        (frozen_gate, "of gate and up only one has a frozen weight"),
        (OfTwoWidths, r"first linear layer has weight \(20, 12\)"),
        (lambda: OnOtherDevices(LLAMA, F.silu), r"not be tried on \(16, 12\) .* rows: this kernel needs a GPU"),
        (
            lambda: nn.Sequential(nn.Linear(HIDDEN + 1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, HIDDEN)),
            r"weight \(20, 13\), wanted \(width, hidden_size=12\)",
        ),
        (
            lambda: nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.SiLU(), nn.Linear(WIDTH, HIDDEN + 1)),
            r"it returns \(16, 13\) for rows of shape \(16, 12\), wanted rows of hidden_size=12",
        ),
        (lambda: nn.Linear(HIDDEN, 1), r"it returns \(16, 1\) for rows"),
    ],
)
def test_what_no_kernel_computes_is_refused(make: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(
        ValueError, match=f"^no kernel computes expert=.*{reason}.*gate_proj, up_proj.*fc1, fc2.*gelu_erf"
    ):
        read_template(make(), HIDDEN)
