"""Calls that tell in which order they were made."""

from contextlib import AbstractContextManager
from typing import Any, TypeVar
from unittest.mock import patch

Notes = TypeVar("Notes", str, list[str])


def noting(notes: list[Notes], note: Notes, dst: Any, attribute: str) -> AbstractContextManager[Any]:
    """Meanwhile every call of `dst.attribute` adds `note` to the last of `notes` first."""
    call = getattr(dst, attribute)

    def noted(*args: Any, **options: Any) -> Any:
        notes[-1] += note
        return call(*args, **options)

    return patch.object(dst, attribute, noted)
