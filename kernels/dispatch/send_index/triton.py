"""The sender's index lists in three Triton kernels and two prefix sums.

The first kernel marks the (destination rank, token) cells that have a pair. The prefix sum of the cells numbers the
rows, and the second kernel looks up the row of each pair. These are needed for the exchange of index lists. The third
kernel lists the rows by token, after the exchange. Atomics only act on integers and their results do not depend on the
order, so everything is deterministic.

Legend: Q destination ranks, T tokens on this rank, N pairs this rank sends, U rows this rank sends.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import INDEX_ALIGNMENT, cdiv, next_power_of_2
from sonic_ep.kernels.dispatch.send_index.reference import SentRows, TokenLists
from sonic_ep.routing import INDEX_DTYPE

_BLOCK = 256
_TILE = 2048  # cells (token, destination rank) per program of _by_token


@triton.jit
def _dst_ranks(pair, pair_starts_ptr, DST_RANKS: tl.constexpr):
    """Returns the int64 destination rank of each pair: how many ranks, but for rank 0, start at or before it."""
    dst = tl.zeros_like(pair)
    for other in range(1, DST_RANKS):
        dst += (pair >= tl.load(pair_starts_ptr + other)).to(tl.int32)
    return dst.to(tl.int64)


@fast_launch
@triton.jit(do_not_specialize=["N", "T"])
def _mark(
    token_ids_ptr,
    pair_starts_ptr,
    is_token_in_rank_ptr,
    copies_ptr,
    N,
    T,
    DST_RANKS: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Marks the cells (destination rank, token) that have a pair.

    A program handles BLOCK pairs. It reads token_ids (N,) and pair_starts (Q + 1,), and sets is_token_in_rank[dst * T +
    token] to 1. COUNTS: it also adds the newly set cells to copies[token]. Both outputs start as zeros.
    Grid: (cdiv(N, BLOCK),). Example: see reference.py.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (pair < N) & (pair < tl.load(pair_starts_ptr + DST_RANKS))  # spare capacity is after the pairs
    token = tl.load(token_ids_ptr + pair, mask=inside, other=0)
    cell = _dst_ranks(pair, pair_starts_ptr, DST_RANKS) * T + token
    if COUNTS:
        before = tl.atomic_xchg(is_token_in_rank_ptr + cell, 1, mask=inside, sem="relaxed")
        tl.atomic_add(copies_ptr + token, 1, mask=inside & (before == 0), sem="relaxed")
    else:
        tl.store(is_token_in_rank_ptr + cell, 1, mask=inside)


@fast_launch
@triton.jit(do_not_specialize=["N", "T"])
def _look_up(
    token_ids_ptr, pair_starts_ptr, sent_before_ptr, row_of_pair_ptr, N, T, DST_RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    """Looks up the row of each pair, counted from the first row for its destination rank.

    A program handles BLOCK pairs. It reads token_ids (N,), pair_starts (Q + 1,) and sent_before (Q * T + 1,), and
    writes row_of_pair (N,). Grid: (cdiv(N, BLOCK),). Example: see reference.py.
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (pair < N) & (pair < tl.load(pair_starts_ptr + DST_RANKS))  # spare capacity is after the pairs
    token = tl.load(token_ids_ptr + pair, mask=inside, other=0)
    first_cell = _dst_ranks(pair, pair_starts_ptr, DST_RANKS) * T
    row = tl.load(sent_before_ptr + first_cell + token, mask=inside, other=0)
    first_row = tl.load(sent_before_ptr + first_cell, mask=inside, other=0)
    tl.store(row_of_pair_ptr + pair, row - first_row, mask=inside)


