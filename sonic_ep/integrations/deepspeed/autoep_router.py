"""`SonicEPRouter`: AutoEP's TokenChoiceTopKRouter by our router's operations. Same experts and combine weights.

Scores, group limits, correction bias, normalisation and scale are the same. Among equal scores the smaller expert id is
chosen, while torch.topk may choose any. Token rounding, if set, follows: docs/token_rounding.md.

Legend: T tokens on this rank, H hidden size, E experts.
"""

from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from torch import Tensor

from sonic_ep.config import MoEConfig
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.routers.route import RoutingContext
from sonic_ep.routers.router import Routed, route


class SonicEPRouter(TokenChoiceTopKRouter):
    """gate: Linear(H, E). e_score_correction_bias: (E,) or None; affects the experts of a token, not their weights."""

    def bind(self, config: MoEConfig) -> None:
        self.config = config

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the logits, (T, E) fp32, and the correction bias, (E,) fp32, or None.

        The routing follows outside of this module, around which ZeRO gathers and frees the parameters.
        """
        bias_E = self.e_score_correction_bias
        return self.gate(x_TH).float(), None if bias_E is None else bias_E.detach().float()

    def route(
        self, logits_TE: Tensor, bias_E: Tensor | None, x_TH: Tensor, group: EPGroup, exchange: Exchange
    ) -> Routed:
        """Routes from what forward returned. A collective. T may differ between ranks. exchange: see RoutingContext."""
        config, dtype, training = self.config, x_TH.dtype, self.training
        context = RoutingContext(config=config, group=group, dtype=dtype, training=training, exchange=exchange)
        return route(self, x_TH, logits_TE, bias_E, context, sequence_length=x_TH.shape[0])
