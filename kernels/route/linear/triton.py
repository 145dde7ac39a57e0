"""The router's linear layer for bf16 rows on tensor cores, as exact as fp32 arithmetic on the same weights.

An fp32 value is the sum of three bf16 *parts* (high, middle and low; 8 bits each, 24 in all). The product of two bf16
values is exact in fp32. So three bf16 GEMMs give the result of one fp32 GEMM. Tensor cores truncate sums instead of
rounding them. In simulation this makes 3 times the error of fp32 arithmetic over 2048 terms and 6 times over 7168. So
here tensor cores sum only 64 terms at a time, from the low part to the high part, and these sums are added in fp32 with
rounding.

Parts are stored in four slots: high, high, middle, low. The slots of the gradient of the logits are in reverse order.
Three slots of the weight (high, high, middle) and three of the gradient (middle, high, high), multiplied as one long
contraction, give the three largest products: high * middle + high * high + middle * high. That is enough for a gradient
of x, which is rounded to bf16. Experts are padded with zeros to a multiple of 16, so that every row of parts is
aligned.

Legend: T tokens on this rank, H hidden size, E experts, Z partial sums of one value.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.launch import fast_launch, sm_major
from sonic_ep.kernels.common.sizes import cdiv
from sonic_ep.kernels.program.sizes import item_of, smaller

_ALIGNMENT = 16
_SPLIT_BLOCK, _ADDED_BLOCK = 1024, 512  # elements of a program
_BLOCK_N, _BLOCK_K = 128, 64
# Tokens that a program of the logits may compute in addition to _BLOCK_N, and its relative run time with them.
_EXTRA_N, _EXTRA_N_COST = 64, 1.5
# Programs that run at once (SMs of an H100). For the gradient of the weight: the fewest rows of x that a program sums,
# the most programs that split one sum, and the cost of one more split as a share of the GEMM. They are constants, so
# that every device adds the same terms.
_PROGRAMS, _MIN_ROWS_PER_SPLIT, _MAX_SPLITS, _SPLIT_COST = 132, 512, 16, 0.03


class _Parts(NamedTuple):
    """The bf16 parts of a matrix.

    buffer: all slots. first: its element where slot 0 starts. slot, row: elements from one slot to the next, and from
    one row to the next. `slot` is negative if the slots are in reverse order.
    """

    buffer: Tensor
    first: int
    slot: int
    row: int


@fast_launch
@triton.jit(do_not_specialize=["size", "R"])
def _split(values_ptr, buffer_ptr, first, slot, row, size, R, C, PADDED_C: tl.constexpr, BLOCK: tl.constexpr):
    """Splits values (R, C) as fp32 into bf16 parts: high into slots 0 and 1, middle into slot 2, low into slot 3.

    A program splits BLOCK of the `size` elements of one slot; elements beyond (R, C) become zeros.
    Grid: (cdiv(size, BLOCK),). Example: 1 + 2^-9 + 2^-18 -> 1, 1, 2^-9, 2^-18.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    r, c = places // PADDED_C, places % PADDED_C
    values = tl.load(values_ptr + r * C + c, mask=(r < R) & (c < C), other=0.0).to(tl.float32)
    high = values.to(tl.bfloat16)
    rest = values - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    buffer_ptr += first + r * row + c
    inside = places < size
    tl.store(buffer_ptr, high, mask=inside)
    tl.store(buffer_ptr + slot, high, mask=inside)
    tl.store(buffer_ptr + 2 * slot, middle, mask=inside)
    tl.store(buffer_ptr + 3 * slot, low, mask=inside)


@triton.jit
def _sum_of_parts(low, middle, high, right):
    """Returns (low + middle + high) @ right over 64 terms, added in this order."""
    terms = tl.dot(low, right)
    terms = tl.dot(middle, right, terms)
    return tl.dot(high, right, terms)


