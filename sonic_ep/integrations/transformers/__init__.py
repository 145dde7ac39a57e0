"""sonic_ep in Hugging Face transformers: `register()` adds the name "sonic_ep" to its public registries.

Models built with `experts_implementation="sonic_ep"` then compute their experts here. Those built with
`DistributedConfig(ep_implementation="sonic_ep")` also reach the experts of other ranks by our dispatch and combine. No
class is patched. docs/transformers.md has the families of models. Tested with transformers 5.19 to 5.24.
"""

from sonic_ep.extras import require_extra

require_extra("transformers", "transformers")

from sonic_ep.integrations.options import SonicEPOptions  # noqa: E402
from sonic_ep.integrations.transformers.batch_fields import (  # noqa: E402
    recorded_experts,
    replay_routing,
    skip_padding,
)
from sonic_ep.integrations.transformers.check import check  # noqa: E402
from sonic_ep.integrations.transformers.lora import fuse_lora  # noqa: E402
from sonic_ep.integrations.transformers.register import register  # noqa: E402
from sonic_ep.integrations.transformers.rounding import round_tokens  # noqa: E402

__all__ = [
    "SonicEPOptions",
    "check",
    "fuse_lora",
    "recorded_experts",
    "register",
    "replay_routing",
    "round_tokens",
    "skip_padding",
]
