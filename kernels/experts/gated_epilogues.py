"""Epilogues of gated activations that quack's library has not: gpt-oss's, with its clamp, and GEGLU with exact GELU.

quack has the arithmetic of both: `swiglu_oai`, and `gelu_erf`, which calls CUDA's erff.

Operands have the names of those in quack's epilogues of the other activations, so all activations launch alike.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from sonic_ep.kernels.experts.quack_compat import (
    ColVecLoad,
    ColVecReduce,
    EpiMod,
    RowVecLoad,
    dgelu_erf,
    dswiglu_oai,
    gelu_erf,
    gemm_epilogue,
    pack,
    swiglu_oai,
    unpack,
)

_LIMIT = 7.0  # clamp of gpt-oss's experts, as _GPT_OSS_LIMIT in activations.py


class GatedEpilogues(NamedTuple):
    """The epilogues of one activation.

    up, up_with_bias: H, without or with its bias, and A = act(H). down_backward: of dA' = dO W2; dH = act'(H) (s dA'),
    A' = s A and dS = <dA', A>, with s in mColVecBroadcast.
    """

    up: EpiMod
    up_with_bias: EpiMod
    down_backward: EpiMod


def _epilogues(act: Callable[..., Any], dact: Callable[..., Any]) -> GatedEpilogues:
    """act: (gate, up) -> A. dact: (gate, up, dA) -> dgate, dup, A. Both are traced on fp32 values, or pairs of them."""

    @gemm_epilogue(outputs=("mAuxOut",), mode="acc_pair")
    def up(acc):  # type: ignore[no-untyped-def]  # traced by quack, as are the functions below
        gate, up = unpack(acc)
        return {"D": pack(gate, up), "mAuxOut": act(gate, up)}

    @gemm_epilogue(outputs=("mAuxOut",), ops={"mRowVecBroadcast": RowVecLoad("mRowVecBroadcast")}, mode="acc_pair")
    def up_with_bias(acc, mRowVecBroadcast):  # type: ignore[no-untyped-def]
        gate, up = unpack(acc + mRowVecBroadcast)
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

    return GatedEpilogues(up, up_with_bias, down_backward)


def _gpt_oss(gate: Any, up: Any) -> Any:
    return swiglu_oai(gate, up, limit=_LIMIT)


def _gpt_oss_backward(gate: Any, up: Any, da: Any) -> Any:
    return dswiglu_oai(gate, up, da, limit=_LIMIT)


def _geglu_erf(gate: Any, up: Any) -> Any:
    return up * gelu_erf(gate)


def _geglu_erf_backward(gate: Any, up: Any, da: Any) -> Any:
    dgate, value = dgelu_erf(gate, da)
    return up * dgate, da * value, up * value


# By the names of activations.py.
EPILOGUES = {
    "geglu_erf": _epilogues(_geglu_erf, _geglu_erf_backward),
    "swiglu_oai": _epilogues(_gpt_oss, _gpt_oss_backward),
}
