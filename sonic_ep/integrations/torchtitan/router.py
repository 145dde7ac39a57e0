"""`ScoringRouter`: torchtitan's router, which in training also hands the scores of all experts to the experts.

MoE.forward passes the router's weights on to the routed experts, and reads nothing of them. So the scores travel behind
the weights, in the same tensor: through torchtitan's sharding, recomputation and autograd as the weights do.

Legend: T tokens on this rank, B sequences, L tokens of a sequence, E experts, K experts per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common.moe import TokenChoiceTopKRouter

from sonic_ep.config import RouterConfig


class ScoringRouter(TokenChoiceTopKRouter):
    """The same routing. In training its first result has E or, with group limits, 2E more columns: see `split`."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def forward(self, x_BLD: Tensor, expert_bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns weights and more (B, L, K + ...), expert ids (B, L, K) int64, scores (B, L, E)."""
        weights_BLK, ids_BLK, scores_BLE = super().forward(x_BLD, expert_bias_E)
        if not self.training:
            return weights_BLK, ids_BLK, scores_BLE
        columns = [weights_BLK, scores_BLE]
        if self.num_expert_groups is not None:
            ranking_BLE = scores_BLE.detach() if expert_bias_E is None else scores_BLE.detach() + expert_bias_E
            limited_BLE = self._get_node_limited_routing_scores(ranking_BLE)  # -inf outside of the best groups
            columns.append(limited_BLE.isfinite().to(scores_BLE.dtype))
        return torch.cat(columns, -1), ids_BLK, scores_BLE


def split(columns_TC: Tensor, K: int, E: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the parts of what a `ScoringRouter` gives in training, of which C is K + E or K + 2E.

    They are the weights (T, K) and the scores (T, E), both differentiable, and (T, E) bool, the experts in each token's
    best groups, or None without group limits.
    """
    weights_TK, scores_TE, *others = columns_TC.split([K, E, *([E] if columns_TC.shape[1] > K + E else [])], 1)
    return weights_TK, scores_TE, others[0] > 0 if others else None


def router_config_of(config: TokenChoiceTopKRouter.Config) -> RouterConfig:
    """Returns how a pair that rounding adds gets its weight. Raises ValueError for another class of router."""
    if type(config) is not TokenChoiceTopKRouter.Config:
        raise ValueError(
            f"the router is a {type(config).__qualname__}, whose weights rounding does not know; use the override "
            "routed_experts, which does not round"
        )
    return RouterConfig(score=config.score_func, renormalize=config.route_norm, scale=config.route_scale)
