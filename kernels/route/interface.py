"""The contract of the router's fused kernels. routers/topk.py and routers/balance.py hold their plain twins.

Legend: T tokens on this rank, H hidden size, E experts, K experts per token, N pairs this rank sends, B sequences.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from sonic_ep.config import RouterConfig


class FusedTopK(NamedTuple):
    """scores_TE, ranking_TE: fp32, one and the same tensor without an expert bias. allowed_TE: bool, None without group
    limits. topk_ids_TK: int64, best first. counts_E: int64. entropy_T: fp32, of each token's scores as a distribution.
    bad_logits: () int64, None if not asked for.
    """

    scores_TE: Tensor
    ranking_TE: Tensor
    allowed_TE: Tensor | None
    topk_ids_TK: Tensor
    counts_E: Tensor
    entropy_T: Tensor
    bad_logits: Tensor | None


class Losses(NamedTuple):
    """value: () fp32, the balance loss and the z-loss, weighted and added. dshares_BE: fp32 derivative of the balance
    loss by the sum of each sequence's shares, scores divided by their token's sum of them; None without that loss.
    """

    value: Tensor
    dshares_BE: Tensor | None


class PairGradients(NamedTuple):
    """token_ids_N, expert_ids_N: integers, no pair twice; token -1 where an entry is spare. dweights_N: fp32 gradient
    of their weights.
    """

    token_ids_N: Tensor
    expert_ids_N: Tensor
    dweights_N: Tensor


class LossGradient(NamedTuple):
    """dloss: () fp32. dshares_BE: of `Losses`."""

    dloss: Tensor
    dshares_BE: Tensor | None


class RouterOperations(Protocol):
    """Operations on fp32 logits of at least one token, but for `compute_topk`. They record no gradient."""

    def compute_topk(self, logits_TE: Tensor, expert_bias_E: Tensor | None, K: int, config: RouterConfig) -> FusedTopK:
        """The scores, and the choice by them: exactly `top_experts(ranking_TE, allowed_TE, K)` of routers/select.py
        with the best groups of `ranking_TE` allowed. A softmax may differ from torch's in the last bits.
        """
        ...

    def weights_of_pairs(
        self, scores_TE: Tensor, topk_ids_TK: Tensor, token_ids_N: Tensor, expert_ids_N: Tensor, config: RouterConfig
    ) -> Tensor:
        """(N,) fp32 weights by the rules of routers/topk.py. A pair is chosen if its expert is in its token's top K.

        Anything for a spare entry, whose token is -1.
        """
        ...

    def losses(
        self,
        logits_TE: Tensor,
        ids_TK: Tensor,
        times_SE: Tensor,
        num_sequences: int,
        config: RouterConfig,
    ) -> Losses:
        """The losses of routers/balance.py, of which the config has one at least. T must be a multiple of
        `num_sequences`, which is 1 but for the balance of sequences. ids_TK, times_SE: see Counted in routing.py.
        """
        ...

    def logits_gradient(
        self,
        logits_TE: Tensor,
        topk_ids_TK: Tensor,
        pairs: PairGradients | None,
        loss: LossGradient | None,
        config: RouterConfig,
    ) -> Tensor:
        """(T, E) fp32 gradient from the weights of pairs and from the sum of both losses."""
        ...


class RouterLinear(Protocol):
    """Logits of at least one bf16 row by fp32 weights, and their gradients. No operation records a gradient."""

    def logits(self, x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None) -> Tensor:
        """(T, E) fp32, off by at most (H / 64 + 80) 2^-24 sum |x| |w|: 80 for what tensor cores cut off in sums of 64
        terms, the rest for adding those. One fp32 sum of H terms is off by up to H 2^-24 sum |x| |w|.
        """
        ...

    def gradients(
        self,
        dlogits_TE: Tensor,
        x_TH: Tensor,
        weight_EH: Tensor,
        *,
        of_x: bool,
        of_weight: bool,
        dx_others_TH: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """(T, H) bf16 gradient of x, off by about 2^-16 sum |dlogits| |w| before it is rounded; (E, H) fp32 gradient of
        the weight, off as the logits are, with T in place of H.

        dx_others_TH: contiguous, like x; the gradient of x is added to it in place, before it is rounded.
        """
        ...
