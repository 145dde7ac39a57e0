"""Programmatic dependent launch (PDL): a Triton kernel starts before the previous kernel on its stream has ended.

It starts once every CTA of the previous kernel has triggered or exited, on the SMs that are free. It has two uses:

* Hide the launch latency. A kernel that needs the previous kernel's results calls `pdl_wait_and_trigger` first.
* Overlap. A kernel that does not need those results runs concurrently with the previous kernel and calls
  `pdl_last_program_waits` last. It then ends after the previous kernel, so the next kernel on the stream, which waits
  for this one alone, finds both complete.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sonic_ep.kernels.common.launch import sm_major


def supports_pdl(device: torch.device) -> bool:
    """Returns True if the device has programmatic dependent launch: compute capability 9.0 or later."""
    return sm_major(device) >= 9


@triton.jit
def pdl_wait_and_trigger():
    """Waits for the previous kernel, then lets the next one start. Call it first in every program."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def pdl_last_program_waits():
    """Makes the last program of a one-dimensional grid wait for the previous kernel. Call it last in every program."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        gdc_wait()
