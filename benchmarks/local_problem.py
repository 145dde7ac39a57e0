"""A random local MoE problem on a GPU: tokens, expert weights and (token, expert, gate) pairs with index lists."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sonic_ep import EPGroup, Routing, expert_parallel_mlp
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.plan import plan_for
from sonic_ep.expert_parallel_mlp import Call, SavedForBackward
from sonic_ep.kernels.experts.activations import activation_named
from sonic_ep.kernels.experts.mlp import ExpertWeights, RowLists

TILE = 128


@dataclass(frozen=True)
class Pairs:
    """(N,) int64 tokens and experts, by token, and (N,) fp32 gates."""

    tokens: Tensor
    experts: Tensor
    pair_weights: Tensor


def topk_pairs(T: int, E: int, K: int) -> Pairs:
    """Plain top-K of random scores: ragged experts."""
    scores, ids = torch.rand(T, E, device="cuda").topk(K)
    tokens = torch.arange(T, device="cuda").repeat_interleave(K)
    return Pairs(tokens, ids.flatten(), (scores / scores.sum(1, keepdim=True)).flatten())


def tiled_pairs(T: int, E: int, num_pairs: int) -> Pairs:
    """About `num_pairs` pairs, every expert with a multiple of 128 random tokens."""
    tiles = num_pairs // TILE
    counts = [(tiles // E + (e < tiles % E)) * TILE for e in range(E)]
    tokens = torch.cat([torch.randperm(T, device="cuda")[:count] for count in counts])
    experts = torch.arange(E, device="cuda").repeat_interleave(torch.tensor(counts, device="cuda"))
    order = (tokens * E + experts).argsort()
    return Pairs(tokens[order], experts[order], torch.rand(tokens.shape[0], device="cuda"))


class LocalProblem:
    """bf16, unit-scale rows; weights and rows want gradients. rounded: do experts have whole tiles of pairs?"""

    def __init__(self, pairs: Pairs, T: int, E: int, d: int, n: int, *, tile_aligned: bool = False) -> None:
        self.pairs, self.T, self.E, self.d, self.n = pairs, T, E, d, n
        self.P = pairs.tokens.shape[0]

        def draw(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16).mul_(scale)

        self.x, self.dout = draw(T, d).requires_grad_(), draw(T, d)
        self.w1, self.w2 = draw(E, 2 * n, d, scale=d**-0.5), draw(E, d, n, scale=n**-0.5)
        self.w1.requires_grad_()
        self.w2.requires_grad_()
        self.activation = activation_named("swiglu")
        self.routing = Routing.from_pairs(
            pairs.tokens, pairs.experts, pairs.pair_weights, num_tokens=T, E=E, group=EPGroup.alone()
        )
        self.call = Call(
            LocalTransport(), EPGroup.alone(), self.activation, save_dispatched=False, tile_aligned=tile_aligned
        )
        self.prepared = self.call.transport.prepare(self.routing, plan_for(self.routing.counts, 0))
        self.handle, self.pair_weights = self.prepared.handle, self.prepared.weights_P
        self.lists = RowLists(self.handle.row_of_pair_P, self.handle.expert_starts_e, tile_aligned)

    def kernels(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Forward and backward of the local experts, their lists given."""
        x, weights = self.x.detach(), ExpertWeights(self.w1.detach(), self.w2.detach())
        _, saved = expert_parallel_mlp.forward(x, self.prepared, weights, self.call)
        h, _ = saved.pop()

        def forward() -> None:
            expert_parallel_mlp.forward(x, self.prepared, weights, self.call)

        def backward() -> None:
            saved = SavedForBackward(x, h, self.pair_weights, self.handle)
            expert_parallel_mlp.backward(self.dout, saved, weights, self.call, (True, True, False, False))

        return forward, backward
