"""Epilogues of gated activations that quack's library has not: three with clamps, and GEGLU with exact GELU.

quack has their arithmetic: `swiglu_oai`, `swiglu` and its clamps, and `gelu_erf`, which calls CUDA's erff.

Operands have the names of those in quack's epilogues of the other activations, so all activations launch alike.
"""

from collections.abc import Callable
from typing import NamedTuple

from cutlass import Float32

from sonic_ep.kernels.experts.quack_compat import (
    ColVecLoad,
    ColVecReduce,
    EpiMod,
    RowVecLoad,
    dgelu_erf,
    dswiglu,
    dswiglu_oai,
    gelu_erf,
    gemm_epilogue,
    max_with,
    min_with,
    pack,
    swiglu,
    swiglu_oai,
    unpack,
    where_abs_le,
    where_le,
)

# As in activations.py.
_GPT_OSS_LIMIT = 7.0
_SWIGLU_LIMIT = 10.0
_SWIGLU_LIMIT_7 = 7.0


_F32 = Float32 | tuple[Float32, Float32]  # a value, or a pair
_Gradients = tuple[_F32, _F32, _F32]  # of gate and up, and the activation


class GatedEpilogues(NamedTuple):
    """The epilogues of one activation.

    up, up_with_bias, up_accumulating: H, without or with its bias, or added to C, and A = act(H).
    down_backward: of dA' = dO W2; dH = act'(H) (s dA'), A' = s A and dS = <dA', A>, with s in mColVecBroadcast.
    """

    up: EpiMod
    up_with_bias: EpiMod
    up_accumulating: EpiMod
    down_backward: EpiMod


def _epilogues(act: Callable[[_F32, _F32], _F32], dact: Callable[[_F32, _F32, _F32], _Gradients]) -> GatedEpilogues:
    """act: (gate, up) -> A. dact: (gate, up, dA) -> dgate, dup, A. Both are traced."""

    @gemm_epilogue(outputs=("mAuxOut",), mode="acc_pair")
    def up(acc):  # type: ignore[no-untyped-def]  # traced by quack, as are the functions below
        gate, up = unpack(acc)
        return {"D": pack(gate, up), "mAuxOut": act(gate, up)}

    @gemm_epilogue(outputs=("mAuxOut",), ops={"mRowVecBroadcast": RowVecLoad("mRowVecBroadcast")}, mode="acc_pair")
    def up_with_bias(acc, mRowVecBroadcast):  # type: ignore[no-untyped-def]
        gate, up = unpack(acc + mRowVecBroadcast)
        return {"D": pack(gate, up), "mAuxOut": act(gate, up)}

    @gemm_epilogue(outputs=("mAuxOut",), mode="acc_pair")
    def up_accumulating(acc, c):  # type: ignore[no-untyped-def]
        gate, up = unpack(acc + c)
        return {"D": pack(gate, up), "mAuxOut": act(gate, up)}

    @gemm_epilogue(
        outputs=("mAuxOut",),
        ops={"mColVecBroadcast": ColVecLoad("mColVecBroadcast")},
        reduces={"mColVecReduce": ColVecReduce("mColVecReduce", scaled=True)},
        mode="packed_cd_b16x2",
    )
    def down_backward(acc, c, mColVecBroadcast):  # type: ignore[no-untyped-def]
        gate, up = unpack(c)
        dgate, dup, out = dact(gate, up, acc * mColVecBroadcast)
        return {"D": pack(dgate, dup), "mAuxOut": out * mColVecBroadcast, "mColVecReduce": (out, acc)}

    return GatedEpilogues(up, up_with_bias, up_accumulating, down_backward)


def _gpt_oss(gate: _F32, up: _F32) -> _F32:
    return swiglu_oai(gate, up, limit=_GPT_OSS_LIMIT)


def _gpt_oss_backward(gate: _F32, up: _F32, da: _F32) -> _Gradients:
    return dswiglu_oai(gate, up, da, limit=_GPT_OSS_LIMIT)


def _clamped(gate: _F32, up: _F32, limit: float) -> tuple[_F32, _F32]:
    return min_with(gate, limit), max_with(min_with(up, limit), -limit)


def _clamped_backward(gate: _F32, up: _F32, da: _F32, limit: float) -> _Gradients:
    dgate, dup, out = dswiglu(*_clamped(gate, up, limit), da)
    return where_le(dgate, gate, limit), where_abs_le(dup, up, limit), out


# Each limit has functions of its own, because quack knows a compiled epilogue by its functions' source.
def _swiglu_clamped(gate: _F32, up: _F32) -> _F32:
    return swiglu(*_clamped(gate, up, _SWIGLU_LIMIT))


def _swiglu_clamped_backward(gate: _F32, up: _F32, da: _F32) -> _Gradients:
    return _clamped_backward(gate, up, da, _SWIGLU_LIMIT)


def _swiglu_clamped_7(gate: _F32, up: _F32) -> _F32:
    return swiglu(*_clamped(gate, up, _SWIGLU_LIMIT_7))


def _swiglu_clamped_7_backward(gate: _F32, up: _F32, da: _F32) -> _Gradients:
    return _clamped_backward(gate, up, da, _SWIGLU_LIMIT_7)


def _geglu_erf(gate: _F32, up: _F32) -> _F32:
    return up * gelu_erf(gate)


def _geglu_erf_backward(gate: _F32, up: _F32, da: _F32) -> _Gradients:
    dgate, value = dgelu_erf(gate, da)
    return up * dgate, da * value, up * value


# By the names of activations.py.
EPILOGUES = {
    "geglu_erf": _epilogues(_geglu_erf, _geglu_erf_backward),
    "swiglu_clamped": _epilogues(_swiglu_clamped, _swiglu_clamped_backward),
    "swiglu_clamped_7": _epilogues(_swiglu_clamped_7, _swiglu_clamped_7_backward),
    "swiglu_oai": _epilogues(_gpt_oss, _gpt_oss_backward),
}
