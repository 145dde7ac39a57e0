"""What our layer makes of a field of a framework's config: the rows of the tables that check and document it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Field:
    """One field. accepts: of which values `effect` is said, None for all; set: what to set instead of any other, which
    is refused or, where the field has no effect, may be warned of."""

    name: str
    effect: Literal["honoured", "no effect", "refused"]
    how: str
    accepts: Callable[[Any], bool] | None = None
    set: str = ""


def honoured(how: str, *names: str) -> tuple[Field, ...]:
    """Fields honoured whatever their value."""
    return tuple(Field(name, "honoured", how) for name in names)
