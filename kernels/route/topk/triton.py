"""Scores, top-K, counts and the check of the logits in one Triton kernel.

The kernel ranks experts by the scores that it writes, in the order of reference.py. So `top_experts` on these scores
gives exactly the same ids. The kernel's softmax and torch's can differ in the last bits.

Legend: T tokens on this rank, E experts, K experts per token, g expert groups.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.config import RouterConfig
from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import next_power_of_2
from sonic_ep.kernels.route.interface import TopK
from sonic_ep.kernels.route.scores import programs_for, sigmoid, softmax, tile_of

_POPPED = tl.constexpr(-(2**31))  # below every key: a column that is already selected or holds no expert
_NAN_KEY = tl.constexpr(-(2**31) + 1)  # below the key of every number
_NOWHERE = tl.constexpr(2**31 - 1)
# Every program adds its counts atomically to the counter of each expert, and additions to one counter are serialized.
# So for up to 128 columns we launch fewer programs, of four warps.
_SHARED_COUNT_COLUMNS, _SHARED_WARPS = 128, 4


@triton.jit
def _keys(values):
    """Returns int32 keys that order like the fp32 values, NaN below -inf.

    -0.0 needs no care: a score is never -0.0, nor is the sum of a score and a bias.
    """
    bits = values.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values != values, _NAN_KEY, keys)


@triton.jit
def _pop_best(keys, columns):
    """Returns the column of each row's largest key, the first of equal ones, and the keys with that one popped."""
    best = tl.max(keys, axis=1)
    winner = tl.min(tl.where(keys == best[:, None], columns, _NOWHERE), axis=1)
    return winner, tl.where(columns == winner[:, None], _POPPED, keys)


