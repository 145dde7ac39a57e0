"""The sender's index lists in plain torch: which distinct (owner rank, token) rows leave, and in which order.

A row leaves once for each owner rank that needs it, by owner, then token. This is the CPU path, and the oracle of
kernels/dispatch/send_index/triton.py.

Example: 2 owners, 4 tokens, pairs of tokens [3, 1, 3] for owner 0 and [1, 2] for owner 1 -> 4 rows leave, tokens
[1, 3 | 1, 2]; the pairs' rows are [1, 0, 1 | 0, 1].

Legend: Q destination ranks, T tokens on this rank, N pairs this rank sends, U rows this rank sends.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sonic_ep.routing import INDEX_DTYPE


@dataclass(frozen=True, slots=True)
class SentRows:
    """The rows that leave, numbered. int32.

    row_of_pair_N: row of each pair, counted from its owner's first. sent_before: (Q * T + 1,), how many rows leave
    before the one of owner q and token t, at q * T + t. copies_T: (T + 1,), 0, then how many rows each token sends.
    """

    row_of_pair_N: Tensor
    sent_before: Tensor
    copies_T: Tensor
    num_dst: int

    @property
    def num_tokens(self) -> int:
        return self.copies_T.shape[0] - 1

    @property
    def row_starts_Q(self) -> Tensor:
        """(Q + 1,): the first row for each owner, and U."""
        return self.sent_before.as_strided((self.num_dst + 1,), (self.num_tokens,))


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Sent rows and tokens, int32.

    token_of_sent_U: token of each sent row. sent_by_token_U, sent_starts_T: sent rows grouped by token, by owner, and
    (T + 1) exclusive prefix sums.
    """

    token_of_sent_U: Tensor
    sent_by_token_U: Tensor
    sent_starts_T: Tensor


def is_token_in_rank(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> Tensor:
    """(Q * T,) int32: does owner q need the row of token t, 1 or 0 at q * T + t? See `sent_rows`."""
    tokens_N = token_ids_N.long()
    return _token_in_rank(
        _dst_of_pair(tokens_N, pair_starts_Q), tokens_N, pair_starts_Q.shape[0] - 1, num_tokens
    ).flatten()


def sent_rows(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> SentRows:
    """Number the rows that leave.

    token_ids_N: (N,) int32, pairs by owner. pair_starts_Q: (Q + 1,) int32, the first pair of each owner, and N.
    """
    Q, tokens_N = pair_starts_Q.shape[0] - 1, token_ids_N.long()
    dst_N = _dst_of_pair(tokens_N, pair_starts_Q)
    is_token_in_rank_QT = _token_in_rank(dst_N, tokens_N, Q, num_tokens)
    row_QT = is_token_in_rank_QT.cumsum(1) - 1
    sent_before = torch.nn.functional.pad(is_token_in_rank_QT.flatten().cumsum(0), (1, 0))
    copies_T = torch.nn.functional.pad(is_token_in_rank_QT.sum(0), (1, 0))
    return SentRows(*(v.to(INDEX_DTYPE) for v in (row_QT[dst_N, tokens_N], sent_before, copies_T)), num_dst=Q)


def _dst_of_pair(tokens_N: Tensor, pair_starts_Q: Tensor) -> Tensor:
    return torch.repeat_interleave(pair_starts_Q.diff(), output_size=tokens_N.shape[0])


def _token_in_rank(dst_N: Tensor, tokens_N: Tensor, Q: int, T: int) -> Tensor:
    """(Q, T) int32."""
    is_token_in_rank_QT = torch.zeros(Q, T, dtype=INDEX_DTYPE, device=tokens_N.device)
    is_token_in_rank_QT[dst_N, tokens_N] = 1
    return is_token_in_rank_QT


def token_lists(sent: SentRows, num_sent: int) -> TokenLists:
    """The lists of sent rows; num_sent is U."""
    is_token_in_rank_QT = sent.sent_before.diff().view(sent.num_dst, sent.num_tokens)
    token_of_sent_U = torch.nonzero_static(is_token_in_rank_QT, size=num_sent)[:, 1]
    lists = (token_of_sent_U, token_of_sent_U.argsort(stable=True), sent.copies_T.cumsum(0))
    return TokenLists(*(values.to(INDEX_DTYPE) for values in lists))
