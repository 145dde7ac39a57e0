"""Triton kernels that run beside the kernel in front of them on the stream: programmatic dependent launches.

They begin when every CTA of that kernel allows it or is at its end, on multiprocessors that it leaves free, and must
not need its results. Whoever comes next on the stream waits for them, and must find that kernel at its end too.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from sonic_ep.kernels.cuda.launch import major


def can_run_beside(device: torch.device) -> bool:
    return major(device) >= 9


@triton.jit
def end_after_the_kernel_before():
    """Last in every program of a grid of one dimension: one of them waits."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        gdc_wait()
