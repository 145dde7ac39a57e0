"""The sender's index lists in plain torch: the distinct (destination rank, token) rows that this rank sends, in order.

A row is sent once to each destination rank that needs it. Rows are sorted by destination rank, then by token. This is
the CPU path, and the oracle of kernels/dispatch/send_index/triton.py.

Example: 2 destination ranks, 4 tokens, pairs of tokens [3, 1, 3] for rank 0 and [1, 2] for rank 1. This rank sends 4
rows, of tokens [1, 3 | 1, 2]. The rows of the pairs are [1, 0, 1 | 0, 1].

Legend: Q destination ranks, T tokens on this rank, N pairs this rank sends, U rows this rank sends.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sonic_ep.routing import INDEX_DTYPE


@dataclass(frozen=True, slots=True)
class SentRows:
    """The numbers of the rows that this rank sends, and how many there are. All tensors are int32.

    row_of_pair_N: (N,) the row of each pair, counted from the first row for its destination rank.
    sent_before: (Q * T + 1,) the number of rows before the one of destination rank q and token t, at q * T + t; then U.
    copies_T: (T + 1,) 0, then the number of rows that each token sends.
    num_dst: Q.
    """

    row_of_pair_N: Tensor
    sent_before: Tensor
    copies_T: Tensor
    num_dst: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.copies_T.shape[0] - 1

    @property
    def row_starts_Q(self) -> Tensor:
        """(Q + 1,) int32: the first row for each destination rank, and U."""
        return self.sent_before.as_strided((self.num_dst + 1,), (self.num_tokens,))


@dataclass(frozen=True, slots=True)
class TokenLists:
    """The rows that this rank sends, by destination rank and by token. All tensors are int32.

    token_of_sent_U: (U,) the token of each row.
    sent_by_token_U: (U,) the rows sorted by token, then by destination rank.
    sent_starts_T: (T + 1,) exclusive prefix sums of the rows per token, into sent_by_token_U.
    """

    token_of_sent_U: Tensor
    sent_by_token_U: Tensor
    sent_starts_T: Tensor


def is_token_in_rank(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> Tensor:
    """Returns (Q * T,) int32: 1 at q * T + t if destination rank q needs the row of token t, else 0.

    This is DeepEP's is_token_in_rank, transposed and flattened. It takes the arguments of `sent_rows`.

    Example: see the module.

        >>> import torch
        >>> from sonic_ep.kernels.dispatch.send_index.reference import is_token_in_rank
        >>> tokens, starts = torch.tensor([3, 1, 3, 1, 2]).int(), torch.tensor([0, 3, 5]).int()
        >>> is_token_in_rank(tokens, starts, 4).view(2, 4).tolist()
        [[0, 1, 0, 1], [0, 1, 1, 0]]
    """
    tokens_N = token_ids_N.long()
    return _token_in_rank(
        _dst_of_pair(tokens_N, pair_starts_Q), tokens_N, pair_starts_Q.shape[0] - 1, num_tokens
    ).flatten()


def sent_rows(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> SentRows:
    """Numbers the rows that this rank sends.

    Shapes: token_ids_N (N,) int32, the tokens of the pairs, by destination rank. pair_starts_Q (Q + 1,) int32, the
            first pair of each destination rank, and N.

    Example: see the module.

        >>> import torch
        >>> from sonic_ep.kernels.dispatch.send_index.reference import sent_rows
        >>> tokens, starts = torch.tensor([3, 1, 3, 1, 2]).int(), torch.tensor([0, 3, 5]).int()
        >>> sent = sent_rows(tokens, starts, 4)
        >>> sent.row_of_pair_N.tolist(), sent.row_starts_Q.tolist()
        ([1, 0, 1, 0, 1], [0, 2, 4])
        >>> sent.sent_before.tolist(), sent.copies_T.tolist()
        ([0, 0, 1, 1, 2, 2, 3, 4, 4], [0, 0, 2, 1, 1])
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
    """Returns the lists of the rows that this rank sends. num_sent is U.

    Example: token 1 sends rows 0 and 2, token 2 row 3, token 3 row 1.

        >>> import torch
        >>> from sonic_ep.kernels.dispatch.send_index.reference import sent_rows, token_lists
        >>> tokens, starts = torch.tensor([3, 1, 3, 1, 2]).int(), torch.tensor([0, 3, 5]).int()
        >>> lists = token_lists(sent_rows(tokens, starts, 4), num_sent=4)
        >>> lists.token_of_sent_U.tolist(), lists.sent_by_token_U.tolist(), lists.sent_starts_T.tolist()
        ([1, 3, 1, 2], [0, 2, 3, 1], [0, 0, 2, 3, 4])
    """
    is_token_in_rank_QT = sent.sent_before.diff().view(sent.num_dst, sent.num_tokens)
    token_of_sent_U = torch.nonzero_static(is_token_in_rank_QT, size=num_sent)[:, 1]
    lists = (token_of_sent_U, token_of_sent_U.argsort(stable=True), sent.copies_T.cumsum(0))
    return TokenLists(*(values.to(INDEX_DTYPE) for values in lists))
