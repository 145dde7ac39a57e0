"""Checkpoints of models with experts on several ranks: `save` and `load`, and what torch's own checkpoints need.

`save` and `load` are loaded at their first use: every layer imports optimizers.py, and torch.distributed.checkpoint
takes a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sonic_ep.checkpoint.save_load import load as load
    from sonic_ep.checkpoint.save_load import save as save

__all__ = ["load", "save"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module("sonic_ep.checkpoint.save_load"), name)
    raise AttributeError(f"module 'sonic_ep.checkpoint' has no attribute {name!r}")
