"""`add_hidden_grads` as one Triton kernel, which reads and writes every value once.

A program handles one row of the pair buffer, some columns at a time, in fp32 (float64 operands in float64). A column of
A has EACH columns of H: gate and up, or one.

Legend: P rows of the pair buffer, J pre-activation columns (2I if gated else I), I expert width, Z partial sums of one
value.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sonic_ep.kernels.common.launch import fast_launch
from sonic_ep.kernels.common.sizes import next_power_of_2
from sonic_ep.kernels.experts.activations import Activation

_MAX_BLOCK = 1024  # columns of A at a time


class _Curve(NamedTuple):
    """f of activations.py. silu is x sigmoid(ALPHA x). LIMIT clamps gate and up, 0 for no limit; up counts + OFFSET."""

    CURVE: str
    ALPHA: float = 1.0
    LIMIT: float = 0.0
    OFFSET: float = 0.0


_CURVES = {
    "swiglu": _Curve("silu"),
    "swiglu_clamped": _Curve("silu", LIMIT=10.0),
    "swiglu_clamped_7": _Curve("silu", LIMIT=7.0),
    "swiglu_oai": _Curve("silu", ALPHA=1.702, LIMIT=7.0, OFFSET=1.0),
    "geglu": _Curve("gelu"),
    "geglu_erf": _Curve("gelu_erf"),
    "reglu": _Curve("relu"),
    "silu": _Curve("silu"),
    "gelu": _Curve("gelu"),
    "gelu_erf": _Curve("gelu_erf"),
    "relu": _Curve("relu"),
    "relu2": _Curve("relu2"),
}


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))  # of no positive number, which could overflow
    return tl.where(x >= 0, 1.0, small) / (1 + small)


@triton.jit
def _value_and_slope(x, CURVE: tl.constexpr, ALPHA: tl.constexpr):
    """Returns f(x) and f'(x)."""
    if CURVE == "silu":
        s = _sigmoid(ALPHA * x)
        value, slope = x * s, s * (1 + ALPHA * x * (1 - s))
    elif CURVE == "gelu":
        # (1 + tanh(z / 2)) / 2 is sigmoid(z)
        s = _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        value, slope = x * s, s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif CURVE == "gelu_erf":
        cdf = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value, slope = x * cdf, cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif CURVE == "relu":
        value, slope = tl.maximum(x, 0.0), tl.where(x > 0, 1.0, 0.0)
    else:
        r = tl.maximum(x, 0.0)
        value, slope = r * r, 2 * r
    return value, slope


@triton.jit
def _clamped(gate, up, LIMIT: tl.constexpr):
    if LIMIT > 0:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate, up


@fast_launch
@triton.jit
def _add_hidden_grads(
    dh_ptr,
    ds_ptr,
    h_ptr,
    da_ptr,
    weights_ptr,
    Z,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,
    CURVE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Adds to one row of dH and to one first partial sum of dS.

    A program reads h (P, J), da (P, I), weights (P,), and adds to dh (P, J) and ds (P, Z). Grid: (P,). Example: see
    reference.py.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights_ptr + row).to(ACCUMULATOR)
    ds = tl.zeros([BLOCK], dtype=ACCUMULATOR)
    for start in tl.static_range(0, WIDTH, BLOCK):
        columns, out = start * EACH + tl.arange(0, BLOCK * EACH), start + tl.arange(0, BLOCK)
        inside, at = columns < WIDTH * EACH, row * WIDTH * EACH + columns
        h = tl.load(h_ptr + at, mask=inside, other=0.0).to(ACCUMULATOR)
        da = tl.load(da_ptr + row * WIDTH + out, mask=out < WIDTH, other=0.0).to(ACCUMULATOR)
        if EACH == 2:
            gate, up = tl.split(tl.reshape(h, (BLOCK, 2)))
            cut_gate, cut_up = _clamped(gate, up, LIMIT)
            value, slope = _value_and_slope(cut_gate, CURVE, ALPHA)
            dgate, dup = da * (cut_up + OFFSET) * slope, da * value
            ds += dup * (cut_up + OFFSET)
            if LIMIT > 0:
                dgate = tl.where(gate <= LIMIT, dgate, 0.0)
                dup = tl.where(tl.abs(up) <= LIMIT, dup, 0.0)
            added = tl.interleave(dgate, dup)
        else:
            value, slope = _value_and_slope(h, CURVE, ALPHA)
            ds += da * value
            added = da * slope
        before = tl.load(dh_ptr + at, mask=inside, other=0.0).to(ACCUMULATOR)
        tl.store(dh_ptr + at, (before + weight * added).to(dh_ptr.dtype.element_ty), mask=inside)
    at = ds_ptr + row * Z
    total = tl.load(at).to(ACCUMULATOR) + tl.sum(ds, axis=0)
    tl.store(at, total.to(ds_ptr.dtype.element_ty))


def _constants(values_PI: Tensor, activation: Activation) -> dict[str, object]:
    width = values_PI.shape[1]
    return {
        "WIDTH": width,
        "EACH": 2 if activation.gated else 1,
        **_CURVES[activation.name]._asdict(),
        "BLOCK": min(_MAX_BLOCK, next_power_of_2(width)),
        "ACCUMULATOR": tl.float64 if values_PI.dtype == torch.float64 else tl.float32,
    }


def add_hidden_grads(
    dh_PJ: Tensor, ds_PZ: Tensor, h_PJ: Tensor, da_PI: Tensor, weights_P: Tensor, activation: Activation
) -> None:
    """See kernels/lora/reference.py."""
    P, Z = ds_PZ.shape
    if P:
        assert ds_PZ.is_contiguous()
        _add_hidden_grads[(P,)](dh_PJ, ds_PZ, h_PJ, da_PI, weights_P, Z, **_constants(da_PI, activation))
