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
from sonic_ep.routers.router import route
from sonic_ep.routing import Routing


class SonicEPRouter(TokenChoiceTopKRouter):
    """gate: Linear(H, E). e_score_correction_bias: (E,) or None; affects the experts of a token, not their weights."""

    def bind(self, config: MoEConfig) -> None:
        self.config = config

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_TH: Tensor, group: EPGroup, exchange: Exchange
    ) -> tuple[Routing, Tensor]:
        """Returns the routing, and this rank's (E,) int64 counts of plain top-K. A collective of `group`.

        T may differ between ranks. exchange: see RoutingContext.
        """
        logits_TE = self.gate(x_TH).float()
        bias_E = self.e_score_correction_bias
        bias_E = None if bias_E is None else bias_E.detach().float()
        context = RoutingContext(
            config=self.config,
            group=group,
            dtype=x_TH.dtype,
            training=self.training,
            exchange=exchange,
        )
        routed = route(self, x_TH, logits_TE, bias_E, None, context, sequence_length=x_TH.shape[0])
        return routed.routing, routed.topk.counts_E()
