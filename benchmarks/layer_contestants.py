"""Layers that race on the same tokens and weights: `sonic_ep.MoE` by mode, a plain torch grouped_mm layer, sonic-moe's.

Each with a softmax top-K router and its gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from sonic_ep import EPGroup, MoE, MoEConfig, RoundingConfig, TransportConfig
from sonic_ep.config import Buffers, RoundingMode, TransportKind

CAPACITY = 1.25  # of static buffers


@dataclass(frozen=True)
class Contestant:
    """layer: ours, if it is one."""

    forward: Callable[[], Tensor]
    inputs: list[Tensor]
    dout: Tensor
    capturable: bool = True
    layer: MoE | None = None

    def step(self) -> None:
        torch.autograd.grad(self.forward(), self.inputs, self.dout)


def grouped_mm_experts(x: Tensor, w1: Tensor, w2: Tensor, tokens: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """Plain torch experts: rows of `tokens`, sorted by expert and ending at `ends`, weighted and summed in fp32."""
    h = torch._grouped_mm(x[tokens], w1.mT, offs=ends)
    a = F.silu(h[:, ::2]) * h[:, 1::2]
    y = torch._grouped_mm(a, w2.mT, offs=ends) * weights[:, None]
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, tokens, y.float()).bfloat16()


def sonic_moe_layer(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, K: int) -> Callable[[], Tensor]:
    """The forward of sonic-moe's layer with a softmax top-K router. w1 (e, 2n, d), w2 (e, d, n), as ours."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    w1, w2 = w1.permute(1, 2, 0), w2.permute(1, 2, 0)

    def forward() -> Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        arguments = (x, router, w1, None, w2, None, K, stream, ActivationType.SWIGLU)
        return moe_TC_softmax_topk_layer(*arguments, is_softmax_over_topk=False, norm_topk_probs=True)[0]

    return forward


