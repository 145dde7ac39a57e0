"""What no framework's own configuration has a field for."""

from dataclasses import dataclass, field

from sonic_ep.config import RoundingConfig, TransportConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SonicEPOptions:
    """rounding: token rounding in training; None keeps exactly the pairs that the framework's router chose.

    save_dispatched: keep the received rows for backward instead of sending x a second time (2*R*d bytes more a layer,
    one dispatch less). transport: how rows travel between ranks; static buffers need rounding with a capacity_factor.

    Raises ValueError for static buffers without it.
    """

    rounding: RoundingConfig | None = None
    save_dispatched: bool = False
    transport: TransportConfig = field(default_factory=TransportConfig)

    def __post_init__(self) -> None:
        self.transport.check_bound(self.rounding)
