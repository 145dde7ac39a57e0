"""sonic_ep in Megatron-Core: `use_sonic_ep(layer_spec)` swaps the MoE of a layer or block spec for ours, nothing else.

docs/megatron.md says what every MoE field of TransformerConfig does here. Tried with megatron-core 0.16.1.
"""

from sonic_ep.integrations.megatron.layer import SonicEPMoELayer
from sonic_ep.integrations.megatron.spec import get_sonic_ep_moe_spec, use_sonic_ep
from sonic_ep.integrations.options import SonicEPOptions

__all__ = ["SonicEPMoELayer", "SonicEPOptions", "get_sonic_ep_moe_spec", "use_sonic_ep"]
