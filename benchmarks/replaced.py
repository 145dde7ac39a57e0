"""Other values for attributes, for as long as something is measured."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(target: Any, **values: Any) -> Generator[None, None, None]:
    """Within it, these attributes of a module or class have these values."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
