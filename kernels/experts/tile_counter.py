"""Where the CTAs of a dynamic schedule draw their next tile from.

Kernels that leave it at zero, as they found it (see tile_prefetch.py), share one a stream, on which they come one after
the other. A captured kernel has one for itself, as its graph may be replayed beside whatever the stream does then: out
of a page that was zeroed before, so that no graph has to. Others get a new one, which a kernel of its own must zero.
"""

import torch
from torch import Tensor

_SIZE = 2  # tile_prefetch.py's; quack's own kernels need the first value alone
_PAGE = 4096  # counters; a graph of 60 layers has some 400

# By device and stream.
_STREAM_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
# By device: counters of captured kernels, and how many of them are taken. They stay so, graphs may live on.
_PAGES: dict[torch.device, Tensor] = {}
_NUM_USED: dict[torch.device, int] = {}


def tile_counter(like: Tensor, *, self_resetting: bool = False) -> Tensor:
    """(2,) int32 zeros on the device of `like`. kept: does the kernel leave them so?"""
    if self_resetting and not like.is_meta:
        return _of_a_graph(like) if torch.cuda.is_current_stream_capturing() else _of_a_stream(like)
    return _new(like)


def _new(like: Tensor, *shape: int) -> Tensor:
    return like.new_zeros((*shape, _SIZE), dtype=torch.int32)


def _of_a_stream(like: Tensor) -> Tensor:
    if like.device not in _PAGES:
        _PAGES[like.device], _NUM_USED[like.device] = _new(like, _PAGE), 0
    key = like.device, torch.cuda.current_stream(like.device).cuda_stream
    if key not in _STREAM_COUNTERS:
        _STREAM_COUNTERS[key] = _new(like)
    return _STREAM_COUNTERS[key]


def _of_a_graph(like: Tensor) -> Tensor:
    used = _NUM_USED.get(like.device, _PAGE)
    if used == _PAGE:  # all, or nothing has run before the capture: the graph zeroes it
        return _new(like)
    _NUM_USED[like.device] = used + 1
    return _PAGES[like.device][used]
