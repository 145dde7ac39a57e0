"""The contract of the router's fused kernels. routers/topk.py and routers/balance.py hold their plain twins.

Legend: T tokens, E experts, K experts per token.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from sonic_ep.config import RouterConfig


class FusedChoice(NamedTuple):
    """scores_TE, ranking_TE: fp32, one and the same tensor without an expert bias. allowed_TE: bool, None without group
    limits. topk_ids_TK: int64, best first. counts_E: int64. bad_logits: () int64, None if not asked for.
    """

    scores_TE: Tensor
    ranking_TE: Tensor
    allowed_TE: Tensor | None
    topk_ids_TK: Tensor
    counts_E: Tensor
    bad_logits: Tensor | None


class RouterOperations(Protocol):
    """Operations on fp32 logits, none of which records a gradient."""

    def choose(self, logits_TE: Tensor, expert_bias_E: Tensor | None, K: int, config: RouterConfig) -> FusedChoice:
        """The scores, and the choice by them: exactly `top_experts(ranking_TE, allowed_TE, K)` of routers/selection.py
        with the best groups of `ranking_TE` allowed. A softmax may differ from torch's in the last bits.
        """
        ...
