"""What benchmarks on several GPUs share: a random routing; times and memory of a layer and of a training step.

Each rank measures, the slowest counts.
"""

import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sonic_ep import EPGroup, Routing

_MIB = 2**20
BACKLOG = 10_000_000  # cycles, some milliseconds


def measure_layer(
    layer: Callable[[Tensor], Tensor],
    parameters: Iterable[Tensor],
    x: Tensor,
    dout: Tensor,
    *,
    backlog: int = 0,
) -> dict[str, float]:
    """One forward and backward, and what is kept between the two beside the output."""
    inputs = [x, *(parameter for parameter in parameters if parameter.requires_grad)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    forward_ms, out = timed(lambda: layer(x), backlog=backlog)
    saved = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    backward_ms, _ = timed(lambda: torch.autograd.grad(out, inputs, dout, allow_unused=True), backlog=backlog)
    return {"forward_ms": forward_ms, "backward_ms": backward_ms, "kept_mib": saved / _MIB}


def measure_step(step: Callable[[], Any]) -> dict[str, float]:
    """One training step, and the most that it allocates."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms, _ = timed(step)
    return {"step_ms": ms, "peak_mib": (torch.cuda.max_memory_allocated() - before) / _MIB}


def summary(samples: list[dict[str, float]]) -> dict[str, float]:
    """Medians over samples, then the largest of all ranks."""
    names = list(samples[0])
    values = torch.tensor([statistics.median(sample[name] for sample in samples) for name in names], device="cuda")
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(names, values.tolist(), strict=True))


def timed(call: Callable[[], Any], *, backlog: int = 0) -> tuple[float, Any]:
    """Milliseconds from when all ranks are ready to when this one's device is done, and the result.

    backlog: cycles for which the devices are busy first, so that launches are hidden, as in the middle of a model.
    """
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    dist.barrier()
    torch.cuda.synchronize()
    if backlog:
        torch.cuda._sleep(backlog)
        dist.all_reduce(torch.zeros(1, device="cuda"))  # devices do not sleep equally long
    start.record()
    result = call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop), result


def slowest(time: float, group: EPGroup) -> float:
    """The largest of all ranks."""
    return float(group.all_gather(torch.tensor([time], dtype=torch.float64, device="cuda")).max())


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """Replays a CUDA graph of the call."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        call()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def topk_routing(T: int, E: int, K: int, group: EPGroup, generator: torch.Generator, skew: float = 0.0) -> Routing:
    """Plain top-K of random scores. skew: how much likelier the last expert is than the first, in logits."""
    scores_TE = torch.randn(T, E, device="cuda", generator=generator) + torch.linspace(0, skew, E, device="cuda")
    weights_TK, ids_TK = scores_TE.softmax(1).topk(K)
    tokens = torch.arange(T, device="cuda").repeat_interleave(K)
    return Routing.from_pairs(tokens, ids_TK.flatten(), weights_TK.flatten(), num_tokens=T, E=E, group=group)
