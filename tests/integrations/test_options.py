"""What the options of all frameworks refuse."""

import pytest

from sonic_ep import RoundingConfig, TransportConfig
from sonic_ep.integrations.options import SonicEPOptions


@pytest.mark.parametrize("rounding", [None, RoundingConfig()], ids=["no rounding", "no capacity"])
def test_static_buffers_need_a_bound(rounding: RoundingConfig | None) -> None:
    static = TransportConfig(buffers="static")
    SonicEPOptions(transport=static, rounding=RoundingConfig(mode="off", capacity_factor=1.25))
    with pytest.raises(ValueError, match=r"^transport.buffers='static' needs a bound: set rounding.capacity_factor"):
        SonicEPOptions(transport=static, rounding=rounding)
