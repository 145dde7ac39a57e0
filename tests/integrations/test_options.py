"""What the options of all frameworks refuse."""

import pytest

from sonic_ep import RoundingConfig, TransportConfig
from sonic_ep.integrations.options import SonicEPOptions


def test_batch_invariance_excludes_rounding_and_symmetric_memory() -> None:
    assert SonicEPOptions(batch_invariant=True).transport.batch_invariant
    for options, message in (
        ({"rounding": RoundingConfig()}, "^batch_invariant=True with rounding.mode='apportion' .*; set mode='off'"),
        ({"transport": TransportConfig(kind="symmetric")}, "^batch_invariant=True with transport.kind='symmetric'"),
    ):
        with pytest.raises(ValueError, match=message):
            SonicEPOptions(batch_invariant=True, **options)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("rounding", [None, RoundingConfig()], ids=["no rounding", "no capacity"])
def test_static_buffers_need_a_bound(rounding: RoundingConfig | None) -> None:
    static = TransportConfig(buffers="static")
    SonicEPOptions(transport=static, rounding=RoundingConfig(mode="off", capacity_factor=1.25))
    with pytest.raises(ValueError, match=r"^transport.buffers='static' needs a bound: set rounding.capacity_factor"):
        SonicEPOptions(transport=static, rounding=rounding)
