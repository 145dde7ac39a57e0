"""sonic_ep in DeepSpeed: `MoE` stands in for deepspeed.moe.layer.MoE; `AutoEP.install()`, called before
deepspeed.initialize, puts our layer into Hugging Face models with an `expert_parallel` config.

docs/deepspeed.md says what every argument and field does here. Tried with deepspeed 0.19.8.
"""

from sonic_ep.extras import require_extra

require_extra("deepspeed", "deepspeed")

from sonic_ep.integrations.deepspeed.autoep import AutoEP  # noqa: E402
from sonic_ep.integrations.deepspeed.moe import MoE  # noqa: E402
from sonic_ep.integrations.options import SonicEPOptions  # noqa: E402

__all__ = ["AutoEP", "MoE", "SonicEPOptions"]
