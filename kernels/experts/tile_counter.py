"""Tile counters: the CTAs of a dynamic schedule fetch their next tile from one.

A counter must be zero when its kernel starts. There are three cases:
- A kernel that resets its counter to zero (see sm90/tile_prefetch.py) uses the counter of its stream, because kernels
  on a stream run one after another.
- Such a kernel under CUDA graph capture gets a counter of its own, because the graph may be replayed concurrently with
  kernels on that stream. It comes from a page that was zeroed before the capture, so the graph need not zero it.
- Any other kernel gets a new counter, which a separate kernel zeroes before every launch.
"""

import torch
from torch import Tensor

from sonic_ep.kernels.program.trace import Slot

_SIZE = 2  # values of a counter: the tile index, and tile_prefetch.py's count of clusters; quack uses only the first
_PAGE = 4096  # counters of a page, for all graphs of a device together; a graph of 60 layers takes about 400

# By device and stream.
_STREAM_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
# By device: the page for captured kernels, and how many of its counters are in use. A used one is never freed, because
# its graph may still exist.
_PAGES: dict[torch.device, Tensor] = {}
_NUM_USED: dict[torch.device, int] = {}


def tile_counter(like: Tensor, *, self_resetting: bool = False) -> Tensor:
    """Returns (2,) int32 zeros on the device of `like`. self_resetting: whether the kernel leaves them at zero."""
    if isinstance(like, Slot):
        assert self_resetting
        return like.trace.counter()  # type: ignore[return-value]
    if self_resetting and not like.is_meta:
        return _of_a_graph(like) if torch.cuda.is_current_stream_capturing() else _of_a_stream(like)
    return _new(like)


def _new(like: Tensor, *shape: int) -> Tensor:
    return like.new_zeros((*shape, _SIZE), dtype=torch.int32)


def _of_a_stream(like: Tensor) -> Tensor:
    if like.device not in _PAGES:
        _PAGES[like.device], _NUM_USED[like.device] = _new(like, _PAGE), 0
    key = like.device, torch._C._cuda_getCurrentRawStream(like.get_device())
    if key not in _STREAM_COUNTERS:
        _STREAM_COUNTERS[key] = _new(like)
    return _STREAM_COUNTERS[key]


def _of_a_graph(like: Tensor) -> Tensor:
    used = _NUM_USED.get(like.device, _PAGE)
    if used == _PAGE:  # the page is full, or no kernel ran before the capture: the graph zeroes the counter
        return _new(like)
    _NUM_USED[like.device] = used + 1
    return _PAGES[like.device][used]
