"""Triton kernels launched before the kernel in front of them on the stream has ended: programmatic dependent launches.

They begin when every CTA of that kernel allows it or is at its end, on multiprocessors that it leaves free. Those that
run beside it must not need its results. Whoever comes next on the stream waits for them, and must find that kernel at
its end too. Those that need its results wait first of all; then only the time that a launch takes is saved.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sonic_ep.kernels.common.launch import sm_major


def supports_pdl(device: torch.device) -> bool:
    """Has it such launches?"""
    return sm_major(device) >= 9


@triton.jit
def pdl_wait_and_trigger():
    """First in every program. From then on the next kernel may begin."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def pdl_last_program_waits():
    """Last in every program of a grid of one dimension: one of them waits."""
    if tl.program_id(0) == tl.num_programs(0) - 1:
        gdc_wait()
