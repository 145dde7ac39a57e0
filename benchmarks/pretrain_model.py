"""The model of pretrain.py: attention and head as a training run has them today, and MoE layers that can be exchanged.

A block holds the weights of its experts and router once. Whoever computes with them is chosen by name before a step, so
contestants train one model in turns.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layer_contestants import TorchOutput
from sonic_ep import EPGroup, MoE, MoEConfig

ROPE_BASE, STD = 10_000.0, 0.02

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, int], TorchOutput]


class Dense(NamedTuple):
    """The rest of a model, besides its MoE layers. layers: of the whole model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


# sonic_7b: 42 layers make 7B parameters; heads and vocabulary are ours, the paper does not give them.
# qwen3_30b_a3b: config.json of Qwen/Qwen3-30B-A3B, without its norms of queries and keys.
DENSE = {
    "sonic_7b": Dense(layers=42, heads=12, kv_heads=12, head_dim=128, vocabulary=50_304),
    "qwen3_30b_a3b": Dense(layers=48, heads=32, kv_heads=4, head_dim=128, vocabulary=151_936),
    "tiny": Dense(layers=2, heads=2, kv_heads=1, head_dim=8, vocabulary=256),
}


class Attention(nn.Module):
    """x + causal attention of norm(x), by torch's flash attention, with rotary positions."""

    def __init__(self, d: int, dense: Dense) -> None:
        super().__init__()
        self.dense = dense
        self.norm = nn.RMSNorm(d)
        self.qkv = nn.Linear(d, (dense.heads + 2 * dense.kv_heads) * dense.head_dim, bias=False)
        self.out = nn.Linear(dense.heads * dense.head_dim, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, L, _ = x.shape
        dense = self.dense
        q, k, v = (
            self.qkv(self.norm(x))
            .view(B, L, -1, dense.head_dim)
            .transpose(1, 2)
            .split((dense.heads, dense.kv_heads, dense.kv_heads), 1)
        )
        y = F.scaled_dot_product_attention(
            _turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True, enable_gqa=dense.kv_heads != dense.heads
        )
        return x + self.out(y.transpose(1, 2).reshape(B, L, -1))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return (torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def rotation(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, (length, head_dim), of the angles that positions turn queries and keys by."""
    speed = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), speed).repeat(1, 2)
    return angle.cos(), angle.sin()


class ExchangeableMoE(nn.Module):
    """MoE layers of ours by name, all with the weights of the first, and functions of the same weights by name."""

    def __init__(self, configs: Mapping[str, MoEConfig], others: Mapping[str, Layer], group: EPGroup) -> None:
        super().__init__()
        self.chosen = next(iter(configs))
        self._others = dict(others)
        self.layers = nn.ModuleDict({name: MoE(config, group, seed=0) for name, config in configs.items()})
        self.share_weights()

    def share_weights(self) -> None:
        """Call it after `to_empty`, which gives each router a weight of its own."""
        first, *rest = [layer for layer in self.layers.values() if isinstance(layer, MoE)]
        for layer in rest:
            layer.experts, layer.router.weight = first.experts, first.router.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns y and the weighted load-balancing loss."""
        if self.chosen in self.layers:
            y, aux_loss, _ = self.layers[self.chosen](x)
            return y, aux_loss
        layer = next(iter(self.layers.values()))
        assert isinstance(layer, MoE)
        experts, router, config = layer.experts, layer.router.weight, layer.config
        out = self._others[self.chosen](x.flatten(0, 1), router, experts.w1, experts.w2, config.K)
        return out.y.view_as(x), config.router.balance_coef * out.balance_loss()


class Block(nn.Module):
    def __init__(self, d: int, dense: Dense, moe: ExchangeableMoE) -> None:
        super().__init__()
        self.attention, self.norm, self.moe = Attention(d, dense), nn.RMSNorm(d), moe

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = self.attention(x, cos, sin)
        y, aux_loss = self.moe(self.norm(x))
        return x + y, aux_loss


class Head(nn.Module):
    """The mean cross-entropy of the next tokens; on a GPU by quack's fused linear cross-entropy."""

    def __init__(self, d: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.weight = nn.RMSNorm(d), nn.Parameter(torch.empty(vocabulary, d))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(x).flatten(0, 1)
        if not x.is_cuda:
            return F.cross_entropy(F.linear(x, self.weight).float(), targets.flatten())
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        # clone: targets of one sequence are a view with an address that the kernel does not take.
        return chunked_linear_cross_entropy(x, self.weight, targets.flatten().clone(), chunk_size=8192, tuned=False)


class Model(nn.Module):
    """fp32 weights, drawn on the device. checkpointing: blocks keep their input alone, and compute twice."""

    def __init__(self, d: int, dense: Dense, blocks: list[ExchangeableMoE], *, checkpointing: bool) -> None:
        super().__init__()
        self.dense, self.checkpointing = dense, checkpointing
        self.embedding = nn.Embedding(dense.vocabulary, d)
        self.blocks = nn.ModuleList(Block(d, dense, moe) for moe in blocks)
        self.head = Head(d, dense.vocabulary)

    @torch.no_grad()
    def materialize(self, device: torch.device, ep_rank: int) -> None:
        """Gives a model on "meta" memory and random weights: of experts by ep_rank, all others alike."""
        self.to_empty(device=device)
        for block in self.blocks:
            assert isinstance(block.moe, ExchangeableMoE)
            block.moe.share_weights()
        generators = [torch.Generator(device).manual_seed(seed) for seed in (0, 1 + ep_rank)]
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            std = STD / (2 * self.dense.layers) ** 0.5 if name.endswith("attention.out.weight") else STD
            parameter.normal_(std=std, generator=generators[".experts." in name])
        for buffer in self.buffers():
            buffer.zero_()

    def choose(self, contestant: str) -> None:
        for block in self.blocks:
            assert isinstance(block.moe, ExchangeableMoE)
            block.moe.chosen = contestant

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens: (sequences, length + 1). Returns the mean cross-entropy and the sum of the load-balancing losses."""
        x = self.embedding(tokens[:, :-1])
        cos, sin = rotation(x.shape[1], self.dense.head_dim, x.device)
        aux_losses: list[Tensor] = []
        for block in self.blocks:
            if self.checkpointing:
                x, aux_loss = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x, aux_loss = block(x, cos, sin)
            aux_losses.append(aux_loss)
        return self.head(x, tokens[:, 1:]), torch.stack(aux_losses).sum()


def groups_by_mesh(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups of one device mesh each: fused AdamW takes weights of one mesh at a time."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)  # type: ignore[attr-defined]
    return [{"params": each} for each in by_mesh.values()]


def flops_per_token(config: MoEConfig, dense: Dense, layers: int, length: int) -> int:
    """Forward and backward: six per weight that a token meets, and causal attention."""
    attention = (2 * dense.heads + 2 * dense.kv_heads) * dense.head_dim * config.d
    moe = 3 * config.K * config.d * config.n + config.E * config.d
    return (
        6 * (layers * (attention + moe) + dense.vocabulary * config.d)
        + 6 * layers * length * dense.heads * dense.head_dim
    )
