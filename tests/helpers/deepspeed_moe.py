"""A small model with two MoE layers, DeepSpeed's or ours, for the tests of the DeepSpeed integration."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, WIDTH, EXPERTS, TOKENS = 16, 24, 8, 24
AUX_WEIGHT = 0.05
# What makes DeepSpeed's layer compute what ours computes.
DROPLESS = {"drop_tokens": False, "top2_2nd_expert_sampling": False}


class GatedMLP(nn.Module):
    """Llama's MLP."""

    def __init__(self, hidden: int = H, width: int = WIDTH, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=bias)
        self.up_proj = nn.Linear(hidden, width, bias=bias)
        self.down_proj = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def moe_class(ours: bool) -> Any:
    if ours:
        from sonic_ep.integrations.deepspeed import MoE
    else:
        from deepspeed.moe.layer import MoE
    return MoE


class Model(nn.Module):
    """Linear, MoE, linear, MoE with residuals. **arguments: of the MoE layers, ep_size one for both or two. seed: of
    all weights, ours and theirs alike."""

    def __init__(
        self,
        ours: bool,
        *,
        expert: Callable[[], nn.Module] = GatedMLP,
        hidden: int = H,
        seed: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        arguments = {"num_experts": EXPERTS, **DROPLESS, **arguments}
        self.linears = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        each = arguments.pop("ep_size", 1)
        self.layers: Any = nn.ModuleList(
            moe_class(ours)(hidden, expert(), ep_size=ep_size, **arguments)
            for ep_size in (each if isinstance(each, tuple) else (each, each))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        total, counts = x.new_zeros((), dtype=torch.float32), []
        for linear, layer in zip(self.linears, self.layers, strict=True):
            y, l_aux, exp_counts = layer(linear(x))
            x, total = x + y, total + l_aux
            counts.append(exp_counts)
        return x, total, counts


@torch.no_grad()
def scatter_experts(model: Model, ep_rank: int) -> None:
    """Give every expert values of its own, by its global number: both layers start all experts alike, which would hide
    a mix-up. The gates become far from uniform."""
    state = model.state_dict()
    for number, layer in enumerate(model.layers):
        for local in range(layer.num_local_experts):
            expert = ep_rank * layer.num_local_experts + local
            prefix = f"layers.{number}.deepspeed_moe.experts.deepspeed_experts.{local}."
            generator = torch.Generator().manual_seed(100 * number + expert)
            for key in sorted(key for key in state if key.startswith(prefix)):
                state[key] = torch.randn(state[key].shape, generator=generator) * 0.25
        state[f"layers.{number}.deepspeed_moe.gate.wg.weight"] *= 4
    model.load_state_dict(state)


def gradients(layer: Any) -> dict[str, Tensor]:
    """By the key of the weight in DeepSpeed's layer."""
    from sonic_ep.integrations.deepspeed.experts import NAMES, StackedExperts

    named: dict[str, Any] = {}
    for prefix, module in layer.named_modules():
        if isinstance(module, StackedExperts):
            grads: Any = {name: parameter.grad for name, parameter in module.named_parameters()}
            for local in range(module.num_local_experts):
                one = {
                    NAMES[name]: grad.view(module.num_local_experts, *grad.shape[1:] or (-1,))[local]
                    for name, grad in grads.items()
                }
                entries = module.template.entries(one).items()
                named |= {f"{prefix}.deepspeed_experts.{local}.{name}": grad for name, grad in entries}
        else:
            named |= {f"{prefix}.{name}".lstrip("."): p.grad for name, p in module.named_parameters(recurse=False)}
    return {key: torch.zeros(()) if grad is None else grad for key, grad in named.items()}


def batches(rank: int, steps: int, tokens: int = TOKENS, start: int = 0) -> list[Tensor]:
    """This rank's inputs of each step."""
    return [
        torch.randn(tokens, H, generator=torch.Generator().manual_seed(1000 * (start + step) + rank))
        for step in range(steps)
    ]


def loss_of(engine: Any, x: Tensor) -> Tensor:
    y, l_aux, _ = engine(x)
    return (y.float() - x.float().roll(1, -1)).square().mean() + AUX_WEIGHT * l_aux


def noted_routings(experts: nn.Module) -> list[Any]:
    """A list that gets the routing of every step of a layer's experts."""
    routings: list[Any] = []
    experts.register_forward_pre_hook(lambda _, given: routings.append(given[1]))
    return routings
