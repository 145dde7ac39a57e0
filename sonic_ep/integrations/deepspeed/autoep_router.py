"""`SonicEPRouter`: AutoEP's TokenChoiceTopKRouter by our router's operations. Same experts and combine weights.

Scores, group limits, correction bias, normalisation and scale are the same. Among equal scores the smaller expert id is
chosen, while torch.topk may choose any. Token rounding, if set, follows: docs/token_rounding.md.

Legend: T tokens on this rank, H hidden size, E experts.
"""

from functools import partial

from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from torch import Tensor

from sonic_ep.config import MoEConfig
from sonic_ep.groups import EPGroup, Exchange
from sonic_ep.integrations.framework_experts import RouterTensors
from sonic_ep.routers.route import RoutingContext
from sonic_ep.routers.router import route
from sonic_ep.routing import Routing


class SonicEPRouter(TokenChoiceTopKRouter):
    """gate: Linear(H, E). e_score_correction_bias: (E,) or None; affects the experts of a token, not their weights."""

    def bind(self, config: MoEConfig) -> None:
        self.config = config

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x_TH: Tensor, group: EPGroup, exchange: Exchange
    ) -> RouterTensors:
        """Returns what is routed by. The other tensor of the route is this rank's (E,) int64 counts of plain top-K.

        T may differ between ranks. exchange: see RoutingContext.
        """
        tensors, bias_E = [self.gate(x_TH).float()], self.e_score_correction_bias
        if bias_E is not None:
            tensors.append(bias_E.detach().float())
        context = RoutingContext(
            config=self.config,
            group=group,
            dtype=x_TH.dtype,
            training=self.training,
            exchange=exchange,
        )
        return RouterTensors(tensors, partial(self._route, context))

    def _route(
        self, context: RoutingContext, logits_TE: Tensor, bias_E: Tensor | None = None
    ) -> tuple[Routing, list[Tensor]]:
        T = logits_TE.shape[0]
        # In place of rows, which it only hands on.
        routed = route(self, logits_TE, logits_TE, bias_E, context, sequence_length=T)
        return routed.routing, [routed.topk.counts_E()]
