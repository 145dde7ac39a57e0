"""Epilogues of gpt-oss's activation: quack has its arithmetic, but no ready epilogue with the clamp on both sides.

Operands are named as in quack's own epilogues of the other activations, so that a launch is the same for all.
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
_LIMIT = 7.0


@gemm_epilogue(outputs=("mAuxOut",), mode="acc_pair")
def _up(acc):  # type: ignore[no-untyped-def]  # traced by quack, as are those below
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
    """dH = dact(H, s dA) and A' = s A, with dS = sum A dA."""
    gate, up = unpack(c)
    dgate, dup, out = dswiglu_oai(gate, up, acc * mColVecBroadcast, limit=_LIMIT)
    return {"D": pack(dgate, dup), "mAuxOut": out * mColVecBroadcast, "mColVecReduce": (out, acc)}


def up(*, bias: bool) -> EpiMod:
    """H and A = act(H)."""
    return _up_with_bias if bias else _up
