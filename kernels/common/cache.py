"""The folder of this user's compiled files, which survives a reboot."""

import os
import stat
from pathlib import Path


def cache_folder() -> Path:
    """Returns $SONIC_EP_CACHE_DIR, by default ~/.cache/sonic_ep (or below $XDG_CACHE_HOME)."""
    chosen = os.environ.get("SONIC_EP_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "sonic_ep"


def quack_cache_folder() -> Path:
    """Returns the folder of quack's compiled kernels: $QUACK_CACHE_DIR, by default below `cache_folder`."""
    return Path(os.environ.get("QUACK_CACHE_DIR") or cache_folder() / "quack")


def problem_with_access(path: Path) -> str | None:
    """Returns why another user may have written what is at a path, or None. Code from there is not to be loaded.

    The group may write: with a umask of 002 it is the user's own.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    fix = "; give a folder of your own by SONIC_EP_CACHE_DIR or QUACK_CACHE_DIR"
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} with compiled code belongs to user {found.st_uid}, wanted root or user {os.geteuid()}{fix}"
    if found.st_mode & stat.S_IWOTH:
        return (
            f"{path} with compiled code has mode {found.st_mode & 0o777:o}: all may write; use chmod o-w, or{fix[1:]}"
        )
    return None


def problem_with_quack_cache() -> str | None:
    """Returns the problem with quack's folder or with one in it, or None."""
    folder = quack_cache_folder()
    return next(filter(None, map(problem_with_access, (folder, *folder.glob("*")))), None)
