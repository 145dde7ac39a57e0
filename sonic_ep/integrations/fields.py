"""`Field`: how our layer treats one field of a framework's config. Tables of them check and document the config."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a config.

    effect: how the layer treats it. how: one phrase for the table and for errors. accepts: True for values that are
    fine; None if all are. Other values are refused; if the field has no effect, they may cause a warning. set: what to
    set instead of them.
    """

    name: str
    effect: Literal["honoured", "no effect", "refused"]
    how: str
    accepts: Callable[[Any], bool] | None = None
    set: str = ""


def honoured(how: str, *names: str) -> tuple[Field, ...]:
    """Returns fields that are honoured, whatever their value."""
    return tuple(Field(name, "honoured", how) for name in names)
