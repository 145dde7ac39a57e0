"""The clocks of all benchmarks: of a host and its device, on one rank or on several, of which the slowest counts."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from sonic_ep import EPGroup

BACKLOG = 10_000_000  # cycles, some milliseconds
GRAPHED, REPLAYS = 10, 20  # calls in a graph, and replays of it


class Clock:
    """Milliseconds by the host's clock. It starts when all ranks and the device are ready. device: cuda or cpu."""

    def __init__(self, group: EPGroup, device: str) -> None:
        self.group, self.device = group, device

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def ready(self) -> None:
        self.wait()
        if self.group.size > 1:
            dist.barrier()
            self.wait()

    def largest(self, values: dict[str, float]) -> dict[str, float]:
        of_ranks = self.group.all_gather_object(values)
        return {name: max(each[name] for each in of_ranks if name in each) for name in values}

    def back_to_back(self, call: Callable[[], object], times: int, *, untimed: int = 0) -> tuple[float, float]:
        """Returns milliseconds a call until all are done, and until the calls return. untimed: calls before these."""
        for _ in range(untimed):
            call()
        self.ready()
        start = time.perf_counter()
        for _ in range(times):
            call()
        host = time.perf_counter() - start
        self.wait()
        return 1000 * (time.perf_counter() - start) / times, 1000 * host / times


def device_ms(call: Callable[[], Any], *, backlog: int = 0) -> tuple[float, Any]:
    """Returns milliseconds from when all ranks are ready to when this one's device is done, and the result.

    backlog: cycles for which the devices are busy first, so that launches are hidden, as in the middle of a model.
    """
    if dist.is_initialized():
        dist.barrier()
    torch.cuda.synchronize()
    if backlog:
        torch.cuda._sleep(backlog)
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1, device="cuda"))  # devices do not sleep equally long
    return _elapsed_ms(call)


def _elapsed_ms(call: Callable[[], Any]) -> tuple[float, Any]:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    result = call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop), result


def medians_ms(
    calls: Mapping[str, Callable[[], object]], rounds: int, *, backlog: int, untimed: int = 2
) -> dict[str, float]:
    """Returns median milliseconds of each of the calls, which take turns. untimed: rounds before these."""
    times = [
        {name: device_ms(call, backlog=backlog)[0] for name, call in calls.items()} for _ in range(untimed + rounds)
    ]
    return {name: statistics.median(each[name] for each in times[untimed:]) for name in calls}


def captured(call: Callable[[], object], calls: int = 1) -> Callable[[], None]:
    """Returns what replays a CUDA graph of so many calls."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def captured_us(call: Callable[[], object]) -> float:
    """Returns median microseconds of the device, launches left out. Buffers of a graph may stay in the L2 cache."""
    return eager_us(captured(call, GRAPHED)) / GRAPHED


def eager_us(call: Callable[[], object]) -> float:
    """Returns median microseconds of one call after another, launches and waits included."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    return statistics.median(1000 * _elapsed_ms(call)[0] for _ in range(REPLAYS))


def slowest(value: float, group: EPGroup) -> float:
    """Returns the largest of all ranks."""
    return float(group.all_gather(torch.tensor([value], dtype=torch.float64, device="cuda")).max())
