"""The fused operations of kernels/experts/reference.py on quack's CuTe-DSL GEMMs, for Hopper and Blackwell.

quack (Dao-AILab/quack, Apache-2.0) provides variable-length grouped GEMMs with a gathered operand, and epilogues
written as functions of the accumulator. This module caches one *plan* (a compiled kernel and its launch recipe) per
operation and shape class and launches it for any number of rows: no plan depends on row counts. On Hopper our
overrides of quack's kernels apply, see sm90/row_gemm.py.

Legend: R rows this rank receives, H hidden size, P rows of the pair buffer, e local experts, I expert width, J
pre-activation columns (2I if gated else I).
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from sonic_ep.kernels.combine.gather_sum.triton import gather_sum
from sonic_ep.kernels.common.compile_process import wait_for
from sonic_ep.kernels.common.sizes import cdiv
from sonic_ep.kernels.experts.activations import Activation
from sonic_ep.kernels.experts.gated_epilogues import EPILOGUES
from sonic_ep.kernels.experts.quack_compat import (
    EpiMod,
    GemmConfig,
    RowVecLoad,
    dact_mod,
    dgated_mod,
    gemm_epilogue,
    get_device_capacity,
    identity_epi,
    leave_clusters,
    linear_act_mod,
)
from sonic_ep.kernels.experts.sm90.row_gemm import HopperMod, hopper_mod
from sonic_ep.kernels.experts.sm90.wgrad import WeightGemm
from sonic_ep.kernels.experts.split_gate_up import interleaved_view, split_gate_up_mod
from sonic_ep.kernels.experts.tile_counter import tile_counter
from sonic_ep.kernels.experts.tile_table import (
    EXCHANGE_SHARE,
    Operation,
    ReserveFor,
    TileConfig,
    reserved_clusters,
    tile_config,
)
from sonic_ep.kernels.interleave.triton import interleaved

__all__ = [
    "ACTIVATION_NAMES",
    "accumulate_product",
    "accumulate_up_projection",
    "bias_grad",
    "down_projection",
    "down_projection_backward",
    "gathered_bias_grad",
    "up_projection",
    "up_projection_backward",
    "weight_grad",
]

_LOG = logging.getLogger("sonic_ep.kernels")

# quack's names of our activations.
_QUACK_NAMES = {
    "swiglu": "swiglu",
    "geglu": "geglu",
    "reglu": "reglu",
    "gelu": "gelu_tanh_approx",
    "gelu_erf": "gelu_erf",
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu_sq",
}

_CLAMPED = frozenset({"swiglu_clamped", "swiglu_clamped_7", "swiglu_oai"})
# Activations whose derivative takes more registers than SwiGLU's: see down_backward_heavy in tile_table.py. So does
# ReLU's, as H of plain activations is not packed in pairs.
_HEAVY_BACKWARD = frozenset({"geglu", "geglu_erf", "gelu", "gelu_erf", "relu", *_CLAMPED})
# Activations of which the epilogue with a bias takes more registers: see up_heavy in tile_table.py.
_HEAVY_UP = frozenset({"gelu_erf", *_CLAMPED})
ACTIVATION_NAMES = frozenset({*_QUACK_NAMES, *EPILOGUES})


def _up_mod(activation: Activation, *, bias: bool = False, accumulate: bool = False) -> EpiMod:
    if (own := EPILOGUES.get(activation.name)) is not None:
        return own.up_accumulating if accumulate else own.up_with_bias if bias else own.up
    name, gated = _QUACK_NAMES[activation.name], activation.gated
    return linear_act_mod(name, gated=gated, has_c=accumulate, has_rowvec=bias, has_colvec=False)


def _down_backward_mod(activation: Activation) -> EpiMod:
    if (own := EPILOGUES.get(activation.name)) is not None:
        return own.down_backward
    mod_of = dgated_mod if activation.gated else dact_mod
    return mod_of(_QUACK_NAMES[activation.name], has_scale=True, has_reduce=True)


@gemm_epilogue(ops={"bias": RowVecLoad("bias")})
def _bias_epilogue(acc, bias):  # type: ignore[no-untyped-def]  # traced by quack
    return {"D": acc + bias}


@gemm_epilogue()
def _accumulating_epilogue(acc, c):  # type: ignore[no-untyped-def]
    return {"D": acc + c}


def _with_up_weights(mod: EpiMod, w1: Tensor, up_eIH: Tensor | None) -> tuple[EpiMod, Tensor]:
    """Returns the epilogue and the (e, J, H) operand of a GEMM with w1, or with the split gate/up weights w1 and up.

    Split weights are read in place where `interleaved_view` can describe them, else copied into one tensor.
    """
    if up_eIH is None:
        return mod, w1
    operand = interleaved_view(w1, up_eIH)
    if operand is None:
        _say_that_weights_are_copied()
        return mod, interleaved(w1, up_eIH)
    return split_gate_up_mod(mod), operand


@functools.cache
def _say_that_weights_are_copied() -> None:
    _LOG.info("gate and up weights are copied into one, some layers in some passes: up does not lie behind gate")


_PLANS: dict[tuple[object, ...], Any] = {}


def _run(
    key: tuple[object, ...],
    mod: EpiMod,
    tile: TileConfig,
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    *,
    reserve_for: ReserveFor | None = None,
    **arguments: Any,
) -> None:
    """Launches a GEMM over rows with the epilogue `mod`. The first launch of a shape class compiles the plan.

    key: what the plan depends on besides the epilogue, the tile and `reserve_for`, see `_class_key`.
    """
    operation = key[0]
    if get_device_capacity(A.device)[0] == 9:
        mod = hopper_mod(mod)
    key = (mod, tile, reserve_for, *key)
    plan = _PLANS.get(key)
    if plan is None:
        wait_for(str(operation))
        plan = mod.plan(A, B, C, config=_config(tile, A), **arguments)
        plan.scratch = {}  # quack's scratch is not needed: every launch passes its own buffer for partial sums
        if reserve_for == "exchange":
            leave_clusters(plan, EXCHANGE_SHARE)
        _PLANS[key] = plan
    counter = tile_counter(A, self_resetting=isinstance(mod, HopperMod)) if plan.config.is_dynamic_persistent else None
    plan.run(A, B, C, tile_count_semaphore=counter, **arguments)


def _tile(operation: Operation, N: int, other: int, tensor: Tensor, *, tile_aligned: bool = False) -> TileConfig:
    return tile_config(operation, N, other, get_device_capacity(tensor.device)[0], tile_aligned=tile_aligned)


def _config(tile: TileConfig, tensor: Tensor) -> GemmConfig:
    return GemmConfig(
        tile_m=tile.m,
        tile_n=tile.n,
        pingpong=tile.pingpong,
        cluster_m=tile.cluster_m,
        cluster_n=tile.cluster_n,
        is_dynamic_persistent=tile.dynamic,
        device_capacity=get_device_capacity(tensor.device)[0],
    )


def _class_key(operation: Operation, *tensors: Tensor | None) -> tuple[object, ...]:
    """Returns what a compiled kernel depends on: operation, device, dtypes, which dim of weights is contiguous, and all
    sizes except row counts.
    """
    sizes = tuple(
        None if t is None else (t.dtype, t.shape[1:] if t.dim() < 3 else (t.shape, t.stride(2) == 1)) for t in tensors
    )
    device = next(t.device for t in tensors if t is not None)
    return operation, device, sizes


def up_projection(
    x_RH: Tensor,
    w1: Tensor,
    b1_eJ: Tensor | None,
    row_of_pair_P: Tensor,
    expert_starts_e: Tensor,
    activation: Activation,
    up_eIH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See kernels/experts/reference.py."""
    P, J = row_of_pair_P.shape[0], w1.shape[1] if up_eIH is None else 2 * w1.shape[1]
    h_PJ = x_RH.new_empty(P, J)
    a_PI = x_RH.new_empty(P, J // 2 if activation.gated else J)
    if P == 0:
        return h_PJ, a_PI
    mod, w1_eJH = _with_up_weights(_up_mod(activation, bias=b1_eJ is not None), w1, up_eIH)
    arguments: dict[str, Any] = {"out": {"D": h_PJ, "mAuxOut": a_PI}, "cu_seqlens_m": expert_starts_e}
    arguments["A_idx"] = row_of_pair_P
    if b1_eJ is not None:
        arguments["mRowVecBroadcast"] = b1_eJ
    operation: Operation = "up_heavy" if activation.name in _HEAVY_UP and b1_eJ is not None else "up"
    tile = _tile(operation, J, x_RH.shape[1], x_RH)
    _run(_class_key("up", x_RH, w1_eJH, b1_eJ), mod, tile, x_RH, w1_eJH.mT, **arguments)
    return h_PJ, a_PI


def down_projection(
    a_PI: Tensor, w2_eHI: Tensor, b2_eH: Tensor | None, expert_starts_e: Tensor, *, tile_aligned: bool = False
) -> Tensor:
    """See kernels/experts/reference.py."""
    mod, arguments = (identity_epi, {}) if b2_eH is None else (_bias_epilogue, {"bias": b2_eH})
    return _grouped_rows("down", a_PI, w2_eHI.mT, expert_starts_e, mod, tile_aligned=tile_aligned, **arguments)


def up_projection_backward(
    dh_PJ: Tensor,
    w1: Tensor,
    expert_starts_e: Tensor,
    up_eIH: Tensor | None = None,
    *,
    tile_aligned: bool = False,
    reserve_for: ReserveFor | None = None,
) -> Tensor:
    """See kernels/experts/reference.py."""
    if dh_PJ.shape[0] == 0:
        return dh_PJ.new_empty(0, w1.shape[2])
    mod, w1_eJH = _with_up_weights(identity_epi, w1, up_eIH)
    options = {"tile_aligned": tile_aligned, "reserve_for": reserve_for}
    return _grouped_rows("up_backward", dh_PJ, w1_eJH, expert_starts_e, mod, **options)


def _grouped_rows(
    operation: Operation,
    rows_PK: Tensor,
    weights_eKN: Tensor,
    expert_starts_e: Tensor,
    mod: EpiMod,
    *,
    tile_aligned: bool,
    reserve_for: ReserveFor | None = None,
    **arguments: Any,
) -> Tensor:
    """Returns rows_PK @ weights_eKN[expert of the row] after the epilogue: (P, N) in the dtype of the rows."""
    P, K = rows_PK.shape
    N = weights_eKN.shape[2]
    out_PN = rows_PK.new_empty(P, N)
    if P == 0:
        return out_PN
    arguments |= {"out": {"D": out_PN}, "cu_seqlens_m": expert_starts_e}
    tile = _tile(operation, N, K, rows_PK, tile_aligned=tile_aligned)
    key = _class_key(operation, rows_PK, weights_eKN)
    _run(key, mod, tile, rows_PK, weights_eKN, reserve_for=reserve_for, **arguments)
    return out_PN


def accumulate_product(out_PN: Tensor, rows_PK: Tensor, weights_eKN: Tensor, expert_starts_e: Tensor) -> None:
    """See kernels/experts/reference.py."""
    _accumulate(_accumulating_epilogue, {"D": out_PN}, rows_PK, weights_eKN, expert_starts_e)


def accumulate_up_projection(
    h_PJ: Tensor, rows_PK: Tensor, weights_eKJ: Tensor, expert_starts_e: Tensor, activation: Activation
) -> Tensor:
    """See kernels/experts/reference.py."""
    P, J = h_PJ.shape
    a_PI = h_PJ.new_empty(P, J // 2 if activation.gated else J)
    out = {"D": h_PJ, "mAuxOut": a_PI}
    _accumulate(_up_mod(activation, accumulate=True), out, rows_PK, weights_eKJ, expert_starts_e)
    return a_PI


def _accumulate(
    mod: EpiMod, out: dict[str, Tensor], rows_PK: Tensor, weights_eKN: Tensor, expert_starts_e: Tensor
) -> None:
    """Launches a GEMM with an epilogue that adds C, which is D itself: a CTA reads each piece before it stores it."""
    if rows_PK.shape[0] == 0:
        return
    D = out["D"]
    tile = _tile("accumulate", D.shape[1], rows_PK.shape[1], rows_PK)
    _run(
        _class_key("accumulate", rows_PK, weights_eKN),
        mod,
        tile,
        rows_PK,
        weights_eKN,
        D,
        out=out,
        cu_seqlens_m=expert_starts_e,
    )


def down_projection_backward(
    do_RH: Tensor,
    w2_eHI: Tensor,
    b2_eH: Tensor | None,
    h_PJ: Tensor,
    weights_P: Tensor,
    row_of_pair_P: Tensor,
    expert_starts_e: Tensor,
    activation: Activation,
    *,
    reserve_for: ReserveFor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels/experts/reference.py."""
    P, (H, I) = h_PJ.shape[0], w2_eHI.shape[1:]  # noqa: E741
    dh_PJ, scaled_a_PI = h_PJ.new_empty(h_PJ.shape), h_PJ.new_empty(P, I)
    if P == 0:
        return dh_PJ, scaled_a_PI, weights_P[:, None]
    mod = _down_backward_mod(activation)
    operation: Operation = "down_backward_heavy" if activation.name in _HEAVY_BACKWARD else "down_backward"
    tile = _tile(operation, I, H, do_RH)
    # The epilogue writes one fp32 partial sum of dS per row and column tile.
    partial_PZ = torch.empty(P, cdiv(I, tile.n), dtype=torch.float32, device=h_PJ.device)
    arguments: dict[str, Any] = {
        "out": {"D": dh_PJ, "mAuxOut": scaled_a_PI},
        "cu_seqlens_m": expert_starts_e,
        "A_idx": row_of_pair_P,
        "mColVecBroadcast": weights_P.float(),
        "mColVecReduce": partial_PZ,
    }
    key = _class_key("down_backward", do_RH, w2_eHI, h_PJ)
    _run(key, mod, tile, do_RH, w2_eHI, h_PJ, reserve_for=reserve_for, **arguments)
    if b2_eH is not None:
        dots_P = _row_dots(do_RH, b2_eH, row_of_pair_P, expert_starts_e)
        partial_PZ = torch.cat((partial_PZ, dots_P[:, None]), 1)
    return dh_PJ, scaled_a_PI, partial_PZ.to(weights_P.dtype)


def weight_grad(
    left_PA: Tensor,
    right_RB: Tensor,
    row_of_pair_P: Tensor,
    expert_starts_e: Tensor,
    *,
    transposed: bool = False,
    split_gate_up: bool = False,
    out_eAB: Tensor | None = None,
    reserve_for: ReserveFor | None = None,
) -> Tensor:
    """See kernels/experts/reference.py."""
    A, B = left_PA.shape[1], right_RB.shape[1]
    e = expert_starts_e.shape[0] - 1
    accumulate = out_eAB is not None
    assert not (split_gate_up and (transposed or accumulate))
    out = left_PA.new_empty((e, B, A) if transposed else (e, A, B)) if out_eAB is None else out_eAB
    if left_PA.shape[0] == 0:
        return out if accumulate else out.zero_()
    operation: Operation = "weight_down" if transposed else "weight_up"
    # The gathered operand must be the GEMM's first one: out (e, B, A) = right^T[:, rows] left.
    D = out if transposed else out.mT
    key = (*_class_key(operation, left_PA, right_RB, out), accumulate, split_gate_up)
    gemm = _PLANS.get(key)
    if gemm is None:
        wait_for(operation)
        tile = _tile(operation, A, B, left_PA)
        gemm = _PLANS[key] = WeightGemm(right_RB.T, D, tile, accumulate=accumulate, split_gate_up=split_gate_up)
    reserved = reserved_clusters(reserve_for, A, gemm.clusters, get_device_capacity(left_PA.device)[0])
    counter = tile_counter(left_PA, self_resetting=True) if gemm.dynamic else None
    gemm.run(right_RB.T, left_PA.T, D, row_of_pair_P, expert_starts_e, counter, reserved)
    return out


def _expert_of_pair(expert_starts_e: Tensor, P: int) -> Tensor:
    """Returns the expert of each pair-buffer row, (P,) int64. Rows behind the last expert's get the last expert."""
    slots_P = torch.arange(P, dtype=expert_starts_e.dtype, device=expert_starts_e.device)
    return torch.searchsorted(expert_starts_e[1:-1], slots_P, right=True)


def _row_dots(do_RH: Tensor, b2_eH: Tensor, row_of_pair_P: Tensor, expert_starts_e: Tensor) -> Tensor:
    """Returns <dO[row], b2[expert]> of each pair, (P,) fp32, from the (R, e) table of all products, a thin GEMM."""
    table_Re = do_RH.float() @ b2_eH.float().T
    return table_Re[row_of_pair_P.long(), _expert_of_pair(expert_starts_e, row_of_pair_P.shape[0])]


def bias_grad(values_PB: Tensor, expert_starts_e: Tensor) -> Tensor:
    """See kernels/experts/reference.py."""
    pairs = torch.arange(values_PB.shape[0], dtype=torch.int32, device=values_PB.device)
    return gather_sum(values_PB, pairs, expert_starts_e)


def gathered_bias_grad(do_RH: Tensor, weights_P: Tensor, row_of_pair_P: Tensor, expert_starts_e: Tensor) -> Tensor:
    """See kernels/experts/reference.py."""
    e, R = expert_starts_e.shape[0] - 1, do_RH.shape[0]
    table_eR = torch.zeros(e, R, dtype=torch.float32, device=do_RH.device)
    expert_P = _expert_of_pair(expert_starts_e, weights_P.shape[0])
    # A pair has a place of its own, and padding adds zeros, so that the order of atomics changes no bit.
    table_eR.view(-1).scatter_add_(0, expert_P * R + row_of_pair_P, weights_P.float())
    # Rows that no pair reads are uninitialised and may hold inf or NaN, and 0 * inf is NaN.
    unused_R = (table_eR == 0).all(0)
    return (table_eR @ do_RH.to(torch.float32, copy=True).masked_fill_(unused_R[:, None], 0)).to(do_RH.dtype)