class Problem:
    """Rows and weights of unit scale, in bf16, and every contestant on them."""

    def __init__(self, config: MoEConfig, T: int, group: EPGroup, device: str) -> None:
        self.config, self.group, self.device = config, group, device
        generator = torch.Generator(device).manual_seed(group.rank)

        def draw(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*size, device=device, dtype=torch.bfloat16, generator=generator).mul_(scale)

        d, n, e = config.d, config.n, config.E // group.size
        self.x, self.dout = draw(T, d), draw(T, d)
        self.w1, self.w2 = draw(e, 2 * n, d, scale=d**-0.5), draw(e, d, n, scale=n**-0.5)
        self.router = draw(config.E, d, scale=d**-0.5)
        for leaf in (self.x, self.w1, self.w2, self.router):
            leaf.requires_grad_()

    def makers(self) -> dict[str, Callable[[], Contestant]]:
        makers = self._ours()
        if self.group.size > 1:
            makers["torch"] = self.plain_torch_across_ranks
        else:
            makers["torch"] = self.plain_torch
            if self.device == "cuda" and find_spec("sonicmoe") is not None:
                makers["sonic_moe"] = self.sonic_moe
        return makers

    def _ours(self) -> dict[str, Callable[[], Contestant]]:
        makers: dict[str, Callable[[], Contestant]] = {}

        def add(
            mode: RoundingMode, kind: TransportKind = "auto", buffers: Buffers = "exact", *, record: bool = True
        ) -> None:
            words = [mode, *([] if kind == "auto" else [kind]), *([] if buffers == "exact" else [buffers])]
            words += [] if record else ["code"]
            makers[", ".join(words)] = lambda: self.sonic_ep(mode, kind, buffers, record=record)

        if self.group.size == 1:
            for mode in ("off", "nearest"):
                add(mode)
                add(mode, record=False)
            add("nearest", buffers="static")
            return makers
        kinds: tuple[TransportKind, ...] = ("symmetric", "all_to_all") if self.device == "cuda" else ("all_to_all",)
        modes: tuple[RoundingMode, ...] = ("off", "nearest", "apportion")
        for kind in kinds:
            for mode in modes:
                add(mode, kind)
                if kind == "symmetric":
                    add(mode, kind, record=False)
        if self.device == "cuda":
            add("nearest", "symmetric", "static")
            add("apportion", "symmetric", "static")
        return makers

    def sonic_ep(self, mode: RoundingMode, kind: TransportKind, buffers: Buffers, *, record: bool) -> Contestant:
        c, static = self.config, buffers == "static"
        rounding = RoundingConfig(mode=mode, capacity_factor=CAPACITY if static else None)
        transport = TransportConfig(kind=kind, buffers=buffers)
        layer = self._layer(
            MoEConfig(
                d=c.d,
                n=c.n,
                E=c.E,
                K=c.K,
                rounding=rounding,
                transport=transport,
                record_launches=record,
            )
        )
        layer.experts.w1.data, layer.experts.w2.data = self.w1.data, self.w2.data
        inputs = [self.x, layer.experts.w1, layer.experts.w2, layer.router.weight]
        return Contestant(lambda: layer(self.x).y, inputs, self.dout, self.group.size == 1, layer)

    def _layer(self, config: MoEConfig) -> MoE:
        if self.device == "cuda":
            from random_layer import layer_without_experts

            return layer_without_experts(config, self.group, router_std=config.d**-0.5)
        return MoE(config, self.group, seed=0, dtype=torch.bfloat16)

    def plain_torch(self) -> Contestant:
        def forward() -> Tensor:
            tokens, ends, weights = self._pairs_by_expert()
            return grouped_mm_experts(self.x, self.w1, self.w2, tokens, ends, weights)

        return Contestant(forward, [self.x, self.w1, self.w2, self.router], self.dout)

    def plain_torch_across_ranks(self) -> Contestant:
        """A row a pair by all-to-all, sorted by expert where it arrives, and back. The host reads the counts."""
        S, e, group = self.group.size, self.w1.shape[0], dist.group.WORLD
        assert group is not None

        def exchanged(rows: Tensor, into: list[int], out: list[int]) -> Tensor:
            return all_to_all_single_autograd(rows, into, out, group)

        def forward() -> Tensor:
            tokens, ends, weights = self._pairs_by_expert()
            counts_SE = torch.diff(ends, prepend=ends.new_zeros(1)).view(S, e)  # to each rank's experts
            arriving_SE = torch.empty_like(counts_SE)  # from each rank
            dist.all_to_all_single(arriving_SE, counts_SE, group=group)
            out, into = torch.stack((counts_SE.sum(1), arriving_SE.sum(1))).tolist()
            rows = exchanged(self.x[tokens], into, out)
            experts = torch.arange(e, device=rows.device).repeat(S)
            order = experts.repeat_interleave(arriving_SE.flatten(), output_size=sum(into)).argsort(stable=True)
            h = torch._grouped_mm(rows[order], self.w1.mT, offs=arriving_SE.sum(0).cumsum(0).int())
            a = F.silu(h[:, ::2]) * h[:, 1::2]
            y = torch._grouped_mm(a, self.w2.mT, offs=arriving_SE.sum(0).cumsum(0).int())
            back = exchanged(torch.zeros_like(y).index_copy(0, order, y), out, into) * weights[:, None]
            return torch.zeros_like(self.x, dtype=torch.float32).index_add(0, tokens, back.float()).bfloat16()

        return Contestant(forward, [self.x, self.w1, self.w2, self.router], self.dout, capturable=False)

    def _pairs_by_expert(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens of all pairs in the order of their experts, the end of each expert, and the weights."""
        K, E = self.config.K, self.config.E
        weights_TK, ids_TK = F.linear(self.x, self.router).float().softmax(1).topk(K)
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        experts, order = ids_TK.flatten().sort(stable=True)
        ends = torch.searchsorted(experts, torch.arange(E, device=experts.device), right=True).int()
        return order // K, ends, weights_TK.flatten()[order]

    def sonic_moe(self) -> Contestant:
        forward = sonic_moe_layer(self.x, self.router, self.w1, self.w2, self.config.K)
        return Contestant(forward, [self.x, self.w1, self.w2, self.router], self.dout)
