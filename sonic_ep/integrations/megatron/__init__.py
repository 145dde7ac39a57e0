"""sonic_ep in Megatron-Core: `use_sonic_ep(spec)` replaces the MoE in a layer or block spec by ours, and nothing else.

docs/megatron.md says what every MoE field of TransformerConfig does here. Tested with megatron-core 0.19.2.
"""

from sonic_ep.extras import require_extra

require_extra("megatron", "megatron.core")

from sonic_ep.integrations.megatron.layer import SonicEPMoELayer  # noqa: E402
from sonic_ep.integrations.megatron.spec import get_sonic_ep_moe_spec, use_sonic_ep  # noqa: E402
from sonic_ep.integrations.options import SonicEPOptions  # noqa: E402

__all__ = ["SonicEPMoELayer", "SonicEPOptions", "get_sonic_ep_moe_spec", "use_sonic_ep"]
