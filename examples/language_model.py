"""A small language model over bytes whose feed-forward layers are `sonic_ep.MoE`.

A plain pre-norm transformer: RMSNorm, causal attention with rotary positions, MoE. Every `shared_every`-th block has a
shared expert beside the routed ones. Nothing in here knows about ranks: each process holds the whole model except for
the experts of other ranks, and calls it on its own sequences.

Letters: B sequences of this rank, S positions, H hidden size (the config's d), V the 256 byte values.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import VOCABULARY
from sonic_ep import EPGroup, MoE, MoEConfig, RoutingStats
from sonic_ep.initialization import fill_normal

ROPE_BASE = 10_000.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape of the model; the MoE config sets the hidden size."""

    moe: MoEConfig
    layers: int
    head_dim: int
    shared_every: int

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"--layers {self.layers} must be at least 1")
        if self.head_dim < 2 or self.head_dim % 2 or self.moe.d % self.head_dim:
            raise ValueError(
                f"--head-dim {self.head_dim} must be even and divide the hidden size d={self.moe.d} of the MoE config"
            )
        if self.shared_every < 0:
            raise ValueError(f"--shared-every {self.shared_every} must be 0 (as the config says) or more")

    def moe_of_layer(self, layer: int) -> MoEConfig:
        """The MoE config of one block: with a shared expert on every `shared_every`-th, counted from the second."""
        if self.shared_every == 0:
            return self.moe
        if layer % self.shared_every == self.shared_every - 1:
            return self.moe.replace(shared_n=self.moe.shared_n or self.moe.n)
        return self.moe.replace(shared_n=0, shared_gate=False)


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """logits_BSV; aux_loss, the sum of the layers' (already weighted); the routing statistics of each layer."""

    logits_BSV: Tensor
    aux_loss: Tensor
    stats: list[RoutingStats]


class RotaryPositions(nn.Module):
    """Rotates the pairs (i, i + D/2) of each head by an angle that grows with the position (Su et al., 2104.09864)."""

    cos_SD: Tensor
    sin_SD: Tensor

    def __init__(self, seq: int, head_dim: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        exact = torch.promote_types(dtype, torch.float32)
        speed = ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.outer(torch.arange(seq, dtype=torch.float64), speed).repeat(1, 2)
        self.register_buffer("cos_SD", angle.cos().to(device, exact), persistent=False)
        self.register_buffer("sin_SD", angle.sin().to(device, exact), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (B, heads, S, D); the same shape and dtype back."""
        length = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return (x * self.cos_SD[:length] + turned * self.sin_SD[:length]).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, hidden: int, head_dim: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, device=device, dtype=dtype)
        self.out = nn.Linear(hidden, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x_BSH: Tensor, rotary: RotaryPositions) -> Tensor:
        heads = self.qkv(x_BSH).unflatten(-1, (3, -1, self.head_dim))  # (B, S, 3, heads, D)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, S, D)
        y = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(
        self, config: ModelConfig, layer: int, *, group: EPGroup, seed: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hidden = config.moe.d
        self.attention_norm = nn.RMSNorm(hidden, device=device, dtype=dtype)
        self.attention = Attention(hidden, config.head_dim, device=device, dtype=dtype)
        self.moe_norm = nn.RMSNorm(hidden, device=device, dtype=dtype)
        self.moe = MoE(config.moe_of_layer(layer), group=group, seed=seed, device=device, dtype=dtype)

    def forward(self, x_BSH: Tensor, rotary: RotaryPositions) -> tuple[Tensor, Tensor, RoutingStats]:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), rotary)
        out = self.moe(self.moe_norm(x_BSH))
        return x_BSH + out.y, out.aux_loss, out.stats


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out.

    The same seed gives the same weights for every number of processes: dense weights are drawn here from their own
    generator on the CPU, and each MoE draws its experts by their global number.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seq: int,
        group: EPGroup,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        hidden = config.moe.d
        self.embedding = nn.Embedding(VOCABULARY, hidden, device=device, dtype=dtype)
        self.rotary = RotaryPositions(seq, config.head_dim, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(
            Block(config, layer, group=group, seed=1000 * seed + layer, device=device, dtype=dtype)
            for layer in range(config.layers)
        )
        self.norm = nn.RMSNorm(hidden, device=device, dtype=dtype)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False, device=device, dtype=dtype)
        self._initialise_dense(seed)

    @torch.no_grad()
    def _initialise_dense(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if ".moe." in name or weight.dim() < 2:  # MoE seeds itself; norm weights start at one
                continue
            std = self.config.moe.d**-0.5
            if name.endswith("attention.out.weight"):  # so that the residual stream does not grow with the depth
                std /= (2 * self.config.layers) ** 0.5
            fill_normal(weight, std, generator)

    def forward(self, bytes_BS: Tensor) -> ModelOutput:
        x_BSH = self.embedding(bytes_BS)
        aux_losses: list[Tensor] = []
        stats: list[RoutingStats] = []
        for block in self.blocks:
            x_BSH, aux_loss, layer_stats = block(x_BSH, self.rotary)
            aux_losses.append(aux_loss)
            stats.append(layer_stats)
        return ModelOutput(self.head(self.norm(x_BSH)), torch.stack(aux_losses).sum(), stats)

    def moe_layers(self) -> list[MoE]:
        """The MoE layers in order."""
        return [module for module in self.modules() if isinstance(module, MoE)]


def next_byte_loss(output: ModelOutput, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats of windows[:, 1:] given windows[:, :-1], the bytes that the model was called on."""
    logits_BSV = output.logits_BSV
    exact = torch.promote_types(logits_BSV.dtype, torch.float32)
    return F.cross_entropy(logits_BSV.to(exact).flatten(0, 1), windows[:, 1:].flatten())
