"""sonic_ep in DeepSpeed: `AutoEP.install()` before deepspeed.initialize, for `expert_parallel` configs."""

from sonic_ep.integrations.deepspeed.autoep import AutoEP
from sonic_ep.integrations.deepspeed.options import SonicEPOptions

__all__ = ["AutoEP", "SonicEPOptions"]
