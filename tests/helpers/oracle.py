"""A dense float64 MoE that nobody can doubt: every expert on every token, masked, differentiated by autograd.

Written from the formulas (design.md sections 2 to 4), without a line of the layer: it shares only its weights' layout.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sonic_ep import MoEConfig


@dataclass
class Weights:
    """All E experts' and one rank's router and shared expert, float64 leaves."""

    router: Tensor
    router_bias: Tensor | None
    w1: Tensor
    w2: Tensor
    b1: Tensor | None
    b2: Tensor | None
    shared: dict[str, Tensor]


def activate(name: str, h: Tensor) -> Tensor:
    """Activation of pre-activations whose last dimension holds gate and up in turn (if gated)."""
    gate, up = h[..., ::2], h[..., 1::2]
    match name:
        case "swiglu":
            return F.silu(gate) * up
        case "swiglu_clamped":
            return F.silu(torch.clamp(gate, max=10.0)) * torch.clamp(up, -10.0, 10.0)
        case "swiglu_clamped_7":
            return F.silu(torch.clamp(gate, max=7.0)) * torch.clamp(up, -7.0, 7.0)
        case "geglu":
            return F.gelu(gate, approximate="tanh") * up
        case "geglu_erf":
            return F.gelu(gate) * up
        case "reglu":
            return F.relu(gate) * up
        case "swiglu_oai":
            gate, up = torch.clamp(gate, max=7.0), torch.clamp(up, -7.0, 7.0)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        case "gelu":
            return F.gelu(h, approximate="tanh")
        case "gelu_erf":
            return F.gelu(h)
        case "relu":
            return F.relu(h)
        case "silu":
            return F.silu(h)
        case "relu2":
            return F.relu(h) ** 2
    raise AssertionError(name)


def pair_weights(
    x: Tensor, weights: Weights, selected: Tensor, topk: Tensor, config: MoEConfig
) -> tuple[Tensor, Tensor]:
    """(T, E) combine weights, zero outside the selection, and logits."""
    logits = x @ weights.router.T
    if weights.router_bias is not None:
        logits = logits + weights.router_bias
    router = config.router
    scores = torch.softmax(logits, 1) if router.score == "softmax" else torch.sigmoid(logits)
    if not router.renormalize:
        return scores * selected * router.scale, logits
    share = scores / ((scores * topk).sum(1, keepdim=True) + 1e-20)
    added = selected & ~topk
    weight = share * (selected & topk) + (scores if router.score == "softmax" else share) * added
    return weight * router.scale, logits


def dense_moe(
    x: Tensor,
    weights: Weights,
    selected: Tensor,
    topk: Tensor,
    config: MoEConfig,
    *,
    routed_x: Tensor | None = None,
) -> Tensor:
    """Output of one rank's tokens. routed_x: what the router sees instead of x, with jitter."""
    weight, _ = pair_weights(x if routed_x is None else routed_x, weights, selected, topk, config)
    h = torch.einsum("td,ejd->etj", x, weights.w1)
    if weights.b1 is not None:
        h = h + weights.b1[:, None]
    y = torch.einsum("etn,edn->etd", activate(config.activation, h), weights.w2)
    if weights.b2 is not None:
        y = y + weights.b2[:, None]
    out = torch.einsum("te,etd->td", weight, y)
    return out + shared_expert(x, weights.shared, config) if weights.shared else out


def shared_expert(x: Tensor, shared: dict[str, Tensor], config: MoEConfig) -> Tensor:
    h = x @ shared["up.weight"].T + shared.get("up.bias", torch.zeros(()))
    if h.shape[1] == 2 * config.shared_n:  # [gate; up] halves -> in turn
        h = torch.stack(h.chunk(2, 1), 2).flatten(1)
    out = activate(config.activation, h) @ shared["down.weight"].T + shared.get("down.bias", torch.zeros(()))
    return out * torch.sigmoid(x @ shared["gate.weight"].T) if "gate.weight" in shared else out


def losses(logits: Tensor, topk: Tensor, counts: Tensor, config: MoEConfig) -> Tensor:
    """One rank's auxiliary loss; counts (E,) are the plain top-K counts that f_e is made of."""
    router = config.router
    scores = torch.softmax(logits, 1)
    if router.score == "sigmoid":
        sigmoids = torch.sigmoid(logits)
        scores = sigmoids / (sigmoids.sum(1, keepdim=True) + 1e-20)
    total = router.z_loss_coef * (torch.logsumexp(logits, 1) ** 2).mean()
    if router.balance != "none":
        if router.balance == "batch":
            counts = topk.sum(0)
        total = total + router.balance_coef * config.E * (counts.double() / counts.sum() * scores.mean(0)).sum()
    return total
