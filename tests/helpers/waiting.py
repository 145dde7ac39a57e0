"""Where the host waits for the device."""

import warnings
from collections.abc import Callable

import torch


def assert_nothing_waits(call: Callable[[], object]) -> None:
    """Run `call` once, to compile its kernels, and again under torch's watch: it raises where the host waits."""
    call()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
