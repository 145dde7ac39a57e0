"""What one owner receives, from a case of loops (small) or from random choices (large)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sonic_ep.kernels.dispatch.plan.reference import Plan
from sonic_ep.kernels.dispatch.recv_index.reference import Chunks, RankPlan
from tests.dispatch.oracle import Case

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Received:
    """Pairs in arrival order, on the CPU; num_rows is R. One source numbers its rows by token, several densely."""

    plan: Plan
    dst: int
    row_in_source_V: Tensor
    weights_V: Tensor
    num_rows: int

    @property
    def one_source(self) -> bool:
        return self.plan.rows_SE.shape[0] == 1

    def chunks(self, device: torch.device = CPU) -> Chunks:
        plan = RankPlan(*(values.to(device) for values in self.plan.of_rank(self.dst)))
        num_rows, num_pairs = int(self.plan.expert_starts_Qe[self.dst, -1]), self.row_in_source_V.shape[0]
        return plan.chunks(num_rows, num_pairs)


def received_by(case: Case, dst: int, pair_weights: torch.dtype = torch.float32) -> Received:
    """What `dst` receives in a case of tests/dispatch/oracle.py."""
    rows: list[int] = []
    weights = [torch.empty(0, dtype=pair_weights)]
    for source in range(case.size):
        tokens = case.tokens_needed(source, dst)
        pairs = case.pairs(source)
        own = [i for i, (expert, _) in enumerate(pairs) if case.dst(expert) == dst]
        rows += [tokens.index(pairs[i][1]) for i in own]
        weights.append(case.pair_weights(source, pair_weights)[own])
    row_in_source_V = torch.tensor(rows, dtype=torch.int32)
    return Received(case.plan(), dst, row_in_source_V, torch.cat(weights), len(case.received(dst)))


@dataclass(frozen=True)
class Draw:
    """`tokens` of each of S sources choose each of e experts with a chance, all of them the `hot` one.

    chances: one for every expert, or one each. The owner is the last rank; nobody else gets a pair.
    """

    tokens: tuple[int, ...]
    e: int
    chances: float | tuple[float, ...]
    multiple: int = 1
    hot: int | None = None
    pair_weights: torch.dtype = torch.float32

    def __str__(self) -> str:
        T = f"{self.tokens[0]}x{len(self.tokens)}" if len(set(self.tokens)) == 1 else ".".join(map(str, self.tokens))
        hot = "" if self.hot is None else f"-hot{self.hot}"
        return f"T{T}-e{self.e}-t{self.multiple}{hot}-{str(self.pair_weights).removeprefix('torch.')}"

    def receive(self) -> Received:
        S, e = len(self.tokens), self.e
        rows, num_rows = [torch.empty(0, dtype=torch.int64)], 0
        pairs_SE = torch.zeros(S, S * e, dtype=torch.int64)
        for source, T in enumerate(self.tokens):
            chosen_Te = torch.rand(T, e) < torch.tensor(self.chances)
            if self.hot is not None:
                chosen_Te[:, self.hot] = True
            if S > 1:
                chosen_Te = chosen_Te[chosen_Te.any(1)]
            num_rows += chosen_Te.shape[0]
            pairs_SE[source, -e:] = chosen_Te.sum(0)
            rows.append(chosen_Te.T.nonzero()[:, 1])
        rows_SE = -(-pairs_SE // self.multiple) * self.multiple
        row_in_source_V = torch.cat(rows).int()
        weights_V = torch.rand(row_in_source_V.shape[0]).to(self.pair_weights) + 0.125
        return Received(Plan.from_counts(rows_SE, pairs_SE), S - 1, row_in_source_V, weights_V, num_rows)
