"""Real ranks agree on the counts and the decision, and an error on one is the same error on all.

Legend: S ranks of the EP group, T tokens on this rank, H hidden size, E experts, K experts per token.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sonic_ep.config import MoEConfig, RoundingConfig, RouterConfig
from sonic_ep.groups import EPGroup
from sonic_ep.kernels.route.select.reference import MAX_TOKENS
from sonic_ep.kernels.route.status.reference import HEADER
from sonic_ep.routers.count_exchange import RankStatus, gather_counts, raise_problems
from sonic_ep.routers.router import Router
from tests.helpers.launch import RankPool

H, E, K = 6, 8, 2
Pools = Callable[[int], RankPool]
ROUNDINGS = {
    "apportion": RoundingConfig(t=4, G=16),
    "auto": RoundingConfig(G=16),
    "nearest": RoundingConfig(mode="nearest", t=8, G=8),
    "stochastic": RoundingConfig(mode="stochastic", t=8, G=8),
    "capacity": RoundingConfig(t=4, G=8, capacity_factor=1.0),
    "pad": RoundingConfig(mode="pad", t=8),
    "off": RoundingConfig(mode="off"),
}


def make_router(rounding: RoundingConfig, **options: Any) -> Router:
    router = Router(MoEConfig(d=H, n=4, E=E, K=K, router=RouterConfig(**options), rounding=rounding))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(7))
    return router


def tokens_of(rank: int, T: int) -> Tensor:
    """Any rank's input, known to all; each rank favours other experts."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(T, H, generator=generator) + torch.randn(H, generator=generator)


class Agreed(NamedTuple):
    """One forward on one rank: the group-wide integers, and the number of pairs of each expert here."""

    counts: dict[str, Any]
    pairs: list[int]
    token_ids: list[int]
    weight_gradient: list[list[float]]


def route_everywhere(rank: int, tokens: list[int], rounding: RoundingConfig, steps: int) -> list[Agreed]:
    torch.manual_seed(rank)  # stochastic rounding must agree in spite of it
    router = make_router(rounding, balance="global", balance_coef=0.1)
    results = []
    for _ in range(steps):
        router.zero_grad()
        routed = router(tokens_of(rank, tokens[rank]), group=EPGroup(), sequence_length=tokens[rank])
        (routed.routing.weights_N.sum() + routed.aux_loss).backward()
        counts = routed.routing.counts
        described = {
            name: value.tolist() if isinstance(value, Tensor) else value for name, value in counts._asdict().items()
        }
        assert router.weight.grad is not None
        ids = routed.routing.token_ids_N.tolist()
        results.append(Agreed(described, described["pairs_SE"][rank], ids, router.weight.grad.tolist()))
    return results


def losses_and_gradients(rank: int, tokens: list[int], options: dict[str, Any]) -> tuple[float, list[list[float]]]:
    """Of the balance loss alone."""
    router = make_router(ROUNDINGS["nearest"], **options)
    if router.expert_bias is not None:
        router.expert_bias[:3] += 10.0  # every token is sent to these, or two of them
    routed = router(tokens_of(rank, tokens[rank]), group=EPGroup(), sequence_length=tokens[rank])
    routed.aux_loss.backward()
    assert router.weight.grad is not None
    return routed.aux_loss.item(), router.weight.grad.tolist()


