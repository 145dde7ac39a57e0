"""Load of the slowest rank: routes are drawn from a seed and counted, and so is how much slower one GPU is than others.

Every exchange of a layer waits for the slowest rank of the EP group, so what counts is the largest load, not the mean.

* The popularity of the experts is drawn from a Dirichlet distribution: a Gamma(1 / skew^2) value for each expert, over
  their sum. `skew` is its standard deviation over its mean. benchmarks/rounding_simulation.py assumes Gamma(8), a skew
  of 0.35. With a skew of 0 all experts are equally likely.
* A token's experts are the K best values of log popularity plus Gumbel noise, which draws K experts without replacement
  in proportion to the popularity; under group limits the values of its best groups.
* Every source rank sees the same popularity. Loads are sums over all sources.

Legend: S ranks of the EP group, D ranks of a host, T tokens on this rank, E experts, K experts per token.
"""

import random
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from sonic_ep.config import MoEConfig
from sonic_ep.kernels.route.topk.reference import experts_of_best_groups, top_experts

MAX_TOKENS = 2**16  # drawn at most. The noise of the counts falls with their number: some percent of a rank's load
_CHUNK = 2**13


class Load(NamedTuple):
    """Largest load of a rank or host over the mean of all. 1.0 everywhere: balanced, without noise.

    pairs: pairs that a rank computes. rows: distinct rows that a rank receives. hosts: distinct rows that a host
    receives in hop 1 of two_hop. gpu: time of the slowest GPU over the mean.
    """

    pairs: float = 1.0
    rows: float = 1.0
    hosts: float = 1.0
    gpu: float = 1.0


BALANCED = Load()


class DrawnRoutes:
    """Experts of some tokens. topk_ids_TK: int64."""

    def __init__(self, config: MoEConfig, num_tokens: int, skew: float, seed: int = 0) -> None:
        """num_tokens: of the whole EP group; at most MAX_TOKENS are drawn."""
        self.E = config.E
        generator = torch.Generator().manual_seed(seed)
        log_popularity_E = _log_popularity(config.E, skew, seed)
        left, parts = min(num_tokens, MAX_TOKENS), []
        while left:
            count = min(left, _CHUNK)
            # Of uniform values, which are the same bits on every machine. Tensor.exponential_ is not.
            uniform_TE = torch.rand(count, config.E, dtype=torch.float64, generator=generator)
            noise_TE = -(-uniform_TE.log()).log()
            # Scores are positive, and as ordered as the logits: the two best of a group add up.
            ranking_TE = (noise_TE + log_popularity_E).sigmoid()
            grouped = config.router.num_groups > 1
            allowed_TE = experts_of_best_groups(ranking_TE, config.router) if grouped else None
            parts.append(top_experts(ranking_TE, allowed_TE, config.K))
            left -= count
        self.topk_ids_TK = torch.cat(parts)

    def load(self, S: int, D: int, gpu: float = 1.0) -> Load:
        """Returns the load of S ranks, D on a host."""
        e = self.E // S
        pairs_S = torch.bincount(self.topk_ids_TK.flatten() // e, minlength=S)
        rows_S, rows_A = (self.tokens_by_block(parts) for parts in (S, S // D))
        return Load(_max_over_mean(pairs_S), _max_over_mean(rows_S), _max_over_mean(rows_A), gpu)

    def tokens_by_block(self, parts: int) -> Tensor:
        """Returns for each block of experts the number of tokens that need it."""
        T = self.topk_ids_TK.shape[0]
        needed = torch.zeros(T, parts, dtype=torch.bool).scatter_(1, self.topk_ids_TK // (self.E // parts), True)
        return needed.sum(0)


def slowest_gpu(num_gpus: int, deviation: float, seed: int = 0, draws: int = 200) -> float:
    """Returns the expected time of the slowest of `num_gpus` GPUs over their mean.

    deviation: standard deviation of a GPU's time over its mean; times are normal. The mean over `draws` draws.
    """
    if num_gpus == 1:
        return 1.0
    generator = torch.Generator().manual_seed(seed)
    return 1 + deviation * float(torch.randn(draws, num_gpus, generator=generator).amax(1).mean())


def _log_popularity(E: int, skew: float, seed: int) -> Tensor:
    if skew == 0:
        return torch.zeros(E, dtype=torch.float64)
    rng = random.Random(seed)
    drawn = [max(rng.gammavariate(1 / skew**2, 1.0), sys.float_info.min) for _ in range(E)]
    return (torch.tensor(drawn, dtype=torch.float64) / sum(drawn)).log()


def _max_over_mean(counts: Tensor) -> float:
    return float(counts.max()) / float(counts.double().mean())
