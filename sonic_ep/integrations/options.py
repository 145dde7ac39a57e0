"""What no framework's own configuration has a field for."""

from dataclasses import dataclass

from sonic_ep.config import RoundingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SonicEPOptions:
    """rounding: token rounding in training; None keeps exactly the pairs that the framework's router chose.

    keep_dispatched: keep the received rows for backward instead of sending x a second time (2*U*d bytes more a layer,
    one dispatch less).
    """

    rounding: RoundingConfig | None = None
    keep_dispatched: bool = False