@fast_launch
@triton.jit(do_not_specialize=["T", "steps"])
def _multiply(
    left_ptr,
    right_ptr,
    bias_ptr,
    out_ptr,
    M,
    PADDED_M,
    T,
    H,
    left_first,
    left_slot,
    left_m,
    left_k,
    right_n,
    right_k,
    out_split,
    out_m,
    out_n,
    steps,
    OVER_TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EXTRA_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes out[split, m, n] = sum of left[m, k] * right[n, k] over the k of one split, plus bias[m] if HAS_BIAS.

    OVER_TOKENS: the k are the T tokens and the n the H columns of x, else the other way round. A program reads the
    parts of `left` and bf16 `right`, and writes one tile of BLOCK_M x (BLOCK_N + EXTRA_N). BLOCK_N and EXTRA_N are
    powers of two; EXTRA_N may be 0. A split has steps * BLOCK_K terms.
    Grid: (tiles of m * tiles of n, splits), with m fastest. Example: see reference.py.
    """
    if OVER_TOKENS:
        N, K = H, T
    else:
        N, K = T, H
    tiles_m = tl.cdiv(PADDED_M, BLOCK_M)
    first_m = (tl.program_id(0) % tiles_m).to(tl.int64) * BLOCK_M
    first_n = (tl.program_id(0) // tiles_m).to(tl.int64) * (BLOCK_N + EXTRA_N)
    first_k = tl.program_id(1).to(tl.int64) * (steps * BLOCK_K)
    left_ptr += left_first + first_m * left_m + first_k * left_k
    right_ptr += first_n * right_n + first_k * right_k
    out_ptr += tl.program_id(1).to(tl.int64) * out_split + first_m * out_m + first_n * out_n
    # Offsets within a tile fit in 32 bits.
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    in_M, in_N = (first_m + m < PADDED_M)[:, None], (first_n + n < N)[None, :]
    left_tile = m[:, None] * left_m + k[None, :] * left_k
    right_tile = n[None, :] * right_n + k[:, None] * right_k
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if EXTRA_N:
        extra_n = BLOCK_N + tl.arange(0, EXTRA_N)
        extra_in_N = (first_n + extra_n < N)[None, :]
        extra_tile = extra_n[None, :] * right_n + k[:, None] * right_k
        extra_total = tl.zeros([BLOCK_M, EXTRA_N], dtype=tl.float32)
    rest = (K - first_k).to(tl.int32)
    for _ in range(0, steps):
        in_K = k < rest
        right = tl.load(right_ptr + right_tile, mask=in_N & in_K[:, None], other=0.0)
        low = tl.load(left_ptr + 3 * left_slot + left_tile, mask=in_M & in_K[None, :], other=0.0)
        middle = tl.load(left_ptr + 2 * left_slot + left_tile, mask=in_M & in_K[None, :], other=0.0)
        high = tl.load(left_ptr + left_tile, mask=in_M & in_K[None, :], other=0.0)
        total += _sum_of_parts(low, middle, high, right)
        if EXTRA_N:
            extra_right = tl.load(right_ptr + extra_tile, mask=extra_in_N & in_K[:, None], other=0.0)
            extra_total += _sum_of_parts(low, middle, high, extra_right)
        rest -= BLOCK_K
        left_ptr += BLOCK_K * left_k
        right_ptr += BLOCK_K * right_k
    in_M = (first_m + m < M)[:, None]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + first_m + m[:, None], mask=in_M, other=0.0)
        total += bias
        if EXTRA_N:
            extra_total += bias
    out_ptr += m[:, None] * out_m
    tl.store(out_ptr + n[None, :] * out_n, total, mask=in_M & in_N)
    if EXTRA_N:
        tl.store(out_ptr + extra_n[None, :] * out_n, extra_total, mask=in_M & extra_in_N)


@fast_launch
@triton.jit(do_not_specialize=["splits"])
def _add_splits(sums_ptr, out_ptr, size, splits, BLOCK: tl.constexpr):
    """Adds the partial sums (splits, size) of each element, in their order, and rounds once to the dtype of out.

    Grid: (cdiv(size, BLOCK),).
    Example: partial sums [[1, 2], [10, 20]] give [11, 22].
    """
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    sums_ptr += element
    total = tl.load(sums_ptr, mask=inside, other=0.0)
    split = 1
    while split < splits:
        sums_ptr += size
        total += tl.load(sums_ptr, mask=inside, other=0.0)
        split += 1
    tl.store(out_ptr + element, total, mask=inside)


def _fill(parts: _Parts, values: Tensor) -> _Parts:
    R, C = values.shape
    size = parts.buffer.numel() // 4
    padded_C = parts.row if parts.slot > 0 else -parts.slot
    layout = parts.first, parts.slot, parts.row
    _split[(cdiv(size, _SPLIT_BLOCK),)](
        values.contiguous(), parts.buffer, *layout, size, R, C, PADDED_C=padded_C, BLOCK=_SPLIT_BLOCK
    )
    return parts


def _parts_of_weight(weight_EH: Tensor) -> _Parts:
    """Returns parts with a buffer (4, padded E, H)."""
    padded_E, H = _padded(weight_EH.shape[0]), weight_EH.shape[1]
    buffer = weight_EH.new_empty(4, padded_E, H, dtype=torch.bfloat16)
    return _fill(_Parts(buffer, 0, padded_E * H, H), weight_EH)


def _parts_of_gradient(dlogits_TE: Tensor) -> _Parts:
    """Returns parts with a buffer (T, 4, padded E), slots in reverse order."""
    T, padded_E = dlogits_TE.shape[0], _padded(dlogits_TE.shape[1])
    buffer = dlogits_TE.new_empty(T, 4, padded_E, dtype=torch.bfloat16)
    return _fill(_Parts(buffer, 3 * padded_E, -padded_E, 4 * padded_E), dlogits_TE)


def _padded(E: int) -> int:
    return cdiv(E, _ALIGNMENT) * _ALIGNMENT


def logits(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor | None) -> Tensor:
    """See RouterLinear in kernels/route/interface.py."""
    x_TH, weight = x_TH.contiguous(), _parts_of_weight(weight_EH)
    (T, H), E = x_TH.shape, weight_EH.shape[0]
    logits_TE = x_TH.new_empty(T, E, dtype=torch.float32)
    block_m = _rows_of_a_tile(E)
    extra = _extra_tokens(T, cdiv(E, block_m), x_TH.device)
    _multiply[(cdiv(E, block_m) * cdiv(T, _BLOCK_N + extra), 1)](
        weight.buffer,
        x_TH,
        logits_TE if bias_E is None else bias_E.contiguous(),
        logits_TE,
        *(E, _padded(E), T, H),
        *(weight.first, weight.slot, weight.row, 1),
        *(H, 1),
        *(0, 1, E),
        cdiv(H, _BLOCK_K),
        OVER_TOKENS=False,
        HAS_BIAS=bias_E is not None,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        EXTRA_N=extra,
        BLOCK_K=_BLOCK_K,
        num_warps=8,
    )
    return logits_TE


def _extra_tokens(T: int, tiles_m: int, device: torch.device) -> int:
    """Returns _EXTRA_N if wider tiles save enough waves of programs to be faster, else 0."""
    waves, wider_waves = (cdiv(tiles_m * cdiv(T, width), _PROGRAMS) for width in (_BLOCK_N, _BLOCK_N + _EXTRA_N))
    return _EXTRA_N if _EXTRA_N_COST * wider_waves < waves and _is_hopper(device) else 0


def _is_hopper(device: torch.device) -> bool:
    """Returns True on Hopper. Elsewhere Triton 3.6 compiles the wider tile to slower instructions."""
    return sm_major(device) == 9


def gradients(
    dlogits_TE: Tensor,
    x_TH: Tensor,
    weight_EH: Tensor,
    *,
    of_x: bool,
    of_weight: bool,
    dx_others_TH: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """See RouterLinear in kernels/route/interface.py."""
    dlogits = _parts_of_gradient(dlogits_TE)
    return (
        _gradient_of_x(dlogits, weight_EH, dx_others_TH) if of_x else None,
        _gradient_of_weight(dlogits, x_TH.contiguous(), weight_EH) if of_weight else None,
    )


def _gradient_of_x(dlogits: _Parts, weight_EH: Tensor, dx_others_TH: Tensor | None) -> Tensor:
    (T, slots, E), H = dlogits.buffer.shape, weight_EH.shape[1]
    left = dlogits.buffer.as_strided((T, 3 * E), (slots * E, 1), E)  # without slot 3
    right = _parts_of_weight(weight_EH).buffer.as_strided((3 * E, H), (H, 1))
    return left @ right if dx_others_TH is None else dx_others_TH.addmm_(left, right)


def _gradient_of_weight(dlogits: _Parts, x_TH: Tensor, weight_EH: Tensor) -> Tensor:
    (T, H), E = x_TH.shape, weight_EH.shape[0]
    block_m = _rows_of_a_tile(E)
    tiles = cdiv(E, block_m) * cdiv(H, _BLOCK_N)
    splits = item_of(_splits(tiles), smaller(cdiv(T, _MIN_ROWS_PER_SPLIT), _MAX_SPLITS))
    steps = cdiv(cdiv(T, splits), _BLOCK_K)
    splits = cdiv(T, steps * _BLOCK_K)
    dweight_EH = weight_EH.new_empty(E, H)
    sums_ZEH = dweight_EH if splits == 1 else x_TH.new_empty(splits, E, H, dtype=torch.float32)
    _multiply[(tiles, splits)](
        dlogits.buffer,
        x_TH,
        sums_ZEH,
        sums_ZEH,
        *(E, _padded(E), T, H),
        *(dlogits.first, dlogits.slot, 1, dlogits.row),
        *(1, H),
        *(E * H, H, 1),
        steps,
        OVER_TOKENS=True,
        HAS_BIAS=False,
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        EXTRA_N=0,
        BLOCK_K=_BLOCK_K,
        num_warps=8,
    )
    if splits > 1:
        size = dweight_EH.numel()
        _add_splits[(cdiv(size, _ADDED_BLOCK),)](sums_ZEH, dweight_EH, size, splits, BLOCK=_ADDED_BLOCK)
    return dweight_EH


@functools.cache
def _splits(tiles: int) -> list[int]:
    """Returns, by the most splits of a sum, the number with the least cost: few idle SMs in the last wave."""

    def cost(splits: int) -> float:
        return cdiv(tiles * splits, _PROGRAMS) / splits * (1 + _SPLIT_COST * splits)

    return [0, *(min(range(1, most + 1), key=cost) for most in range(1, _MAX_SPLITS + 1))]


def _rows_of_a_tile(E: int) -> int:
    return 64 if E <= 64 else 128
