"""The contract of the router's fused kernels. Their twins: reference.py in topk, weights_and_losses, linear.

Legend: T tokens on this rank, H hidden size, E experts, K experts per token, N pairs this rank sends, B sequences.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from sonic_ep.config import RouterConfig
from sonic_ep.kernels.route.topk.reference import times_chosen


@dataclass(frozen=True, slots=True)
class TopK:
    """The plain top-K of this rank's tokens, before rounding.

    scores_TE: differentiable scores in the dtype of the logits. ranking_TE: the scores plus expert bias, detached;
    top-K takes the largest. allowed_TE: bool, the experts in each token's best groups; None without group limits.
    topk_ids_TK: int64 expert ids. plain_counts_E, plain_entropy_T: the results of `counts_E` and `entropy_T`, if a
    kernel computed them. bad_logits: () int64 number of NaN and inf logits; None unless router.check_logits is set.
    by_score_TK: int64, the K experts of highest score alone, if the balance loss counts these (`counts_by_score`), else
    None. tokens_1: (1,) int64, T, if a kernel wrote it.
    """

    scores_TE: Tensor
    ranking_TE: Tensor
    allowed_TE: Tensor | None
    topk_ids_TK: Tensor
    plain_counts_E: Tensor | None = None
    plain_entropy_T: Tensor | None = None
    bad_logits: Tensor | None = None
    by_score_TK: Tensor | None = None
    tokens_1: Tensor | None = None

    def with_ids(self, topk_ids_TK: Tensor) -> Self:
        """Returns this with another choice of experts."""
        return replace(self, topk_ids_TK=topk_ids_TK, plain_counts_E=None)

    def with_given(self, topk_ids_TK: Tensor) -> Self:
        """Returns this with experts that a caller gives, in any groups."""
        return replace(self.with_ids(topk_ids_TK), allowed_TE=None)

    def counts_E(self) -> Tensor:
        """Returns (E,) int64 tokens per expert, before rounding."""
        if self.plain_counts_E is not None:
            return self.plain_counts_E
        return times_chosen(self.topk_ids_TK, self.scores_TE.shape[1])

    def entropy_T(self) -> Tensor:
        """Returns (T,) entropy, in nats, of each token's scores divided by their sum; detached.

        It is NaN for a token with a NaN or infinite logit, unless the scores alone are known.
        """
        return entropy_of(self.scores_TE.detach()) if self.plain_entropy_T is None else self.plain_entropy_T


def entropy_of(scores_TE: Tensor) -> Tensor:
    """Returns (T,) entropy, in nats, of each token's scores divided by their sum."""
    return torch.special.entr(scores_TE / (scores_TE.sum(1, keepdim=True) + 1e-20)).sum(1)


class Losses(NamedTuple):
    """The auxiliary losses.

    value: () fp32, the weighted balance loss plus the weighted z-loss. dshares_BE: fp32, the derivative of the balance
    loss by each sequence's sum of shares; None without a balance loss. The shares of a token are its scores divided by
    their sum over the experts.
    """

    value: Tensor
    dshares_BE: Tensor | None


class PairGradients(NamedTuple):
    """The gradient of the weights of pairs.

    token_ids_N, expert_ids_N: integers; no pair occurs twice, and a spare entry has token -1. dweights_N: fp32.
    """

    token_ids_N: Tensor
    expert_ids_N: Tensor
    dweights_N: Tensor


class LossGradient(NamedTuple):
    """dloss: () fp32, the gradient of `Losses.value`. dshares_BE: see `Losses`."""

    dloss: Tensor
    dshares_BE: Tensor | None


class RouterOperations(Protocol):
    """Operations on fp32 logits of at least one token; `compute_topk` also accepts none. They record no gradient."""

    def compute_topk(self, logits_TE: Tensor, expert_bias_E: Tensor | None, K: int, config: RouterConfig) -> TopK:
        """Returns scores that have no gradient, and the top-K, without `by_score_TK`.

        The ids are exactly `top_experts(ranking_TE, allowed_TE, K)` of topk/reference.py, and allowed_TE are the
        experts of the best groups of `ranking_TE`. The softmax may differ from torch's in the last bits.
        """
        ...

    def weights_of_pairs(
        self, scores_TE: Tensor, topk_ids_TK: Tensor, token_ids_N: Tensor, expert_ids_N: Tensor, config: RouterConfig
    ) -> Tensor:
        """Returns (N,) fp32 combine weights by the rules of weights_and_losses/reference.py.

        Unlike there no chosen_N is passed: a pair is chosen if its expert is in its token's top-K. The weight of a
        spare entry (token -1) is undefined.
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
        """Returns the losses of weights_and_losses/reference.py. The config must have at least one of them.

        num_sequences: T must be a multiple of it. It is 1 unless `config.balance` is "sequence". ids_TK, times_SE: see
        BalanceCounts in routing.py.
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
        """Returns the (T, E) fp32 gradient of the logits from the weights of pairs and from `Losses.value`."""
        ...


class RouterLinear(Protocol):
    """Logits of at least one bf16 row with fp32, bf16 or fp16 weights, and their gradients, which are not recorded."""

    def logits(self, x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None) -> Tensor:
        """Returns (T, E) fp32 logits with an error of at most (H / 64 + 80) * 2^-24 * sum |x| |w|.

        80 accounts for the truncation of tensor cores in sums of 64 terms, H / 64 for adding these sums. The bound of a
        plain fp32 sum of H terms is H * 2^-24 * sum |x| |w|.
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
        """Returns the (T, H) bf16 gradient of x and the (E, H) gradient of the weight in its dtype.

        Each is None where not asked for. The error of the gradient of x is about 2^-16 * sum |dlogits| |w| before
        rounding to bf16. The error of the gradient of the weight has the bound of the logits, with T in place of H,
        before rounding.

        dx_others_TH: contiguous, with the shape and dtype of x. The gradient of x is added to it in place, before
        rounding.
        """
        ...
