"""Parts of the benchmarks of layers: a random routing; times and memory of a layer and of a training step."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sonic_ep import EPGroup, Routing
from timing import device_ms

_MIB = 2**20


def measure_layer(
    forward: Callable[[], Tensor], inputs: Iterable[Tensor], dout: Tensor, *, backlog: int = 0
) -> dict[str, float]:
    """Returns figures of one forward and backward.

    kept_mib: what is kept between the two beside inputs, weights and output. backward_peak_mib: the most that backward
    holds beside them and the gradients that it returns.
    """
    wanted = [each for each in inputs if each.requires_grad]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    forward_ms, out = device_ms(forward, backlog=backlog)
    after = torch.cuda.memory_allocated()
    saved = after - before - out.numel() * out.element_size()
    torch.cuda.reset_peak_memory_stats()
    backward_ms, grads = device_ms(lambda: torch.autograd.grad(out, wanted, dout, allow_unused=True), backlog=backlog)
    returned = sum(grad.numel() * grad.element_size() for grad in grads if grad is not None)
    peak = saved + torch.cuda.max_memory_allocated() - after - returned
    times = {"forward_ms": forward_ms, "backward_ms": backward_ms}
    return {**times, "kept_mib": saved / _MIB, "backward_peak_mib": peak / _MIB}


def measure_step(step: Callable[[], Any]) -> dict[str, float]:
    """One training step, and the most that it allocates."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms, _ = device_ms(step)
    return {"step_ms": ms, "peak_mib": (torch.cuda.max_memory_allocated() - before) / _MIB}


def summary(samples: list[dict[str, float]]) -> dict[str, float]:
    """Medians over samples, and the largest of all ranks."""
    names = list(samples[0])
    values = torch.tensor([statistics.median(sample[name] for sample in samples) for name in names], device="cuda")
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(names, values.tolist(), strict=True))


def topk_routing(T: int, E: int, K: int, group: EPGroup, generator: torch.Generator, skew: float = 0.0) -> Routing:
    """Plain top-K of random scores. skew: how much likelier the last expert is than the first, in logits."""
    scores_TE = torch.randn(T, E, device="cuda", generator=generator) + torch.linspace(0, skew, E, device="cuda")
    weights_TK, ids_TK = scores_TE.softmax(1).topk(K)
    tokens = torch.arange(T, device="cuda").repeat_interleave(K)
    return Routing.from_pairs(tokens, ids_TK.flatten(), weights_TK.flatten(), num_tokens=T, E=E, group=group)