@pytest.mark.parametrize("balance", ["sequence", "batch", "global"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_what_corrects_the_choice_moves_no_balance_loss(ranks: Pools, score: str, balance: str) -> None:
    tokens, losses = [9, 13], {"score": score, "balance": balance, "balance_coef": 0.5}
    corrections: list[dict[str, Any]] = [{}, {"expert_bias": True}, {"num_groups": 4, "groups_per_token": 2}]
    plain, biased, grouped = (
        ranks(2).run(losses_and_gradients, tokens, losses | correction) for correction in corrections
    )
    assert plain == biased == grouped


def plain_counts(rank: int, T: int) -> list[int]:
    logits_TE = tokens_of(rank, T) @ make_router(ROUNDINGS["off"]).weight.T
    return logits_TE.topk(K, dim=1).indices.flatten().bincount(minlength=E).tolist()


@pytest.mark.parametrize("rounding", ROUNDINGS.values(), ids=ROUNDINGS)
@pytest.mark.parametrize(
    "tokens", [[50, 30], [40, 0, 3, 70], [0, 0]], ids=lambda tokens: "T" + "-".join(map(str, tokens))
)
def test_all_ranks_have_the_same_counts(ranks: Pools, tokens: list[int], rounding: RoundingConfig) -> None:
    steps = 3
    by_rank = ranks(len(tokens)).run(route_everywhere, tokens, rounding, steps)
    for step in range(steps):
        counts = by_rank[0][step].counts
        assert counts["tokens_S"] == tokens
        assert counts["chosen_SE"] == [plain_counts(rank, T) for rank, T in enumerate(tokens)]
        for rank, results in enumerate(by_rank):
            agreed = results[step]
            assert agreed.counts == counts, f"rank {rank} decided otherwise"
            starts = torch.tensor([0, *agreed.pairs]).cumsum(0).tolist()
            for start, end in zip(starts, starts[1:], strict=False):
                ids = agreed.token_ids[start:end]
                assert ids == sorted(set(ids))
            assert starts[-1] == len(agreed.token_ids)
            assert torch.tensor(agreed.weight_gradient).isfinite().all()
    if rounding.mode == "stochastic" and any(tokens):
        random_rows = {str(result.counts["rows_SE"]) for result in by_rank[0]}
        assert len(random_rows) > 1, "every step draws anew"


def attempt(rank: int, case: str) -> tuple[str | None, list[int]]:
    """What this rank's forward raises, and the pairs of a healthy forward after it."""
    group = EPGroup()
    router = make_router(ROUNDINGS["apportion"], check_logits=True)
    x_TH = tokens_of(rank, 20)
    message = None
    try:
        match case:
            case "logits" if rank == 1:
                x_TH[3] = float("nan")
                x_TH[5] = float("inf")
            case "all logits":
                x_TH[: rank + 1] = float("nan")
            case "problem" if rank == 1:
                router(x_TH, group=group, sequence_length=20, problem="x has 3 legs")
            case "mode" if rank == 1:
                router.eval()
            case "dtype" if rank == 1:
                x_TH = x_TH.double()
            case "tokens" if rank == 1:
                status = RankStatus(
                    counts_E=torch.zeros(E, dtype=torch.int64),
                    num_tokens=MAX_TOKENS,
                    dtype=torch.float32,
                    training=True,
                )
                gather_counts(status, router.config.rounding, group)
        router(x_TH, group=group, sequence_length=20).routing.check()
    except ValueError as error:
        message = str(error)
    routed = router.train()(tokens_of(rank, 20), group=group, sequence_length=20)
    routed.routing.check()
    return message, routed.routing.counts.pairs_SE.flatten().tolist()


MESSAGES = {
    "logits": (f"NaN or inf (rank 1: {2 * E})", "check_logits=False"),
    "problem": ("rank 1: x has 3 legs",),
    "mode": ("disagree", "rank 0: torch.float32 training", "rank 1: torch.float32 eval"),
    "dtype": ("disagree", "rank 0: torch.float32 training", "rank 1: torch.float64 training"),
    "tokens": (f"rank 1: T={MAX_TOKENS} tokens", f"limit of {MAX_TOKENS - 1}", "split"),
}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", MESSAGES)
def test_a_fault_of_one_rank_is_raised_on_all(ranks: Pools, case: str, world_size: int) -> None:
    results = ranks(world_size).run(attempt, case)
    messages = {message for message, _ in results}
    assert len(messages) == 1, f"the ranks say different things: {messages}"
    (message,) = messages
    assert message is not None, "nothing was raised"
    for part in MESSAGES[case]:
        assert part in message
    # Nobody is left waiting in a collective: the next step works, and alike.
    assert len({str(integers) for _, integers in results}) == 1


def test_every_bad_rank_is_named(ranks: Pools) -> None:
    for message, _ in ranks(2).run(attempt, "all logits"):
        assert message is not None
        assert f"(rank 0: {E}, rank 1: {2 * E})" in message


def sum_bias_over_data_parallel_groups(rank: int) -> list[float]:
    """Ranks as two EP groups of one rank, which hold the same experts."""
    options = RouterConfig(renormalize=False, expert_bias=True, expert_bias_rate=0.5)
    router = Router(MoEConfig(d=2, n=4, E=2, K=1, router=options))
    with torch.no_grad():
        router.weight.copy_(torch.eye(2))
    # Rank 0: 3 against 1. Rank 1: 0 against 4. Together expert 1 has more.
    tokens = torch.eye(2)[[0, 0, 0, 1] if rank == 0 else [1] * 4]
    routing = router(tokens, group=EPGroup.alone(), sequence_length=4).routing
    router.count_in_backward(routing.weights_N, routing.counts)
    routing.weights_N.sum().backward()
    router.update_expert_bias(EPGroup())
    assert router.expert_bias is not None
    return router.expert_bias.tolist()


def test_bias_update_sums_over_data_parallel_groups(ranks: Pools) -> None:
    assert ranks(2).run(sum_bias_over_data_parallel_groups) == [[0.5, -0.5]] * 2


# One process is enough.


def status_of(counts: list[int], **changes: Any) -> RankStatus:
    facts: dict[str, Any] = {"num_tokens": 20, "dtype": torch.float32, "training": True} | changes
    return RankStatus(counts_E=torch.tensor(counts), **facts)


def test_alone_the_counts_are_the_reports() -> None:
    status = status_of([5, 12, 0], by_score_E=torch.tensor([9, 8, 0]))
    counts, split_sizes, by_score_SE = gather_counts(status, RoundingConfig(mode="up", t=8, G=8), EPGroup.alone())
    assert by_score_SE is not None
    assert by_score_SE.tolist() == [[9, 8, 0]]
    assert split_sizes is not None
    assert split_sizes.read() == ((20,), ((24,),), ((24,),))
    assert counts.chosen_SE.tolist() == [[5, 12, 0]]
    assert counts.rows_SE.tolist() == counts.pairs_SE.tolist() == [[8, 16, 0]]
    assert counts.tokens_S.tolist() == [20]
    assert counts.t == 8


def test_a_lost_peer_has_precedence_over_a_problem() -> None:
    def lost() -> None:
        raise RuntimeError("rank 1 is lost")

    exchange: Any = SimpleNamespace(raise_if_lost=lost)
    with pytest.raises(RuntimeError, match="rank 1 is lost"):
        raise_problems([0] * HEADER, [], "x has 3 legs", EPGroup.alone(), exchange)


@pytest.mark.parametrize("bad", [1, 2**31 - 1, 2**31, 2**32], ids=str)
def test_any_number_of_bad_logits_is_an_error(bad: int) -> None:
    # A million tokens times 4096 experts, all NaN, is 2^32.
    _, split_sizes, _ = gather_counts(
        status_of([5, 12, 0], bad_logits=torch.tensor(bad)), ROUNDINGS["off"], EPGroup.alone()
    )
    assert split_sizes is not None
    for ask in (split_sizes.check, split_sizes.read, split_sizes.check):
        with pytest.raises(ValueError, match=r"NaN or inf \(rank 0: [1-9]"):
            ask()


def test_the_largest_batch_is_let_through_and_one_more_token_is_not() -> None:
    large = [MAX_TOKENS - 1, 3]
    counts, split_sizes, _ = gather_counts(
        status_of(large, num_tokens=MAX_TOKENS - 1), ROUNDINGS["nearest"], EPGroup.alone()
    )
    assert split_sizes is not None
    split_sizes.check()
    assert counts.chosen_SE.tolist() == [large]
    assert counts.rows_SE.tolist() == [[MAX_TOKENS, 0]]
    with pytest.raises(ValueError, match=f"T={MAX_TOKENS}.*{MAX_TOKENS - 1}"):
        gather_counts(status_of([0, 0], num_tokens=MAX_TOKENS), ROUNDINGS["nearest"], EPGroup.alone())
