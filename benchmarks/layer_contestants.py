"""Layers that race on the same tokens and weights: `sonic_ep.MoE` by mode, a plain torch grouped_mm layer, sonic-moe's.

Each with a softmax top-K router and its gradient. The router's GEMMs are as exact as fp32, or in bf16 where a name says
BF16_ROUTER, as the GEMMs of torch and sonic-moe are.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from random_layer import layer_without_experts
from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, TransportConfig
from sonic_ep.config import TransportKind

CAPACITY = 1.25  # of static buffers
HOSTS = 2  # that "two_hop" takes the ranks for
BF16_ROUTER = "bf16 router"


@dataclass(frozen=True)
class Contestant:
    """layer: ours, if it is one."""

    forward: Callable[[], Tensor]
    inputs: list[Tensor]
    dout: Tensor
    layer: MoE | None = None

    def step(self) -> None:
        torch.autograd.grad(self.forward(), self.inputs, self.dout)


def config_of(name: str, config: MoEConfig, ranks: int) -> MoEConfig:
    """Returns the config of one of our contestants: its rounding mode, then words for what is not as by default.

    These are a transport, which is "two_hop" for ranks as HOSTS hosts, "static" buffers, "code" in place of programs,
    "batch-invariant", and BF16_ROUTER.
    """
    mode, *words = name.split(", ")
    static, kind = "static" in words, next((word for word in words if word in get_args(TransportKind)), "auto")
    router = dataclasses.replace(config.router, linear_dtype="input" if BF16_ROUTER in words else "float32")
    return config.replace(
        router=router,
        rounding=RoundingConfig(mode=mode, capacity_factor=CAPACITY if static else None),  # type: ignore[arg-type]
        transport=TransportConfig(
            kind=kind,  # type: ignore[arg-type]
            buffers="static" if static else "exact",
            ranks_per_host=ranks // HOSTS if kind == "two_hop" else None,
        ),
        record_launches="code" not in words,
        batch_invariant="batch-invariant" in words,
    )


def grouped_mm_experts(x: Tensor, w1: Tensor, w2: Tensor, tokens: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """Plain torch experts: rows of `tokens`, sorted by expert and ending at `ends`, weighted and summed in fp32."""
    h = torch._grouped_mm(x[tokens], w1.mT, offs=ends)
    a = F.silu(h[:, ::2]) * h[:, 1::2]
    y = torch._grouped_mm(a, w2.mT, offs=ends) * weights[:, None]
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, tokens, y.float()).bfloat16()


class TorchOutput(NamedTuple):
    """y (T, d), the router's logits, and the pairs of each expert."""

    y: Tensor
    logits_TE: Tensor
    counts_E: Tensor

    def balance_loss(self) -> Tensor:
        """E * sum over experts of (share of the pairs) * (mean score), as in arXiv 2101.03961, formula 4."""
        shares_E = self.counts_E.float() / self.counts_E.sum()
        return self.counts_E.numel() * (shares_E * self.logits_TE.float().softmax(1).mean(0)).sum()


class _Pairs(NamedTuple):
    """All pairs in the order of their experts: tokens, the end of each expert, weights."""

    tokens: Tensor
    ends_E: Tensor
    weights: Tensor


