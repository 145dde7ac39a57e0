"""Combine weights of the routed pairs, the auxiliary losses, and the gradient of the logits from both, in Triton.

Backward recomputes the scores, so the logits are the only T x E tensor saved for backward. First the gradients of the
weights are scattered into a T x E buffer (pairs are unique). Then one pass over the logits reads them from this buffer
and overwrites it with the gradient of the logits. Sums over tokens take two stages, without atomics.

Legend: T tokens on this rank, E experts, K experts per token, N pairs this rank sends, B sequences, L tokens of a
sequence, S ranks of the EP group, Z partial sums of one value.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.config import RouterConfig
from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import cdiv, next_power_of_2
from sonic_ep.kernels.program.trace import by_torch
from sonic_ep.kernels.route.interface import Losses, LossGradient, PairGradients
from sonic_ep.kernels.route.scores import programs_for, sigmoid, softmax, tile_of

# Pairs of a program. Fewer for the weights, because each pair reads the K scores of its token.
_PAIRS_OF_WEIGHTS, _PAIRS = 64, 256
# The most programs that sum the losses' terms over tokens, unless there are more sequences. In the second stage one
# program per sequence adds their partial sums, in tiles of _TILE_OF_SUMS values.
_SUMS, _TILE_OF_SUMS = 256, 16384
# Avoids division by zero, as in reference.py.
_EPSILON = tl.constexpr(1e-20)


@fast_launch
@triton.jit(do_not_specialize=["N", "scale"])
def _weights_of_pairs(
    scores_ptr,
    ids_ptr,
    tokens_ptr,
    experts_ptr,
    weights_ptr,
    N,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Computes the combine weights of PAIRS pairs.

    A program reads each pair's token, expert and score, and with RENORMALIZE the scores and ids of the token's top-K.
    It writes fp32 weights, and nothing for spare entries (token -1). Grid: (cdiv(N, PAIRS),).
    Example: see reference.py.
    """
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    tokens = tl.load(tokens_ptr + pairs, mask=pairs < N, other=-1).to(tl.int64)
    in_N = tokens >= 0  # entries at the end of the list may be spare
    experts = tl.load(experts_ptr + pairs, mask=in_N, other=0).to(tl.int64)
    weights = tl.load(scores_ptr + tokens * E + experts, mask=in_N, other=0.0)
    if RENORMALIZE:
        k = tl.arange(0, K_PADDED)[None, :]
        inside = in_N[:, None] & (k < K)
        ids = tl.load(ids_ptr + tokens[:, None] * K + k, mask=inside, other=0)
        scores = tl.load(scores_ptr + tokens[:, None] * E + ids, mask=inside, other=0.0)
        divided = tl.div_rn(weights, tl.sum(scores, axis=1) + _EPSILON)
        if SOFTMAX:
            chosen = tl.max((inside & (ids == experts[:, None])).to(tl.int32), axis=1)
            weights = tl.where(chosen != 0, divided, weights)
        else:
            weights = divided
    tl.store(weights_ptr + pairs, weights * scale, mask=in_N)


@fast_launch
@triton.jit(do_not_specialize=["N", "scale"])
def _spread_gradients(tokens_ptr, experts_ptr, dweights_ptr, dense_ptr, N, scale, E: tl.constexpr, PAIRS: tl.constexpr):
    """Writes dweights * scale of PAIRS pairs to their places in a zeroed (T, E) fp32 buffer. Spare entries are skipped.

    Grid: (cdiv(N, PAIRS),). Example: pair (token 1, expert 0) with dweight 3, scale 2, E 4 -> element [1, 0] is 6.
    """
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    tokens = tl.load(tokens_ptr + pairs, mask=pairs < N, other=-1).to(tl.int64)
    in_N = tokens >= 0
    experts = tl.load(experts_ptr + pairs, mask=in_N, other=0).to(tl.int64)
    dweights = tl.load(dweights_ptr + pairs, mask=in_N, other=0.0)
    tl.store(dense_ptr + tokens * E + experts, dweights * scale, mask=in_N)


@triton.jit
def _is_chosen(ids_ptr, rows, in_T, experts, K: tl.constexpr):
    """Returns (rows, columns) bool: True where the expert is in the token's top-K."""
    chosen = rows[:, None] < 0
    for k in tl.static_range(K):
        ids = tl.load(ids_ptr + rows * K + k, mask=in_T, other=-1).to(tl.int32)
        chosen = chosen | (experts[None, :] == ids[:, None])
    return chosen


