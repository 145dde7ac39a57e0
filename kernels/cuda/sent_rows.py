"""The sender's index lists as three Triton kernels around two prefix sums.

A table of needed (owner, token) rows is marked pair by pair; its prefix sum numbers the rows, which the pairs then look
up. The second half, which nobody waits for, lists them by token. Atomics act on integers whose result does not depend
on their order; everything is deterministic.

Legend: see kernels/sent_rows.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.cuda.launch import launched
from sonic_ep.kernels.cuda.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.sent_rows import SentRows, TokenLists
from sonic_ep.routing import INDEX_DTYPE

_BLOCK = 256
_TILE = 2048  # elements of a tile of tokens and owners


@triton.jit
def _owners(pair, pair_starts_ptr, OWNERS: tl.constexpr):
    """int64 owner rank of each pair: how many of the other owners' pairs have begun."""
    owner = tl.zeros_like(pair)
    for other in range(1, OWNERS):
        owner += (pair >= tl.load(pair_starts_ptr + other)).to(tl.int32)
    return owner.to(tl.int64)


@launched
@triton.jit(do_not_specialize=["N", "T"])
def _mark(
    token_ids_ptr,
    pair_starts_ptr,
    needed_ptr,
    copies_ptr,
    N,
    T,
    OWNERS: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """needed_QT[owner, token] = 1, and copies_T[token] counts the owners if COUNTS."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (pair < N) & (pair < tl.load(pair_starts_ptr + OWNERS))  # what is spare stands behind the pairs
    token = tl.load(token_ids_ptr + pair, mask=inside, other=0)
    cell = _owners(pair, pair_starts_ptr, OWNERS) * T + token
    if COUNTS:
        before = tl.atomic_xchg(needed_ptr + cell, 1, mask=inside, sem="relaxed")
        tl.atomic_add(copies_ptr + token, 1, mask=inside & (before == 0), sem="relaxed")
    else:
        tl.store(needed_ptr + cell, 1, mask=inside)


@launched
@triton.jit(do_not_specialize=["N", "T"])
def _look_up(
    token_ids_ptr, pair_starts_ptr, sent_before_ptr, row_of_pair_ptr, N, T, OWNERS: tl.constexpr, BLOCK: tl.constexpr
):
    """row_of_pair_N: the number of its (owner, token), counted from the owner's first."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (pair < N) & (pair < tl.load(pair_starts_ptr + OWNERS))  # what is spare stands behind the pairs
    token = tl.load(token_ids_ptr + pair, mask=inside, other=0)
    first_cell = _owners(pair, pair_starts_ptr, OWNERS) * T
    row = tl.load(sent_before_ptr + first_cell + token, mask=inside, other=0)
    first_row = tl.load(sent_before_ptr + first_cell, mask=inside, other=0)
    tl.store(row_of_pair_ptr + pair, row - first_row, mask=inside)


@launched
@triton.jit(do_not_specialize=["T"])
def _by_token(
    sent_before_ptr,
    sent_starts_ptr,
    token_of_sent_ptr,
    sent_by_token_ptr,
    T,
    Q,
    OWNERS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program lists the rows of a few tokens: token_of_sent_U and sent_by_token_U."""
    owner = tl.arange(0, OWNERS)[None, :]
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inside = (owner < Q) & (token < T)
    cell_ptr = sent_before_ptr + owner.to(tl.int64) * T + token
    row = tl.load(cell_ptr, mask=inside, other=0)
    needed = (tl.load(cell_ptr + 1, mask=inside, other=0) - row).to(tl.int32)
    position = tl.load(sent_starts_ptr + token, mask=token < T, other=0) + tl.cumsum(needed, axis=1) - needed
    tl.store(token_of_sent_ptr + row, token + tl.zeros_like(row), mask=needed > 0)
    tl.store(sent_by_token_ptr + position, row, mask=needed > 0)


def needed_rows(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> Tensor:
    """See kernels/sent_rows.py."""
    Q = pair_starts_Q.shape[0] - 1
    needed_QT = torch.zeros(Q * num_tokens, dtype=INDEX_DTYPE, device=token_ids_N.device)
    _mark_needed(token_ids_N.contiguous(), pair_starts_Q, needed_QT, None, num_tokens)
    return needed_QT


def _mark_needed(
    token_ids_N: Tensor, pair_starts_Q: Tensor, needed_QT: Tensor, copies_T: Tensor | None, T: int
) -> None:
    N = token_ids_N.shape[0]
    _mark[(cdiv(N, _BLOCK),)](
        token_ids_N,
        pair_starts_Q,
        needed_QT,
        copies_T if copies_T is not None else needed_QT,
        N,
        T,
        OWNERS=pair_starts_Q.shape[0] - 1,
        COUNTS=copies_T is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def sent_rows(token_ids_N: Tensor, pair_starts_Q: Tensor, num_tokens: int) -> SentRows:
    """See kernels/sent_rows.py."""
    token_ids_N = token_ids_N.contiguous()
    N, Q, T = token_ids_N.shape[0], pair_starts_Q.shape[0] - 1, num_tokens
    scratch = torch.zeros(Q * T + 1 + T + 1, dtype=INDEX_DTYPE, device=token_ids_N.device)
    needed_QT, copies_T = scratch.split((Q * T + 1, T + 1))  # each behind a zero
    _mark_needed(token_ids_N, pair_starts_Q, needed_QT[1:], copies_T[1:], T)
    sent_before = needed_QT.cumsum(0, dtype=INDEX_DTYPE)
    row_of_pair_N = torch.empty_like(token_ids_N)
    _look_up[(cdiv(N, _BLOCK),)](
        token_ids_N, pair_starts_Q, sent_before, row_of_pair_N, N, T, OWNERS=Q, BLOCK=_BLOCK, num_warps=4
    )
    return SentRows(row_of_pair_N, sent_before, copies_T, Q)


def token_lists(sent: SentRows, num_sent: int) -> TokenLists:
    """See kernels/sent_rows.py."""
    T, Q = sent.num_tokens, sent.num_owners
    sent_starts_T = sent.copies_T.cumsum(0, dtype=INDEX_DTYPE)
    token_of_sent_U, sent_by_token_U = (sent_starts_T.new_empty(num_sent) for _ in range(2))
    owners = next_power_of_2(Q)
    tokens = max(1, _TILE // owners)
    _by_token[(cdiv(T, tokens),)](
        sent.sent_before,
        sent_starts_T,
        token_of_sent_U,
        sent_by_token_U,
        T,
        Q,
        OWNERS=owners,
        TOKENS=tokens,
        num_warps=4,
    )
    return TokenLists(token_of_sent_U, sent_by_token_U, sent_starts_T)
