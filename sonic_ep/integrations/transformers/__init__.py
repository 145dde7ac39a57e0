"""sonic_ep in Hugging Face transformers: `register()` adds the name "sonic_ep" to its public registry of experts.

Models built with `experts_implementation="sonic_ep"` then compute their experts here. No class is patched.
docs/transformers.md has the families of models. Tested with transformers 5.19 and 5.24.
"""

from sonic_ep.extras import require_extra

require_extra("transformers", "transformers")

from sonic_ep.integrations.options import SonicEPOptions  # noqa: E402
from sonic_ep.integrations.transformers.check import check  # noqa: E402
from sonic_ep.integrations.transformers.register import register  # noqa: E402

__all__ = ["SonicEPOptions", "check", "register"]