@fast_launch
@triton.jit  # specialized for L: without, it spills at 512 experts on Blackwell
def _loss_terms(
    logits_ptr,
    ids_ptr,
    shares_ptr,
    counts_ptr,
    squares_ptr,
    L,
    E: tl.constexpr,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BALANCE: tl.constexpr,
    COUNT: tl.constexpr,
    SQUARES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums the losses' terms over some tokens of one sequence: the first of two stages.

    Program (b, z) loops over tiles of ROWS tokens of sequence b. It reads logits and, with COUNT, top-K ids. It writes
    partial sums number z: shares (B, Z, E) fp32 with BALANCE, counts (B, Z, E) int32 with COUNT, and squared logsumexps
    (B, Z) fp32 with SQUARES. Grid: (B, Z). Example: see reference.py.
    """
    experts = tl.arange(0, COLUMNS)
    is_expert = experts < E
    shares = tl.zeros([COLUMNS], dtype=tl.float32)
    counts = tl.zeros([COLUMNS], dtype=tl.int32)
    squares = tl.zeros([ROWS], dtype=tl.float32)
    start = tl.program_id(1) * ROWS
    while start < L:
        in_L = start + tl.arange(0, ROWS) < L
        rows = (tl.program_id(0) * L + start).to(tl.int64) + tl.arange(0, ROWS)
        inside = in_L[:, None] & is_expert[None, :]
        logits = tl.load(logits_ptr + rows[:, None] * E + experts[None, :], mask=inside, other=0.0)
        probabilities, largest, total = softmax(logits, is_expert[None, :])
        if SQUARES:
            logsumexp = largest + tl.log(total)
            squares += tl.where(in_L, logsumexp * logsumexp, 0.0)
        if BALANCE:
            if not SOFTMAX:
                scores = tl.where(is_expert[None, :], sigmoid(logits), 0.0)
                probabilities = scores * (1.0 / (tl.sum(scores, axis=1) + _EPSILON))[:, None]
            shares += tl.sum(tl.where(inside, probabilities, 0.0), axis=0)
        if COUNT:
            counts += tl.sum(_is_chosen(ids_ptr, rows, in_L, experts, K).to(tl.int32), axis=0)
        start += tl.num_programs(1) * ROWS
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    if BALANCE:
        tl.store(shares_ptr + program * E + experts, shares, mask=is_expert)
    if COUNT:
        tl.store(counts_ptr + program * E + experts, counts, mask=is_expert)
    if SQUARES:
        tl.store(squares_ptr + program, tl.sum(squares, axis=0))


@fast_launch
@triton.jit(do_not_specialize=["balance_factor", "z_factor", "pairs_of_sequence", "Z"])
def _losses(
    shares_ptr,
    counts_ptr,
    squares_ptr,
    times_ptr,
    losses_ptr,
    dshares_ptr,
    times_stride,
    balance_factor,
    z_factor,
    pairs_of_sequence,
    Z,
    S,
    E: tl.constexpr,
    BALANCE: tl.constexpr,
    COUNT: tl.constexpr,
    SQUARES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds the partial sums of one sequence and computes its part of the losses: the second stage.

    A program reads Z partial sums, and without COUNT the gathered counts `times` (S, E). It writes the weighted loss of
    its sequence to losses (B,), and with BALANCE dshares (B, E) = load * balance_factor. pairs_of_sequence: L * K.
    Grid: (B,). Example: see reference.py.
    """
    sequence, expert, row = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    is_expert = expert < E
    loss = tl.zeros([1], dtype=tl.float32)
    if BALANCE:
        shares = tl.zeros([COLUMNS], dtype=tl.float32)
        counts = tl.zeros([COLUMNS], dtype=tl.int32)
        first = 0
        while first < Z:
            places = (sequence * Z + first + row)[:, None] * E + expert[None, :]
            inside = (first + row < Z)[:, None] & is_expert[None, :]
            shares += tl.sum(tl.load(shares_ptr + places, mask=inside, other=0.0), axis=0)
            if COUNT:
                counts += tl.sum(tl.load(counts_ptr + places, mask=inside, other=0), axis=0)
            first += ROWS
        if COUNT:
            load = counts.to(tl.float32) / pairs_of_sequence
        else:  # the load in the whole EP group
            times = tl.zeros([COLUMNS], dtype=tl.int64)
            rank = 0
            while rank < S:
                times += tl.load(times_ptr + rank * times_stride + expert, mask=is_expert, other=0)
                rank += 1
            load = tl.div_rn(times.to(tl.float32), tl.sum(times, axis=0).to(tl.float32))
        dshares = load * balance_factor
        tl.store(dshares_ptr + sequence * E + expert, dshares, mask=is_expert)
        loss += tl.sum(tl.where(is_expert, dshares * shares, 0.0), axis=0)
    if SQUARES:
        squares = tl.zeros([ROWS], dtype=tl.float32)
        first = 0
        while first < Z:
            squares += tl.load(squares_ptr + sequence * Z + first + row, mask=first + row < Z, other=0.0)
            first += ROWS
        loss += tl.sum(squares, axis=0) * z_factor
    tl.store(losses_ptr + sequence + tl.arange(0, 1), loss)


@triton.jit
def _through_weights(dweights, scores, chosen, SOFTMAX: tl.constexpr):
    """Returns the gradient of the scores from the gradient of renormalized weights; see `weights_of_pairs`."""
    inverse = 1.0 / (tl.sum(tl.where(chosen, scores, 0.0), axis=1) + _EPSILON)
    divides = dweights
    dscores = dweights * inverse[:, None]
    if SOFTMAX:
        divides = tl.where(chosen, dweights, 0.0)
        dscores = tl.where(chosen, dscores, dweights)
    # Multiply in this order, because inverse * inverse can overflow.
    dsum = -tl.sum(divides * scores, axis=1) * inverse * inverse
    return dscores + tl.where(chosen, dsum[:, None], 0.0)


@fast_launch
@triton.jit(do_not_specialize=["L", "z_factor"])
def _logits_gradient(
    logits_ptr,
    ids_ptr,
    dweights_ptr,
    dshares_ptr,
    dloss_ptr,
    dlogits_ptr,
    L,
    z_factor,
    E: tl.constexpr,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BALANCE: tl.constexpr,
    SQUARES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Computes the gradient of the logits from the weights of pairs (WEIGHTS) and the losses (BALANCE, SQUARES).

    Program (b, p) loops over tiles of ROWS tokens of sequence b. It reads logits, top-K ids (RENORMALIZE), the dense
    gradients of the weights (T, E), dshares (B, E) and the gradient of the loss, and writes dlogits (T, E) fp32.
    dlogits_ptr may equal dweights_ptr: a program reads each element before it writes it.
    Grid: (B, programs_for(L, tile, B)). Example: see reference.py.
    """
    experts = tl.arange(0, COLUMNS)
    is_expert = experts < E
    start = tl.program_id(1) * ROWS
    while start < L:
        in_L = start + tl.arange(0, ROWS) < L
        rows = (tl.program_id(0) * L + start).to(tl.int64) + tl.arange(0, ROWS)
        inside = in_L[:, None] & is_expert[None, :]
        places = rows[:, None] * E + experts[None, :]
        logits = tl.load(logits_ptr + places, mask=inside, other=0.0)
        probabilities, largest, total = softmax(logits, is_expert[None, :])
        scores = probabilities
        if not SOFTMAX:
            scores = tl.where(is_expert[None, :], sigmoid(logits), 0.0)
        dscores = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        if WEIGHTS:
            dscores = tl.load(dweights_ptr + places, mask=inside, other=0.0)
            if RENORMALIZE:
                dscores = _through_weights(dscores, scores, _is_chosen(ids_ptr, rows, in_L, experts, K), SOFTMAX)
        if BALANCE:
            dshares_at = dshares_ptr + tl.program_id(0).to(tl.int64) * E + experts
            dshares = (tl.load(dshares_at, mask=is_expert, other=0.0) * tl.load(dloss_ptr))[None, :]
            if not SOFTMAX:
                inverse = 1.0 / (tl.sum(scores, axis=1) + _EPSILON)
                mean = tl.sum(dshares * scores, axis=1) * inverse
                dshares = (dshares - mean[:, None]) * inverse[:, None]
            dscores += dshares
        if SOFTMAX:
            dlogits = scores * (dscores - tl.sum(scores * dscores, axis=1)[:, None])
        else:
            dlogits = dscores * scores * (1.0 - scores)
        if SQUARES:
            logsumexp = largest + tl.log(total)
            dlogits += probabilities * (logsumexp * (z_factor * tl.load(dloss_ptr)))[:, None]
        tl.store(dlogits_ptr + places, dlogits, mask=inside)
        start += tl.num_programs(1) * ROWS


_tile_of = functools.cache(tile_of)


def weights_of_pairs(
    scores_TE: Tensor, topk_ids_TK: Tensor, token_ids_N: Tensor, expert_ids_N: Tensor, config: RouterConfig
) -> Tensor:
    """See RouterOperations in kernels/route/interface.py."""
    N, K = token_ids_N.shape[0], topk_ids_TK.shape[1]
    weights_N = scores_TE.new_empty(N)
    if N > 0:
        _weights_of_pairs[(cdiv(N, _PAIRS_OF_WEIGHTS),)](
            scores_TE,
            topk_ids_TK.contiguous(),
            token_ids_N.contiguous(),
            expert_ids_N.contiguous(),
            weights_N,
            N,
            float(config.scale),
            E=scores_TE.shape[1],
            K=K,
            K_PADDED=next_power_of_2(K),
            SOFTMAX=config.score == "softmax",
            RENORMALIZE=config.renormalize,
            PAIRS=_PAIRS_OF_WEIGHTS,
        )
    return weights_N


def losses(logits_TE: Tensor, ids_TK: Tensor, times_SE: Tensor, num_sequences: int, config: RouterConfig) -> Losses:
    """See RouterOperations in kernels/route/interface.py."""
    (T, E), K, B = logits_TE.shape, ids_TK.shape[1], num_sequences
    columns, L = next_power_of_2(E), T // num_sequences
    tile = tile_of(columns, warps=4)
    Z = min(programs_for(L, tile, B), max(1, _SUMS // B))
    flags = {
        "BALANCE": config.balance != "none",
        "COUNT": config.balance in ("sequence", "batch"),
        "SQUARES": config.z_loss_coef != 0,
    }
    # A variant does not access the buffers that it does not need, so any tensor can stand for them.
    shares_BZE = logits_TE.new_empty(B, Z, E) if flags["BALANCE"] else logits_TE
    counts_BZE = logits_TE.new_empty(B, Z, E, dtype=torch.int32) if flags["COUNT"] else ids_TK
    squares_BZ = logits_TE.new_empty(B, Z) if flags["SQUARES"] else logits_TE
    _loss_terms[(B, Z)](
        logits_TE.contiguous(),
        ids_TK.contiguous(),
        shares_BZE,
        counts_BZE,
        squares_BZ,
        L,
        E=E,
        K=K,
        SOFTMAX=config.score == "softmax",
        **flags,
        **tile,
    )
    assert times_SE.stride(1) == 1
    losses_B, dshares_BE = logits_TE.new_empty(B), logits_TE.new_empty(B, E) if flags["BALANCE"] else None
    _losses[(B,)](
        shares_BZE,
        counts_BZE,
        squares_BZ,
        times_SE,
        losses_B,
        losses_B if dshares_BE is None else dshares_BE,
        times_SE.stride(0),
        float(config.balance_coef) * E / T,
        config.z_loss_coef / T,
        L * K,
        Z,
        times_SE.shape[0],
        E=E,
        COLUMNS=columns,
        ROWS=max(1, _TILE_OF_SUMS // columns),
        num_warps=8,
        **flags,
    )
    value = losses_B.as_strided((), ()) if B == 1 else by_torch(torch.sum, (), losses_B.dtype, losses_B)
    return Losses(value, dshares_BE)


def logits_gradient(
    logits_TE: Tensor,
    topk_ids_TK: Tensor,
    pairs: PairGradients | None,
    loss: LossGradient | None,
    config: RouterConfig,
) -> Tensor:
    """See RouterOperations in kernels/route/interface.py."""
    T, E = logits_TE.shape
    dlogits_TE = logits_TE.new_empty(T, E)
    if pairs is not None:
        _spread(pairs, dlogits_TE.zero_(), float(config.scale))
    dshares_BE = None if loss is None else loss.dshares_BE
    B = 1 if dshares_BE is None else dshares_BE.shape[0]
    tile = _tile_of(next_power_of_2(E))
    _logits_gradient[(B, programs_for(T // B, tile, B))](
        logits_TE.contiguous(),
        topk_ids_TK.contiguous(),
        dlogits_TE,
        logits_TE if dshares_BE is None else dshares_BE,
        logits_TE if loss is None else loss.dloss,
        dlogits_TE,
        T // B,
        2.0 * config.z_loss_coef / T,
        E=E,
        K=topk_ids_TK.shape[1],
        SOFTMAX=config.score == "softmax",
        RENORMALIZE=config.renormalize,
        WEIGHTS=pairs is not None,
        BALANCE=dshares_BE is not None,
        SQUARES=loss is not None and config.z_loss_coef != 0,
        **tile,
    )
    return dlogits_TE


def _spread(pairs: PairGradients, dense_TE: Tensor, scale: float) -> None:
    N = pairs.dweights_N.shape[0]
    if N > 0:
        _spread_gradients[(cdiv(N, _PAIRS),)](
            pairs.token_ids_N.contiguous(),
            pairs.expert_ids_N.contiguous(),
            pairs.dweights_N.contiguous(),
            dense_TE,
            N,
            scale,
            E=dense_TE.shape[1],
            PAIRS=_PAIRS,
        )
