"""Where the CTAs of a dynamic schedule draw their next tile from.

Kernels that leave it as they found it, at zero (next_tile.py), share one a stream, on which they come one after the
other. Others get a new one, which a kernel of its own has to zero.
"""

import torch
from torch import Tensor

_SIZE = 2  # next_tile.py's; quack's own kernels need the first value alone

# By device and stream.
_KEPT: dict[tuple[torch.device, int], Tensor] = {}


def tile_counter(like: Tensor, *, kept: bool = False) -> Tensor:
    """(2,) int32 zeros on the device of `like`. kept: does the kernel leave them so?"""
    # A captured graph may run beside whatever the stream does then.
    if not kept or like.is_meta or torch.cuda.is_current_stream_capturing():
        return like.new_zeros(_SIZE, dtype=torch.int32)
    key = like.device, torch.cuda.current_stream(like.device).cuda_stream
    if key not in _KEPT:
        _KEPT[key] = like.new_zeros(_SIZE, dtype=torch.int32)
    return _KEPT[key]
