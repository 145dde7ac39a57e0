"""`SonicEPRouter`: the choice and the weights of AutoEP's TokenChoiceTopKRouter, by our router's operations.

The same scores, group limits, correction bias, normalisation and scale; among equal scores the expert with the smaller
number, where torch.topk takes any. With token rounding, the group's decision follows: docs/token_rounding.md.

Legend: T tokens and H hidden size on this rank, E experts.
"""

from deepspeed.moe.ep_router import TokenChoiceTopKRouter
from torch import Tensor

from sonic_ep.config import MoEConfig
from sonic_ep.groups import EPGroup
from sonic_ep.routers.decision import Situation, decide_selection
from sonic_ep.routers.outputs import weights_and_losses
from sonic_ep.routers.topk import Choice, choose
from sonic_ep.routing import Routing


class SonicEPRouter(TokenChoiceTopKRouter):
    """gate: Linear(H, E). e_score_correction_bias: (E,) or None; it takes part in the choice alone."""

    def bind(self, config: MoEConfig) -> None:
        self.config = config

    def forward(self, x_TH: Tensor, group: EPGroup) -> tuple[Routing, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The routing, and this rank's (E,) int64 counts of plain top-K. A collective of `group`; T may differ."""
        logits_TE = self.gate(x_TH).float()
        bias_E = self.e_score_correction_bias
        bias_E = None if bias_E is None else bias_E.detach().float()
        choice = choose(logits_TE, bias_E, self.config.K, self.config.router)
        counts_E = choice.counts_E()
        situation = Situation(config=self.config, group=group, dtype=x_TH.dtype, training=self.training)
        selection = decide_selection(self, choice, counts_E.new_zeros(counts_E.shape), situation)
        if selection.topk_ids_TK is not choice.topk_ids_TK:  # replayed
            choice = Choice(choice.scores_TE, choice.ranking_TE, choice.allowed_TE, selection.topk_ids_TK)
        gates_N, _ = weights_and_losses(logits_TE, choice, selection, x_TH.shape[0], self.config.router)
        routing = Routing(gates_N, selection.token_ids_N, selection.counts, x_TH.shape[0], selection.most_rows)
        return routing, counts_E
