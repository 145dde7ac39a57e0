"""What the router's kernels share: the layout of a tile of logits, and scores as torch computes them.

A tile holds some tokens' logits over all experts, padded to a power of two. Up to 1024 columns a program's one warp
reduces its rows by lanes alone; where a program is given more warps, they share rows of more than 128 columns.

Legend: T tokens on this rank, E experts.
"""

from typing import Any

import triton
import triton.language as tl

from sonic_ep.kernels.common.sizes import cdiv

# A warp holds so many values, of a row or of several, in its registers; 16 a lane.
_VALUES = 512
_MAX_COLUMNS_PER_WARP = 1024
# A constant number, so that sums over programs add the same terms on every device.
_MAX_PROGRAMS = 2048

_LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(-2.12194440e-4)


def tile_of(columns: int, warps: int = 1) -> dict[str, Any]:
    """Keyword arguments of a launch over rows of so many columns, a power of two. warps: of a program, unless a row
    needs more."""
    return {
        "COLUMNS": columns,
        "ROWS": max(1, warps * _VALUES // columns),
        "num_warps": min(16, max(warps, columns // _MAX_COLUMNS_PER_WARP)),
    }


def programs_for(rows: int, tile: dict[str, Any], share: int = 1) -> int:
    """How many programs walk over `rows` rows, where `share` such grids run side by side."""
    return max(1, min(cdiv(rows, tile["ROWS"]), _MAX_PROGRAMS // share))


@triton.jit
def exponential(x):
    """exp(x) to about two units in the last place: tl.exp loses |x| of them to the rounding of x * log2(e)."""
    x = tl.where(x < -104.0, -104.0, x)  # written so that NaN passes
    x = tl.where(x > 104.0, 104.0, x)
    n = tl.floor(x * _LOG2_E)
    rest = x - n * _LN2_HIGH - n * _LN2_LOW
    return tl.exp2(rest * _LOG2_E) * tl.exp2(n)


@triton.jit
def softmax(logits, inside):
    """Softmax over the columns that are inside, each row's largest logit, and its sum of exp(logit - largest)."""
    logits = tl.where(inside, logits, float("-inf"))
    largest = tl.max(logits, axis=1)
    terms = exponential(logits - largest[:, None])
    total = tl.sum(terms, axis=1)
    return terms * tl.div_rn(1.0, total)[:, None], largest, total


@triton.jit
def sigmoid(logits):
    return 1.0 / (1.0 + exponential(-logits))
