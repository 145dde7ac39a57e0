"""sonic_ep in torchtitan: two overrides for its `override.imports`; no class is patched.

`sonic_ep.integrations.torchtitan.moe.routed_experts` computes the experts of every MoE here, and
`sonic_ep.integrations.torchtitan.moe.rounded_moe` rounds the routing too. `replay.replay_routing` lets a model take the
experts of each token. docs/torchtitan.md says what is supported. Tested with torchtitan 0.3.0.
"""

from sonic_ep.extras import require_extra

require_extra("torchtitan", "torchtitan")
