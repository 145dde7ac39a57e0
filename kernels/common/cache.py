"""The folder of this user's compiled files, which survives a reboot."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Returns $SONIC_EP_CACHE_DIR, by default ~/.cache/sonic_ep (or below $XDG_CACHE_HOME)."""
    chosen = os.environ.get("SONIC_EP_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "sonic_ep"


def quack_cache_folder() -> Path:
    """Returns the folder of quack's compiled kernels: $QUACK_CACHE_DIR, by default below `cache_folder`."""
    return Path(os.environ.get("QUACK_CACHE_DIR") or cache_folder() / "quack")
