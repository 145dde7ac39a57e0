"""Epilogues of gpt-oss's activation: quack has its arithmetic, but no epilogue with the clamp of both gate and up.

Operands have the names of those in quack's epilogues of the other activations, so all activations launch alike.
"""

from sonic_ep.kernels.experts.quack_compat import (
    ColVecLoad,
    ColVecReduce,
    EpiMod,
    RowVecLoad,
    dswiglu_oai,
    gemm_epilogue,
    pack,
    swiglu_oai,
    unpack,
)

NAME = "swiglu_oai"
_LIMIT = 7.0  # clamp of gpt-oss's experts, as _GPT_OSS_LIMIT in activations.py


@gemm_epilogue(outputs=("mAuxOut",), mode="acc_pair")
def _up(acc):  # type: ignore[no-untyped-def]  # traced by quack, as are the functions below
    gate, up = unpack(acc)
    return {"D": pack(gate, up), "mAuxOut": swiglu_oai(gate, up, limit=_LIMIT)}


@gemm_epilogue(outputs=("mAuxOut",), ops={"mRowVecBroadcast": RowVecLoad("mRowVecBroadcast")}, mode="acc_pair")
def _up_with_bias(acc, mRowVecBroadcast):  # type: ignore[no-untyped-def]
    gate, up = unpack(acc + mRowVecBroadcast)
    return {"D": pack(gate, up), "mAuxOut": swiglu_oai(gate, up, limit=_LIMIT)}


@gemm_epilogue(
    outputs=("mAuxOut",),
    ops={"mColVecBroadcast": ColVecLoad("mColVecBroadcast")},
    reduces={"mColVecReduce": ColVecReduce("mColVecReduce", scaled=True)},
    mode="packed_cd_b16x2",
)
def down_backward(acc, c, mColVecBroadcast):  # type: ignore[no-untyped-def]
    """Epilogue of dA' = dO W2 that returns dH = act'(H) (s dA'), A' = s A and dS = <dA', A>. s: mColVecBroadcast."""
    gate, up = unpack(c)
    dgate, dup, out = dswiglu_oai(gate, up, acc * mColVecBroadcast, limit=_LIMIT)
    return {"D": pack(dgate, dup), "mAuxOut": out * mColVecBroadcast, "mColVecReduce": (out, acc)}


def up(*, bias: bool) -> EpiMod:
    """Returns the epilogue that computes H, with or without its bias, and A = act(H)."""
    return _up_with_bias if bias else _up
