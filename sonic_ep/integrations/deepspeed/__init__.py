"""sonic_ep in DeepSpeed: `MoE` stands in for deepspeed.moe.layer.MoE.

docs/deepspeed.md says what every argument does here. Tried with deepspeed 0.19.8.
"""

from sonic_ep.integrations.deepspeed.moe import MoE
from sonic_ep.integrations.options import SonicEPOptions

__all__ = ["MoE", "SonicEPOptions"]