@fast_launch
@triton.jit(do_not_specialize=["T"])
def _by_token(
    sent_before_ptr,
    sent_starts_ptr,
    token_of_sent_ptr,
    sent_by_token_ptr,
    T,
    Q,
    DST_RANKS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Lists the rows of TOKENS tokens by destination rank and by token.

    A program reads sent_before (Q * T + 1,) and sent_starts (T + 1,), and writes the entries of its tokens in
    token_of_sent and sent_by_token, both (U,). Grid: (cdiv(T, TOKENS),). Example: see reference.py.
    """
    dst = tl.arange(0, DST_RANKS)[None, :]
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inside = (dst < Q) & (token < T)
    cell_ptr = sent_before_ptr + dst.to(tl.int64) * T + token
    row = tl.load(cell_ptr, mask=inside, other=0)
    in_rank = (tl.load(cell_ptr + 1, mask=inside, other=0) - row).to(tl.int32)
    position = tl.load(sent_starts_ptr + token, mask=token < T, other=0) + tl.cumsum(in_rank, axis=1) - in_rank
    tl.store(token_of_sent_ptr + row, token + tl.zeros_like(row), mask=in_rank > 0)
    tl.store(sent_by_token_ptr + position, row, mask=in_rank > 0)


def is_token_in_rank(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> Tensor:
    """See kernels/dispatch/send_index/reference.py."""
    Q = pair_starts_Q.shape[0] - 1
    is_token_in_rank_QT = token_ids_N.new_zeros(Q * num_tokens, dtype=INDEX_DTYPE)
    _mark_tokens(token_ids_N.contiguous(), pair_starts_Q, is_token_in_rank_QT, None, num_tokens)
    return is_token_in_rank_QT


def _mark_tokens(
    token_ids_N: Tensor, pair_starts_Q: Tensor, is_token_in_rank_QT: Tensor, copies_T: Tensor | None, T: int
) -> None:
    N = token_ids_N.shape[0]
    _mark[(cdiv(N, _BLOCK),)](
        token_ids_N,
        pair_starts_Q,
        is_token_in_rank_QT,
        copies_T if copies_T is not None else is_token_in_rank_QT,
        N,
        T,
        DST_RANKS=pair_starts_Q.shape[0] - 1,
        COUNTS=copies_T is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def sent_rows(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> SentRows:
    """See kernels/dispatch/send_index/reference.py."""
    token_ids_N = token_ids_N.contiguous()
    N, Q, T = token_ids_N.shape[0], pair_starts_Q.shape[0] - 1, num_tokens
    spare = INDEX_ALIGNMENT - 1  # both parts start with an extra 0, and what follows it is aligned
    first_cell = cdiv(spare + 1 + T, INDEX_ALIGNMENT) * INDEX_ALIGNMENT + spare
    scratch = torch.zeros(first_cell + 1 + Q * T, dtype=INDEX_DTYPE, device=token_ids_N.device)
    copies_T, is_token_in_rank_QT = scratch[spare : spare + 1 + T], scratch[first_cell:]
    _mark_tokens(token_ids_N, pair_starts_Q, is_token_in_rank_QT[1:], copies_T[1:], T)
    sent_before = is_token_in_rank_QT.cumsum(0, dtype=INDEX_DTYPE)
    row_of_pair_N = torch.empty_like(token_ids_N)
    _look_up[(cdiv(N, _BLOCK),)](
        token_ids_N, pair_starts_Q, sent_before, row_of_pair_N, N, T, DST_RANKS=Q, BLOCK=_BLOCK, num_warps=4
    )
    return SentRows(row_of_pair_N, sent_before, copies_T, Q)


def token_lists(sent: SentRows, num_sent: int) -> TokenLists:
    """See kernels/dispatch/send_index/reference.py."""
    T, Q = sent.num_tokens, sent.num_dst
    sent_starts_T = sent.copies_T.cumsum(0, dtype=INDEX_DTYPE)
    token_of_sent_U, sent_by_token_U = (sent_starts_T.new_empty(num_sent) for _ in range(2))
    dst_ranks = next_power_of_2(Q)
    tokens = max(1, _TILE // dst_ranks)
    _by_token[(cdiv(T, tokens),)](
        sent.sent_before,
        sent_starts_T,
        token_of_sent_U,
        sent_by_token_U,
        T,
        Q,
        DST_RANKS=dst_ranks,
        TOKENS=tokens,
        num_warps=4,
    )
    return TokenLists(token_of_sent_U, sent_by_token_U, sent_starts_T)