@triton.jit
def _allowed(
    ranking,
    inside,
    GROUPS: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Returns (ROWS, COLUMNS) bool: True if the column's group is one of the row's best GROUPS_PER_TOKEN groups.

    A group ranks by the sum of its two best rankings. A group with a NaN ranks last.
    """
    GROUPS_PADDED: tl.constexpr = COLUMNS // GROUP_WIDTH
    values = tl.reshape(tl.where(inside, ranking, float("-inf")), [ROWS, GROUPS_PADDED, GROUP_WIDTH])
    places = tl.arange(0, GROUP_WIDTH)[None, None, :]
    has_nan = tl.max((values != values).to(tl.int32), axis=2)
    first = tl.max(tl.where(values != values, float("-inf"), values), axis=2)
    place = tl.min(tl.where(values == first[:, :, None], places, _NOWHERE), axis=2)
    others = tl.where((places == place[:, :, None]) | (values != values), float("-inf"), values)
    sums = tl.where(has_nan != 0, float("nan"), first + tl.max(others, axis=2))
    groups = tl.arange(0, GROUPS_PADDED)[None, :]
    keys = tl.where(groups < GROUPS, _keys(sums), _POPPED)
    for _ in range(GROUPS_PER_TOKEN):
        _winner, keys = _pop_best(keys, groups)
    popped = ((keys == _POPPED) & (groups < GROUPS)).to(tl.int32)
    spread = tl.broadcast_to(popped[:, :, None], [ROWS, GROUPS_PADDED, GROUP_WIDTH])
    return tl.reshape(spread, [ROWS, COLUMNS]) != 0


@fast_launch
@triton.jit(do_not_specialize=["T"])
def _topk(
    logits_ptr,
    bias_ptr,
    scores_ptr,
    ranking_ptr,
    allowed_ptr,
    ids_ptr,
    counts_ptr,
    entropy_ptr,
    bad_ptr,
    tokens_ptr,
    T,
    E: tl.constexpr,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    COUNT_BAD: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    GROUPS_PER_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Computes scores, ranking, top-K ids, counts and entropy from fp32 logits (T, E).

    A program loops over tiles of ROWS tokens x all experts. It reads logits and the expert bias. It writes scores and
    ids; ranking (HAS_BIAS); the allowed mask (GROUPS > 1); and each token's entropy. It adds its counts per expert, and
    its number of non-finite logits (COUNT_BAD), atomically to int64 counters that start at 0. Without
    COUNT_BAD program 0 writes T to tokens (1,).
    Grid: (programs_for(T, tile),). Example: see reference.py.
    """
    # Each group is padded to GROUP_WIDTH columns, so the tile can be reshaped to (rows, groups, experts of a group).
    PER_GROUP: tl.constexpr = E // GROUPS
    columns = tl.arange(0, COLUMNS)
    experts = columns // GROUP_WIDTH * PER_GROUP + columns % GROUP_WIDTH
    is_expert = (columns // GROUP_WIDTH < GROUPS) & (columns % GROUP_WIDTH < PER_GROUP)
    counts = tl.zeros([COLUMNS], dtype=tl.int32)
    bad = tl.zeros([ROWS], dtype=tl.int32)
    start = tl.program_id(0) * ROWS
    if not COUNT_BAD:  # one register less where registers are few
        if start == 0:
            tl.store(tokens_ptr, T)
    while start < T:
        rows = start + tl.arange(0, ROWS)
        in_T = rows < T
        inside = in_T[:, None] & is_expert[None, :]
        places = rows.to(tl.int64)[:, None] * E + experts[None, :]
        logits = tl.load(logits_ptr + places, mask=inside, other=0.0)
        if COUNT_BAD:
            bad += tl.sum((~(tl.abs(logits) < float("inf"))).to(tl.int32), axis=1)
        if SOFTMAX:
            scores, _largest, _total = softmax(logits, is_expert[None, :])
        else:
            scores = sigmoid(logits)
        tl.store(scores_ptr + places, scores, mask=inside)
        shares = tl.where(is_expert[None, :], scores, 0.0)
        shares = shares * (1.0 / (tl.sum(shares, axis=1) + 1e-20))[:, None]
        # 0 * log(0) counts as 0, its limit; NaN stays NaN.
        terms = tl.where(shares == 0, 0.0, shares * tl.log(shares))
        # A sigmoid makes finite scores of infinite logits.
        is_bad = tl.max((~(tl.abs(logits) < float("inf"))).to(tl.int32), axis=1) > 0
        tl.store(entropy_ptr + rows, tl.where(is_bad, float("nan"), -tl.sum(terms, axis=1)), mask=in_T)
        ranking = scores
        if HAS_BIAS:
            ranking = scores + tl.load(bias_ptr + experts, mask=is_expert, other=0.0)[None, :]
            tl.store(ranking_ptr + places, ranking, mask=inside)
        keys = tl.where(is_expert[None, :], _keys(ranking), _POPPED)
        allowed, others = inside, keys
        if GROUPS > 1:
            allowed = _allowed(ranking, is_expert[None, :], GROUPS, GROUP_WIDTH, GROUPS_PER_TOKEN, COLUMNS, ROWS)
            tl.store(allowed_ptr + places, allowed.to(tl.uint8), mask=inside)
            others = tl.where(allowed, _POPPED, keys)
            keys = tl.where(allowed, keys, _POPPED)
        for k in tl.static_range(K):
            if GROUPS > 1 and k == GROUPS_PER_TOKEN * PER_GROUP:
                keys = others
            winner, keys = _pop_best(keys, columns[None, :])
            expert = winner // GROUP_WIDTH * PER_GROUP + winner % GROUP_WIDTH
            tl.store(ids_ptr + rows.to(tl.int64) * K + k, expert.to(tl.int64), mask=in_T)
        chosen = inside & (keys == _POPPED)
        if GROUPS > 1 and K <= GROUPS_PER_TOKEN * PER_GROUP:
            chosen = chosen & allowed
        counts += tl.sum(chosen.to(tl.int32), axis=0)
        start += tl.num_programs(0) * ROWS
    tl.atomic_add(counts_ptr + experts, counts.to(tl.int64), mask=is_expert & (counts > 0), sem="relaxed")
    if COUNT_BAD:
        tl.atomic_add(bad_ptr, tl.sum(bad, axis=0).to(tl.int64), sem="relaxed")


@functools.cache
def _tile_of(columns: int) -> dict[str, int]:
    return tile_of(columns, _SHARED_WARPS if columns <= _SHARED_COUNT_COLUMNS else 1)


def compute_topk(logits_TE: Tensor, expert_bias_E: Tensor | None, K: int, config: RouterConfig) -> TopK:
    """See RouterOperations in kernels/route/interface.py."""
    T, E = logits_TE.shape
    width = next_power_of_2(E // config.num_groups)
    columns = next_power_of_2(config.num_groups) * width
    tile = _tile_of(columns)
    logits_TE = logits_TE.contiguous()
    scores_TE = logits_TE.new_empty(T, E)
    ranking_TE = scores_TE if expert_bias_E is None else logits_TE.new_empty(T, E)
    grouped = config.num_groups > 1
    allowed_TE = logits_TE.new_empty(T, E, dtype=torch.bool) if grouped else None
    topk_ids_TK = scores_TE.new_empty(T, K, dtype=torch.int64)
    entropy_T, tokens_1 = scores_TE.new_empty(T), topk_ids_TK.new_empty(1)
    counts_E = topk_ids_TK.new_zeros(E)
    bad_logits = topk_ids_TK.new_zeros(()) if config.check_logits else None
    if T > 0:
        _topk[(programs_for(T, tile),)](
            logits_TE,
            logits_TE if expert_bias_E is None else expert_bias_E.contiguous(),
            scores_TE,
            ranking_TE,
            scores_TE if allowed_TE is None else allowed_TE.view(torch.uint8),
            topk_ids_TK,
            counts_E,
            entropy_T,
            counts_E if bad_logits is None else bad_logits,
            tokens_1,
            T,
            E=E,
            K=K,
            SOFTMAX=config.score == "softmax",
            HAS_BIAS=expert_bias_E is not None,
            COUNT_BAD=config.check_logits,
            GROUPS=config.num_groups,
            GROUP_WIDTH=width,
            GROUPS_PER_TOKEN=config.groups_per_token,
            **tile,
            # Without fusion score + bias rounds the stored score first, as any code does that adds the bias to it.
            enable_fp_fusion=False,
        )
    else:
        tokens_1.zero_()
    tokens = tokens_1 if bad_logits is None else None
    measured = counts_E, entropy_T, bad_logits
    return TopK(scores_TE, ranking_TE, allowed_TE, topk_ids_TK, *measured, tokens_1=tokens)
