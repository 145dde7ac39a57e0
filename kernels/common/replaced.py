"""Replaces attributes of a class or module for a while, where kernels are compiled without launches or measured."""

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def replaced(target: object, **values: object) -> Generator[None, None, None]:
    """Inside this context the attributes of `target` that `values` names have these values.

    Raises AttributeError for an attribute that `target` does not have.
    """
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
