"""Where the host waits for the device."""

import warnings
from collections.abc import Callable

import torch

_WARM_UP = 4


def assert_nothing_waits(call: Callable[[], object]) -> None:
    """Run `call` until its kernels are compiled and its programs traced, and again under torch's watch.

    That raises where the host waits.
    """
    for _ in range(_WARM_UP):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
