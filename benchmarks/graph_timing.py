"""Microseconds of one call on one GPU: of the device alone, in a CUDA graph, or with launches and waits."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

CALLS, ROUNDS = 10, 20


def captured(call: Callable[[], Any]) -> float:
    """Median device time, launches left out: ten calls in a graph, whose buffers may stay in the L2 cache."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return _median(graph.replay) / CALLS


def eager(call: Callable[[], Any]) -> float:
    """Median of one call after another, launches and waits included."""
    for _ in range(3):
        call()
    return _median(call)


def _median(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(ROUNDS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(stop))
    return statistics.median(times)
