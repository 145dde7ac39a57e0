"""sonic_ep in DeepSpeed: `MoE` replaces deepspeed.moe.layer.MoE, and `AutoEP` makes DeepSpeed's AutoEP use our layer.

Call `AutoEP.install()` before deepspeed.initialize; Hugging Face models with an `expert_parallel` config then get our
layer. docs/deepspeed.md and docs/deepspeed_autoep.md say what every argument and field does here. Tested with deepspeed
0.19.8.
"""

from sonic_ep.extras import require_extra

require_extra("deepspeed", "deepspeed")

from sonic_ep.integrations.deepspeed.autoep import AutoEP  # noqa: E402
from sonic_ep.integrations.deepspeed.moe import MoE  # noqa: E402
from sonic_ep.integrations.options import SonicEPOptions  # noqa: E402

__all__ = ["AutoEP", "MoE", "SonicEPOptions"]
