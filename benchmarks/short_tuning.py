"""quack's autotuning in fewer launches, for GEMMs of milliseconds.

quack 0.6.5 launches every candidate tile at least 253 times. Of a GEMM that takes 10 ms and has some 60 candidates that
is minutes, and a shape has six. Here a candidate is warm after 0.1 s, at least 5 launches, and timed for 0.2 s, at
least 20, as there by replaying one CUDA graph over operands that take turns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import quack.autotuner
import torch

PRIMING, WARM_UP, TIMED, MOST = 3, 5, 20, 200  # launches
WARM_UP_MS, TIMED_MS = 100, 200


def _bench(
    fn: Callable[..., Any],
    arg_sets: Sequence[Any],
    kwarg_sets: Sequence[Any],
    extra_kwargs: dict[str, Any],
    quantiles: Sequence[float] | None = None,
) -> float | list[float]:
    """Milliseconds a call, as often as there are quantiles: the signature of quack.bench.bench_utils."""

    def call(turn: int) -> None:
        chosen = turn % len(arg_sets)
        fn(*arg_sets[chosen], **kwarg_sets[chosen], **extra_kwargs)

    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for turn in range(PRIMING):
        call(turn)
    torch.cuda.synchronize()
    start.record()
    call(0)
    stop.record()
    torch.cuda.synchronize()
    estimate_ms = max(start.elapsed_time(stop), 0.01)
    for turn in range(min(MOST, max(WARM_UP, int(WARM_UP_MS / estimate_ms)))):
        call(turn)
    torch.cuda.synchronize()
    launches = min(MOST, max(TIMED, int(TIMED_MS / estimate_ms)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(launches):
            call(turn)
    torch.cuda.synchronize()
    start.record()
    graph.replay()
    stop.record()
    torch.cuda.synchronize()
    ms = start.elapsed_time(stop) / launches
    return [ms for _ in quantiles] if quantiles else ms


def tune_in_short() -> None:
    """From now on, in this process."""
    quack.autotuner._bench_cuda_graph_l2_rotate = _bench