def _softmax_topk(x: Tensor, router: Tensor, K: int) -> tuple[_Pairs, Tensor]:
    logits_TE = F.linear(x, router)
    weights_TK, ids_TK = logits_TE.float().softmax(1).topk(K)
    weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
    experts, order = ids_TK.flatten().sort(stable=True)
    ends_E = torch.searchsorted(experts, torch.arange(router.shape[0], device=experts.device), right=True).int()
    return _Pairs(order // K, ends_E, weights_TK.flatten()[order]), logits_TE


def torch_layer(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, K: int) -> TorchOutput:
    """Plain torch on one rank. w1 (E, 2n, d), w2 (E, d, n), as ours."""
    pairs, logits_TE = _softmax_topk(x, router, K)
    y = grouped_mm_experts(x, w1, w2, *pairs)
    return TorchOutput(y, logits_TE, torch.diff(pairs.ends_E, prepend=pairs.ends_E.new_zeros(1)))


def torch_layer_across_ranks(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, K: int, size: int) -> TorchOutput:
    """Plain torch on all `size` ranks: a row a pair by all-to-all, sorted by expert where it arrives, and back.

    The host reads the counts.
    """
    e, group = w1.shape[0], dist.group.WORLD
    assert group is not None
    pairs, logits_TE = _softmax_topk(x, router, K)
    counts_SE = torch.diff(pairs.ends_E, prepend=pairs.ends_E.new_zeros(1)).view(size, e)  # to each rank's experts
    arriving_SE = torch.empty_like(counts_SE)  # from each rank
    dist.all_to_all_single(arriving_SE, counts_SE, group=group)
    out, into = torch.stack((counts_SE.sum(1), arriving_SE.sum(1))).tolist()
    rows = all_to_all_single_autograd(x[pairs.tokens], into, out, group)
    experts = torch.arange(e, device=rows.device).repeat(size)
    order = experts.repeat_interleave(arriving_SE.flatten(), output_size=sum(into)).argsort(stable=True)
    h = torch._grouped_mm(rows[order], w1.mT, offs=arriving_SE.sum(0).cumsum(0).int())
    a = F.silu(h[:, ::2]) * h[:, 1::2]
    y = torch._grouped_mm(a, w2.mT, offs=arriving_SE.sum(0).cumsum(0).int())
    back = all_to_all_single_autograd(torch.zeros_like(y).index_copy(0, order, y), out, into, group)
    back = back * pairs.weights[:, None]
    y = torch.zeros_like(x, dtype=torch.float32).index_add(0, pairs.tokens, back.float()).bfloat16()
    return TorchOutput(y, logits_TE, counts_SE.flatten())


def sonic_moe_layer(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, K: int) -> TorchOutput:
    """sonic-moe's layer with a softmax top-K router. w1 (E, 2n, d), w2 (E, d, n), as ours."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    stream = torch.cuda.current_stream().cuda_stream
    weights = (w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None)
    y, logits_TE, counts_E = moe_TC_softmax_topk_layer(
        x, router, *weights, K, stream, ActivationType.SWIGLU, is_softmax_over_topk=False, norm_topk_probs=True
    )
    return TorchOutput(y, logits_TE, counts_E)


class Problem:
    """Rows and weights of unit scale, in bf16, and every contestant on them."""

    def __init__(self, config: MoEConfig, T: int, group: EPGroup, device: str = "cuda") -> None:
        # Every contestant has a softmax router without more.
        self.config = MoEConfig(d=config.d, n=config.n, E=config.E, K=config.K)
        self.group, self._device = group, device
        generator = torch.Generator(device).manual_seed(group.rank)

        def draw(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*size, device=device, dtype=torch.bfloat16, generator=generator).mul_(scale)

        d, n, e = config.d, config.n, config.E // group.size
        self.x, self.dout = draw(T, d), draw(T, d)
        self.w1, self.w2 = draw(e, 2 * n, d, scale=d**-0.5), draw(e, d, n, scale=n**-0.5)
        self.router = draw(config.E, d, scale=d**-0.5)
        for leaf in (self.x, self.w1, self.w2, self.router):
            leaf.requires_grad_()

    def contestant(self, name: str) -> Contestant:
        """name: "torch", "sonic_moe", or the name of one of ours, see `config_of`."""
        if name not in ("torch", "sonic_moe"):
            return self._sonic_ep(name)
        layer: Callable[..., TorchOutput] = sonic_moe_layer if name == "sonic_moe" else torch_layer
        if self.group.size > 1:
            layer = partial(torch_layer_across_ranks, size=self.group.size)
        arguments = self.x, self.router, self.w1, self.w2, self.config.K
        return Contestant(lambda: layer(*arguments).y, [self.x, self.w1, self.w2, self.router], self.dout)

    def _sonic_ep(self, name: str) -> Contestant:
        config = config_of(name, self.config, self.group.size)
        if self._device == "cuda":
            layer = layer_without_experts(config, self.group, router_std=config.d**-0.5)
        else:
            layer = MoE(config, self.group, seed=0, dtype=torch.bfloat16)
        layer.experts.w1.data, layer.experts.w2.data = self.w1.data, self.w2.data
        inputs = [self.x, layer.experts.w1, layer.experts.w2, layer.router.weight]
        return Contestant(lambda: layer(self.x).y, inputs, self.dout, layer)
