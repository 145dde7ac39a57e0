"""Routing.from_pairs: any order in, send order out; what is wrong on one rank is raised on all."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sonic_ep.groups import EPGroup
from sonic_ep.routing import Routing
from tests.dispatch import oracle
from tests.dispatch.oracle import Case
from tests.helpers.launch import RankPool

Ranks = Callable[[int], RankPool]
CASES = [
    Case((13,), 5, 4),
    Case((0,), 5, 4),
    Case((13, 0), 5, 4),
    Case((5, 6), 4, 2, "none"),
    Case((13, 1, 0, 22), 5, 8),
    Case((7, 8, 9, 10), 4, 12, "last"),
]
T, E = 6, 4


def columns(case: Case, rank: int, order: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, experts and weights of a rank's pairs, in a given order."""
    pairs = torch.tensor(case.pairs(rank), dtype=torch.int64).view(-1, 2)[order]
    return pairs[:, 1], pairs[:, 0], case.pair_weights(rank)[order]


def shuffled(rank: int, case: Case, ids: torch.dtype) -> Routing:
    """Worker: a routing from pairs in a random order."""
    order = torch.randperm(len(case.pairs(rank)), generator=torch.Generator().manual_seed(rank)).tolist()
    tokens, experts, pair_weights = columns(case, rank, order)
    group = oracle.group_of(case)
    return Routing.from_pairs(
        tokens.to(ids), experts.to(ids), pair_weights, num_tokens=case.tokens[rank], E=case.E, group=group
    )


@pytest.mark.parametrize("ids", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_order_becomes_send_order(ranks: Ranks, case: Case, ids: torch.dtype) -> None:
    routings = [shuffled(0, case, ids)] if case.size == 1 else ranks(case.size).run(shuffled, case, ids)
    for rank, routing in enumerate(routings):
        assert routing.token_ids_N.dtype == torch.int32
        assert routing.token_ids_N.tolist() == [token for _, token in case.pairs(rank)]
        assert torch.equal(routing.weights_N, case.pair_weights(rank))
        assert routing.num_tokens == case.tokens[rank]
        counts = routing.counts
        for counts_SE in (counts.chosen_SE, counts.rows_SE, counts.pairs_SE):
            assert counts_SE.tolist() == case.pairs_SE()
        assert counts.tokens_S.tolist() == list(case.tokens)
        assert counts.cut_S.tolist() == [0] * case.size
        assert counts.t == 1
        assert {(values.dtype, values.device.type) for values in counts} == {(torch.int64, "cpu")}


def test_weights_are_differentiable() -> None:
    """Gradients come back in the caller's order."""
    pair_weights = torch.rand(4, requires_grad=True)
    tokens, experts = torch.tensor([2, 0, 1, 0]), torch.tensor([1, 1, 0, 0])
    routing = Routing.from_pairs(tokens, experts, pair_weights, num_tokens=3, E=2, group=EPGroup.alone())
    assert routing.token_ids_N.tolist() == [0, 1, 0, 2]
    (routing.weights_N * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert pair_weights.grad is not None
    assert pair_weights.grad.tolist() == [4.0, 3.0, 2.0, 1.0]


def call(group: EPGroup, **changes: Any) -> Routing:
    """Three right pairs, T = 6 and E = 4, and what is changed of them."""
    arguments: dict[str, Any] = {
        "token_ids_N": torch.tensor([0, 5, 0]),
        "expert_ids_N": torch.tensor([3, 0, 1]),
        "weights_N": torch.ones(3),
    }
    return Routing.from_pairs(**{**arguments, **changes}, num_tokens=T, E=E, group=group)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "list-of-tokens": ({"token_ids_N": [0, 5, 0]}, "token_ids must be a torch.Tensor, got list"),
    "list-of-weights": ({"weights_N": [1.0, 1.0, 1.0]}, "weights must be a torch.Tensor, got list"),
    "meta": (
        {
            "token_ids_N": torch.zeros(3, dtype=torch.int64, device="meta"),
            "expert_ids_N": torch.zeros(3, dtype=torch.int64, device="meta"),
            "weights_N": torch.ones(3, device="meta"),
        },
        "token_ids, expert_ids and weights are on meta, where there are no values",
    ),
    "sparse": ({"weights_N": torch.ones(3).to_sparse()}, "weights has layout torch.sparse_coo, wanted a dense tensor"),
    "devices": ({"weights_N": torch.ones(3, device="meta")}, "must be on one device, got cpu, meta"),
    "fewer-gates": ({"weights_N": torch.ones(2)}, r"one shape .*\(3,\), \(3,\), \(2,\)"),
    "fewer-tokens": ({"token_ids_N": torch.tensor([0, 5])}, r"one shape .*\(2,\), \(3,\), \(3,\)"),
    "more-experts": ({"expert_ids_N": torch.tensor([3, 0, 1, 2])}, r"one shape .*\(3,\), \(4,\), \(3,\)"),
    "columns": (
        {
            "token_ids_N": torch.tensor([[0], [5]]),
            "expert_ids_N": torch.tensor([[3], [0]]),
            "weights_N": torch.ones(2, 1),
        },
        r"one shape \(N,\)",
    ),
    "token-too-large": ({"token_ids_N": torch.tensor([0, T, 0])}, r"token_ids run from 0 to 6, allowed are 0\.\.5"),
    "token-negative": ({"token_ids_N": torch.tensor([0, -1, 0])}, r"token_ids run from -1 to 0, allowed are 0\.\.5"),
    "expert-too-large": ({"expert_ids_N": torch.tensor([E, 0, 1])}, r"expert_ids run from 0 to 4, allowed are 0\.\.3"),
    "expert-negative": ({"expert_ids_N": torch.tensor([3, 0, -2])}, r"expert_ids run from -2 to 3, allowed are 0\.\.3"),
    "twice": (
        {"token_ids_N": torch.tensor([0, 5, 0]), "expert_ids_N": torch.tensor([3, 0, 3])},
        r"1 \(token, expert\) pairs are given more than once",
    ),
    "float-tokens": ({"token_ids_N": torch.tensor([0.0, 5.0, 0.0])}, r"token_ids must be integers, got torch\.float32"),
    "float-experts": ({"expert_ids_N": torch.rand(3)}, r"expert_ids must be integers, got torch\.float32"),
    "integer-gates": (
        {"weights_N": torch.ones(3, dtype=torch.int64)},
        r"weights must be floating point, got torch\.int64",
    ),
    **{
        f"{dtype}-experts": (
            {"expert_ids_N": torch.tensor([3, 0, 1]).to(dtype)},
            rf"expert_ids must be integers, got {dtype}; use expert_ids\.long\(\)",
        )
        for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.complex64)
    },
    "complex-tokens": (
        {"token_ids_N": torch.tensor([0, 5, 0], dtype=torch.complex64)},
        r"token_ids must be integers, got torch\.complex64",
    ),
    "float8-gates": ({"weights_N": torch.ones(3).to(torch.float8_e5m2)}, r"got torch\.float8_e5m2; use weights\.float"),
    "bool-experts": ({"expert_ids_N": torch.tensor([True, False, True])}, r"must be integers, got torch\.bool"),
}


