"""One layer's step of experts on GPUs, on a routing of its own: what transports are compared by."""

import torch
from torch import Tensor

from sonic_ep import EPGroup
from sonic_ep.dispatch.protocol import Transport
from sonic_ep.functional import moe
from sonic_ep.routing import Routing

NAMES = ("y", "dx", "dgates", "dw1", "dw2")


def routing_of(rank: int, group: EPGroup, T: int, E: int, K: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    scores_TE = torch.randn(T, E, generator=generator) + torch.linspace(0, 2, E)
    weights_TK, ids_TK = scores_TE.softmax(1).topk(K)
    token_ids = torch.arange(T).repeat_interleave(K)
    return Routing.from_pairs(
        token_ids.cuda(), ids_TK.flatten().cuda(), weights_TK.flatten().cuda(), num_tokens=T, E=E, group=group
    )


def expert_step(
    transport: Transport,
    group: EPGroup,
    routing: Routing,
    shape: tuple[int, int, int],
    *,
    saved: bool,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
) -> list[Tensor]:
    """NAMES: output and gradients of one layer of shape (d, n, e). Its values are those of bfloat16 in any dtype."""
    d, n, e = shape
    generator = torch.Generator("cuda").manual_seed(seed + 10 * group.rank)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator) * scale).to(dtype)

    x, dout = draw(routing.num_tokens, d), draw(routing.num_tokens, d)
    w1, w2 = draw(e, 2 * n, d, scale=d**-0.5), draw(e, d, n, scale=n**-0.5)
    pair_weights = routing.weights_N.detach().requires_grad_()
    leaves = [x.requires_grad_(), pair_weights, w1.requires_grad_(), w2.requires_grad_()]
    trained = Routing(pair_weights, routing.token_ids_N, routing.counts, routing.num_tokens, routing.max_rows)
    y = moe(x, trained, w1, w2, transport=transport, group=group, save_dispatched=saved)
    return [y.detach(), *torch.autograd.grad(y, leaves, dout)]
