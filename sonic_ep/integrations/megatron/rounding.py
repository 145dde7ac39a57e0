"""Token rounding after Megatron's router: the router computes top-K, then rounding removes pairs and adds others.

Auxiliary losses, z-loss and the counts for the expert bias are the router's, of plain top-K. A top-K pair that remains
has the weight that the router gave it. A pair that rounding added has its own softmax probability as weight, or its
sigmoid score divided by the token's top-K sum. Source: SonicMoE, arXiv 2512.14080, section 5; docs/token_rounding.md.

Legend: O tokens with padding, T tokens on this rank, E experts, K experts per token, g expert groups.
"""

from typing import Any, final

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from sonic_ep.config import RoundingConfig, RouterConfig
from sonic_ep.integrations.megatron.routing_map import topk_ids
from sonic_ep.integrations.rounded_routing import rounded_routing
from sonic_ep.integrations.topk_routing import config_of
from sonic_ep.kernels.route.topk.reference import scores_of, topk_mask
from sonic_ep.routers.given_routing import GivenRouting
from sonic_ep.routers.topk_pairs import GivenTopK, RouterCall
from sonic_ep.routing import Routing
from sonic_ep.steps.experts_step import RunsAs


@final
class RoundedRouter:
    """Rounds the result of `router`, a TopKRouter. Replaces its method `routing`, to read the logits that it gets."""

    def __init__(self, router: Any, config: TransformerConfig, rounding: RoundingConfig) -> None:
        E, K, score = config.num_moe_experts, config.moe_router_topk, config.moe_router_score_function
        assert E is not None
        assert score != "sqrtsoftplus"  # refused by fields.py
        self.router, self.config = router, config
        router_config = RouterConfig(score=score, renormalize=score == "sigmoid" and K > 1)  # for added pairs
        self.moe_config = config_of(E, K, router_config, rounding)
        self._logits: Tensor | None = None
        routing = router.routing

        def routing_with_logits(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
            if router.training:
                self._logits = logits
            return routing(logits, *args, **kwargs)

        router.routing = routing_with_logits

    def routing(
        self,
        probs_TE: Tensor,
        routing_map_TE: Tensor,
        given: GivenRouting,
        call: RouterCall,
        runs_as: RunsAs | None = None,
    ) -> Routing:
        """Returns the rounded routing of the router's last results. For training only. A collective of the EP group.

        Differentiable in probs and, for added pairs, in the logits. given: the padding that the results are without.
        """
        logits, self._logits = self._logits, None
        assert logits is not None
        logits_TE = given.take(logits.flatten(0, -2))
        scores_TE = scores_of(logits_TE.float(), self.moe_config.router)
        bias_E = self.router.expert_bias
        ranking_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
        # If softmax comes after top-K, Megatron's group limits rank the logits.
        by_logits = self.moe_config.router.score == "softmax" and not self.config.moe_router_pre_softmax
        allowed_TE = self._allowed(logits_TE.detach() if by_logits else ranking_TE)
        ids_TK = topk_ids(routing_map_TE, self.moe_config.K)
        given_topk = GivenTopK(ids_TK, probs_TE, scores_TE, allowed_TE, by_expert=True)
        scale = float(self.config.moe_router_topk_scaling_factor or 1)
        return rounded_routing(self.router, given_topk, self.moe_config, call, scale=scale, runs_as=runs_as)

    def _allowed(self, values_TE: Tensor) -> Tensor | None:
        """Returns (T, E) bool: the experts of each token's best groups, as in Megatron's group_limited_topk.

        None without group limits. values_TE: what the router passes to that function: logits, or scores with expert
        bias.
        """
        groups, groups_per_token = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        if not groups or not groups_per_token:
            return None
        scores_Tg = (
            values_TE.unflatten(1, (groups, -1)).topk(self.config.moe_router_topk // groups_per_token, dim=2)[0].sum(2)
        )
        return topk_mask(scores_Tg.topk(groups_per_token, dim=1).indices, groups).repeat_interleave(
            values_TE.shape[1] // groups, dim=1
        )
