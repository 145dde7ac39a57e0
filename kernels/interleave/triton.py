"""`interleaved` as one Triton kernel.

torch's copies of several tensors into one leave in their unused parameters what the host's stack held, so that a
recording of launches cannot tell them from addresses (kernels/launch_sequence/addresses.py).

Legend: e local experts, I expert width, J pre-activation columns (2I if gated else I), H hidden size.
"""

import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import next_power_of_2

_MAX_BLOCK = 4096


@fast_launch
@triton.jit
def _interleaved(gate_ptr, up_ptr, out_ptr, stride_e, I, H, BLOCK: tl.constexpr):  # noqa: E741
    """Copies one row of gate and one of up.

    A program reads gate and up (e, I, H), of which an expert follows the last one after `stride_e` elements, and writes
    out (e, 2 I, H). Grid: (e * I,). Example: see reference.py.
    """
    row = tl.program_id(0).to(tl.int64)
    source, out = row // I * stride_e + row % I * H, 2 * row * H
    for start in range(0, H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < H
        tl.store(out_ptr + out + at, tl.load(gate_ptr + source + at, mask=inside), mask=inside)
        tl.store(out_ptr + out + H + at, tl.load(up_ptr + source + at, mask=inside), mask=inside)


def interleaved(gate_eIH: Tensor, up_eIH: Tensor) -> Tensor:
    """See kernels/interleave/reference.py."""
    e, I, H = gate_eIH.shape  # noqa: E741
    assert gate_eIH.stride() == up_eIH.stride() == (gate_eIH.stride(0), H, 1)
    out_eJH = gate_eIH.new_empty(e, 2 * I, H)
    if out_eJH.numel():
        block = min(_MAX_BLOCK, next_power_of_2(H))
        _interleaved[(e * I,)](gate_eIH, up_eIH, out_eJH, gate_eIH.stride(0), I, H, BLOCK=block)
    return out_eJH
