"""Shared by the router's kernels: the layout of a tile of logits, and scores computed as accurately as torch does.

A tile holds the logits of some tokens over all experts, padded to a power of two columns. Up to 1024 columns, a program
of one warp reduces its rows within the warp. In a program of several warps, rows of more than 128 columns are shared by
the warps.

Legend: T tokens on this rank, E experts.
"""

import triton
import triton.language as tl

from sonic_ep.kernels.common.sizes import cdiv

# Values, of one row or of several, that a warp holds in its registers: 16 per lane.
_VALUES = 512
_MAX_COLUMNS_PER_WARP = 1024
# A constant, so that sums over programs add the same terms on every device.
_MAX_PROGRAMS = 2048

_LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440e-4)


def tile_of(columns: int, warps: int = 1) -> dict[str, int]:
    """Returns the launch arguments COLUMNS, ROWS and num_warps for rows of `columns` columns, a power of two.

    warps: warps of a program; wide rows get more.
    """
    return {
        "COLUMNS": columns,
        "ROWS": max(1, warps * _VALUES // columns),
        "num_warps": min(16, max(warps, columns // _MAX_COLUMNS_PER_WARP)),
    }


def programs_for(rows: int, tile: dict[str, int], share: int = 1) -> int:
    """Returns the number of programs that loop over `rows` rows. share: how many such grids run concurrently."""
    return max(1, min(cdiv(rows, tile["ROWS"]), _MAX_PROGRAMS // share))


@triton.jit
def exponential(x):
    """Returns exp(x) with an error of about 2 ulp. tl.exp has about |x| ulp, because it rounds x * log2(e)."""
    x = tl.where(x < -104.0, -104.0, x)  # tl.where instead of tl.maximum, so that NaN stays NaN
    x = tl.where(x > 104.0, 104.0, x)
    n = tl.floor(x * _LOG2_E)
    rest = x - n * _LN2_HIGH - n * _LN2_LOW
    return tl.exp2(rest * _LOG2_E) * tl.exp2(n)


@triton.jit
def softmax(logits, inside):
    """Returns the softmax over the columns that are `inside`, and for each row the largest logit and the sum of
    exp(logit - largest)."""
    logits = tl.where(inside, logits, float("-inf"))
    largest = tl.max(logits, axis=1)
    terms = exponential(logits - largest[:, None])
    total = tl.sum(terms, axis=1)
    return terms * tl.div_rn(1.0, total)[:, None], largest, total


@triton.jit
def sigmoid(logits):
    """Returns 1 / (1 + exp(-logits))."""
    return 1.0 / (1.0 + exponential(-logits))
