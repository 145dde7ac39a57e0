"""`SonicEPOptions`: options that the frameworks' own configs have no fields for."""

from dataclasses import dataclass, field, replace
from typing import Literal

from sonic_ep.config import RoundingConfig, TransportConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class SonicEPOptions:
    """Options of one layer.

    rounding: token rounding in training; None: exactly the pairs that the framework's router chose.
    save_dispatched: save the R received rows for backward, instead of dispatching x a second time. With bf16 this takes
        2*R*d bytes more per layer.
    transport: see TransportConfig.
    quantised: what to do with a Megatron config in fp8 or fp4, of which the experts stay in params_dtype: "warn" once
        and train, or "refuse" it.
    record_launches: on GPUs, run the experts as programs, with little host time, where possible
        (docs/how_a_step_runs.md). False: always run their code.
    batch_invariant: a token's bits do not depend on the batch, nor on ep_size, from the router's results on
        (docs/batch_invariance.md). Megatron's `batch_invariant_mode` sets it.

    Raises ValueError for static buffers without rounding that has a capacity_factor, for batch invariance with rounding
    or over symmetric memory.
    """

    rounding: RoundingConfig | None = None
    save_dispatched: bool = False
    transport: TransportConfig = field(default_factory=TransportConfig)
    quantised: Literal["warn", "refuse"] = "warn"
    record_launches: bool = True
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "transport", replace(self.transport, batch_invariant=self.batch_invariant))
        self.transport.check_rounding(self.rounding)
