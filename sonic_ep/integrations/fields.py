"""`Field`: how our layer treats one field of a framework's config. A table of them is checked, and printed in docs/.

docs/megatron.md, docs/deepspeed.md and docs/deepspeed_autoep.md have what `markdown` returns.
"""

import itertools
import warnings
from collections.abc import Callable, Iterable
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


def without_effect(how: str, **defaults: object) -> tuple[Field, ...]:
    """Returns fields that cause a warning if they are not at their default."""
    return tuple(
        Field(name, "no effect", how, lambda value, default=default: value == default, f"{name}={default!r}")
        for name, default in defaults.items()
    )


def check_field(field: Field, value: object, prefix: str = "") -> str | None:
    """Returns None if the layer accepts this value, or if it has no effect a phrase for `warn_of`.

    Raises ValueError, with field, value and fix, if the layer refuses it. prefix: of the name, in the error.
    """
    if field.accepts is None or field.accepts(value):
        return None
    if field.effect == "no effect":
        return f"{field.name}={value!r} ({field.how})"
    raise ValueError(f"{prefix}{field.name}={value!r} is not supported ({field.how}); set {field.set}")


def warn_of(ignored: Iterable[str | None], layer: str) -> None:
    """Warns of all that has no effect in our `layer`, at the line that builds the layer: three calls above this one."""
    found = [phrase for phrase in ignored if phrase is not None]
    if found:
        warnings.warn(f"without effect in sonic_ep's {layer}: {'; '.join(found)}", UserWarning, stacklevel=4)


def markdown(what: str, fields: Iterable[Field]) -> list[str]:
    """Returns the lines of a table. what: the head of its first column. Adjacent fields that differ only in name share
    a row. The last column is empty where every value is accepted or has no effect.
    """
    lines = [f"| {what} | here | how, or why not | instead of other values |", "|---|---|---|---|"]
    for (effect, how), alike in itertools.groupby(fields, lambda each: (each.effect, each.how)):
        group = list(alike)
        instead = ", ".join(field.set for field in group if field.set and effect != "no effect")
        lines.append(f"| {', '.join(f'`{field.name}`' for field in group)} | {effect} | {how} | {instead} |")
    return lines
