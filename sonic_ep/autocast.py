"""The state of autocast: what it is, and a context with another."""

from contextlib import AbstractContextManager

import torch

from sonic_ep.kernels.program.program import without_autocast


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype of autocast, or None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def autocast_to(dtype: torch.dtype | None, device_type: str) -> AbstractContextManager[object]:
    """Returns a context with autocast to this dtype, or without autocast for None."""
    return without_autocast(device_type) if dtype is None else torch.autocast(device_type, dtype=dtype)
