"""The sender's index lists, plain and in Triton, against loops over tokens; large ones on a GPU against plain ones."""

from dataclasses import fields

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sonic_ep.kernels.dispatch.send_index.reference import SentRows, TokenLists
from tests.helpers.implementations import ON_GPU, PLAIN, Implementation, of_all, of_kernels
from tests.helpers.poison import poisoned_empty
from tests.helpers.waiting import assert_nothing_waits

Needs = list[list[int]]  # tokens of the pairs for each owner, in send order; a token may come several times


def lists_of(implementation: Implementation, needs: Needs, num_tokens: int) -> tuple[SentRows, TokenLists]:
    """What both functions give, from poisoned memory."""
    module, device = implementation.module("dispatch.send_index"), implementation.device
    token_ids_N = torch.tensor([token for tokens in needs for token in tokens], dtype=torch.int32)
    starts = [sum(map(len, needs[:dst])) for dst in range(len(needs) + 1)]
    pair_starts_Q = torch.tensor(starts, dtype=torch.int32, device=device)
    num_sent = sum(len(set(tokens)) for tokens in needs)
    with poisoned_empty():
        sent = module.sent_rows(token_ids_N.to(device), pair_starts_Q, num_tokens)
        needed = module.is_token_in_rank(token_ids_N.to(device), pair_starts_Q, num_tokens)
        assert torch.equal(needed, sent.sent_before.diff())
        assert needed.dtype == torch.int32
        return sent, module.token_lists(sent, num_sent)


def check(implementation: Implementation, needs: Needs, T: int) -> None:
    sent, tokens = lists_of(implementation, needs, T)
    rows = [(dst, token) for dst, chosen in enumerate(needs) for token in sorted(set(chosen))]
    first = [sum(dst < q for dst, _ in rows) for q in range(len(needs) + 1)]
    by_token = [[u for u, (_, token) in enumerate(rows) if token == t] for t in range(T)]
    for got, expected in (
        (
            sent.row_of_pair_N,
            [rows.index((dst, token)) - first[dst] for dst, chosen in enumerate(needs) for token in chosen],
        ),
        (sent.row_starts_Q, first),
        (
            sent.sent_before,
            [sum(row < (q, t) for row in rows) for q in range(len(needs)) for t in range(T)] + [len(rows)],
        ),
        (tokens.token_of_sent_U, [token for _, token in rows]),
        (tokens.sent_by_token_U, [u for each in by_token for u in each]),
        (tokens.sent_starts_T, [sum(map(len, by_token[:t])) for t in range(T + 1)]),
    ):
        assert (got.dtype, got.tolist()) == (torch.int32, expected)
    assert (sent.num_dst, sent.num_tokens) == (len(needs), T)


CASES: dict[str, tuple[Needs, int]] = {
    "repeats": ([[3, 1, 3], [1, 2]], 4),
    "one-owner": ([[0, 2, 5, 0, 5]], 6),
    "owners-of-nothing": ([[], [1, 0, 1], [], [1], []], 3),
    "nobody": ([[], []], 3),
    "no-tokens": ([[], [], []], 0),
    "all-everywhere": ([[*range(300)] * 2] * 3, 300),
    "many-owners": ([[dst % 7, 6] for dst in range(64)], 7),
}


@of_all
@pytest.mark.parametrize(("needs", "T"), [*CASES.values()], ids=[*CASES])
def test_lists_match_loops(needs: Needs, T: int, implementation: Implementation) -> None:
    check(implementation, needs, T)


@of_all
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_lists_of_any_pairs_match_loops(implementation: Implementation, data: st.DataObject) -> None:
    T = data.draw(st.integers(1, 20))
    needs = data.draw(st.lists(st.lists(st.integers(0, T - 1), max_size=30), min_size=1, max_size=9))
    check(implementation, needs, T)


@of_all
def test_example_of_the_docstring(implementation: Implementation) -> None:
    sent, tokens = lists_of(implementation, [[3, 1, 3], [1, 2]], 4)
    assert sent.row_of_pair_N.tolist() == [1, 0, 1, 0, 1]
    assert tokens.token_of_sent_U.tolist() == [1, 3, 1, 2]


def random_pairs(T: int, Q: int, e: int, K: int) -> tuple[Tensor, Tensor]:
    """Tokens of a random top-K choice in send order, and the first pair of each owner."""
    chosen_TE = torch.zeros(T, Q * e, dtype=torch.bool).scatter_(1, torch.rand(T, Q * e).topk(K).indices, True)
    pairs_Q = chosen_TE.sum(0).view(Q, e).sum(1)
    pair_starts_Q = torch.nn.functional.pad(pairs_Q.cumsum(0), (1, 0))
    return chosen_TE.T.nonzero()[:, 1].int(), pair_starts_Q.int()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "Q", "e", "K"), [(8192, 8, 16, 8), (24577, 2, 64, 8), (1001, 64, 4, 6), (333, 5, 1, 2), (1, 4, 2, 1)]
)
def test_large_lists_match_the_plain_ones_on_a_gpu(T: int, Q: int, e: int, K: int) -> None:
    token_ids_N, pair_starts_Q = random_pairs(T, Q, e, K)
    plain = PLAIN.module("dispatch.send_index")
    expected = plain.sent_rows(token_ids_N, pair_starts_Q, T)
    num_sent = int(expected.row_starts_Q[-1])
    expected_lists = plain.token_lists(expected, num_sent)
    module, device = ON_GPU.module("dispatch.send_index"), ON_GPU.device
    token_ids_N, pair_starts_Q = token_ids_N.to(device), pair_starts_Q.to(device)
    for _ in range(2):
        with poisoned_empty():
            sent = module.sent_rows(token_ids_N, pair_starts_Q, T)
            lists = module.token_lists(sent, num_sent)
        for got, wanted in ((sent, expected), (lists, expected_lists)):
            for field in fields(got):
                left, right = getattr(got, field.name), getattr(wanted, field.name)
                assert torch.equal(left.cpu(), right) if isinstance(right, Tensor) else left == right, field.name
    assert_nothing_waits(lambda: module.token_lists(module.sent_rows(token_ids_N, pair_starts_Q, T), num_sent))


@of_kernels
def test_spare_entries_behind_the_pairs_change_nothing(implementation: Implementation) -> None:
    """So the lists can be made before the host knows how many pairs there are."""
    module, device = implementation.module("dispatch.send_index"), implementation.device
    tokens, starts = torch.tensor([3, 1, 3, 1, 2], dtype=torch.int32), torch.tensor([0, 3, 5], dtype=torch.int32)
    spare = torch.full((300,), -1, dtype=torch.int32)
    with poisoned_empty():
        found, wanted = (
            module.sent_rows(given.to(device), starts.to(device), 4) for given in (torch.cat([tokens, spare]), tokens)
        )
    assert torch.equal(found.row_of_pair_N[:5], wanted.row_of_pair_N)
    assert torch.equal(found.sent_before, wanted.sent_before)
    assert torch.equal(found.copies_T, wanted.copies_T)