@pytest.mark.parametrize(("changes", "message"), [*WRONG.values()], ids=[*WRONG])
def test_error_of_a_rank_alone(changes: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(EPGroup.alone(), **changes)


def experts_that_two_ranks_cannot_share(rank: int) -> str:
    pair = torch.tensor([0])
    try:
        Routing.from_pairs(pair, pair, torch.ones(1), num_tokens=1, E=5, group=EPGroup())
    except ValueError as error:
        return str(error)
    return "nothing"


def test_experts_must_divide_over_the_ranks(ranks: Ranks) -> None:
    for message in ranks(2).run(experts_that_two_ranks_cannot_share):
        assert "E=5 experts do not divide over ep_size=2 ranks" in message


def weights_of_two_dtypes(rank: int) -> str:
    pair, dtype = torch.zeros(1, dtype=torch.int64), [torch.float32, torch.float64][rank]
    with pytest.raises(ValueError, match="disagree about weights_dtype") as raised:
        Routing.from_pairs(pair, pair, torch.ones(1, dtype=dtype), num_tokens=1, E=2, group=EPGroup())
    return str(raised.value)


def test_weights_have_one_dtype_on_all_ranks(ranks: Ranks) -> None:
    for message in ranks(2).run(weights_of_two_dtypes):
        assert message.endswith("'torch.float32' on rank 0, 'torch.float64' on rank 1; give every rank the same")


def wrong_on_rank_1(rank: int, name: str) -> str:
    """Worker: the error of this rank; afterwards the group works as before."""
    group = EPGroup()
    try:
        call(group, **(WRONG[name][0] if rank == 1 else {}))
    except ValueError as error:
        assert call(group).counts.pairs_SE.tolist() == [[1, 1, 0, 1]] * group.size
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", WRONG)
def test_error_of_one_rank_is_raised_on_all(ranks: Ranks, name: str) -> None:
    message, errors = WRONG[name][1], ranks(2).run(wrong_on_rank_1, name)
    assert errors[0] == errors[1]
    assert re.match(rf"rank 1: .*{message}", errors[0])


def wrong_everywhere(rank: int) -> str:
    """Worker: each rank has a token out of range, a different one."""
    with pytest.raises(ValueError, match="token_ids") as caught:
        call(EPGroup(), token_ids_N=torch.tensor([0, 10 + rank, 0]))
    return str(caught.value)


def test_errors_of_all_ranks_are_told(ranks: Ranks) -> None:
    first, second = ranks(2).run(wrong_everywhere)
    assert first == second
    assert re.match(r"rank 0: .* to 10, .*; rank 1: .* to 11, ", first)
