"""The fused operations of kernels/experts/reference.py on quack's CuTe-DSL GEMMs, for Hopper and Blackwell.

quack (Dao-AILab/quack, Apache-2.0) provides variable-length grouped GEMMs with a gathered operand, and epilogues
written as functions of the accumulator. This module keeps one launcher of a compiled kernel for each operation
and shape class, and launches it for any number of rows: none depends on row counts. On Hopper our
overrides of quack's kernels apply, see sm90/row_gemm.py.

Legend: R rows this rank receives, H hidden size, P rows of the pair buffer, e local experts, I expert width, J
pre-activation columns (2I if gated else I).
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from sonic_ep.kernels.combine.gather_sum.triton import gather_sum
from sonic_ep.kernels.common.compile_process import wait_for
from sonic_ep.kernels.common.sizes import cdiv
from sonic_ep.kernels.experts.activations import Activation
from sonic_ep.kernels.experts.gated_epilogues import EPILOGUES
from sonic_ep.kernels.experts.quack_compat import (
    EpiLauncher,
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
from sonic_ep.kernels.experts.sm90.row_gemm import hopper_mod
from sonic_ep.kernels.experts.sm90.wgrad import WeightGemm
from sonic_ep.kernels.experts.split_gate_up import interleaved_view, readable, split_gate_up_mod, view_of_slots
from sonic_ep.kernels.experts.tile_counter import tile_counter
from sonic_ep.kernels.experts.tile_table import (
    EXCHANGE_SHARE,
    Operation,
    ReserveFor,
    TileConfig,
    reserved_clusters,
    tile_config,
)
from sonic_ep.kernels.lora.low_rank import row_numbers
from sonic_ep.kernels.program.trace import Slot, by_torch

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
_AUXILIARY = "mAuxOut"  # quack's name of an epilogue's second output


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


def _operand_of(w1: Tensor, up_eIH: Tensor | None) -> Tensor:
    """Returns the (e, J, H) operand of a GEMM with w1; with split gate/up weights one for a `split_gate_up_mod`.

    Those are the results of `readable`, which the operand does not keep alive.
    """
    if up_eIH is None:
        return w1
    operand = view_of_slots(w1, up_eIH) if isinstance(w1, Slot) else interleaved_view(w1, up_eIH)
    assert operand is not None
    return operand


_LAUNCHERS: dict[tuple[object, ...], EpiLauncher] = {}
_WEIGHT_GEMMS: dict[tuple[object, ...], WeightGemm] = {}


def _run(
    key: tuple[object, ...],
    plan: Callable[[], tuple[EpiMod, TileConfig]],
    A: Tensor,
    B: Tensor,
    D: Tensor,
    starts: Tensor,
    *,
    C: Tensor | None = None,
    rows: Tensor | None = None,
    reserve_for: ReserveFor | None = None,
    **operands: Tensor,
) -> None:
    """Launches a GEMM over rows. The first launch of a key compiles it.

    key: what the kernel depends on besides device, dtype, the sizes and the order of B, and `reserve_for`; first the
    operation. plan: returns its epilogue and tile. operands: of the epilogue, and its outputs other than D.
    """
    key = (*key, A.get_device(), A.dtype, B.shape, B.stride(2) == 1, reserve_for)
    launcher = _LAUNCHERS.get(key)
    if launcher is None:
        tensors = [_of_kind(each) for each in (A, B, D, starts, C, rows)]
        samples = {name: _of_kind(each) for name, each in operands.items()}
        launcher = _LAUNCHERS[key] = _compiled(str(key[0]), *plan(), tensors, reserve_for, samples)
    counter = None
    if launcher.needs_counter:  # kernels for Hopper leave it at zero
        counter = tile_counter(A, self_resetting=True)
    launcher.run(A, B, D, C, tuple(operands.values()), starts, rows, counter)


def _of_kind(tensor: Tensor | None) -> Tensor | None:
    """Returns a tensor for what is compiled by the kind of one."""
    return tensor.sample() if isinstance(tensor, Slot) else tensor


def _compiled(
    operation: str,
    mod: EpiMod,
    tile: TileConfig,
    tensors: list[Tensor],
    reserve_for: ReserveFor | None,
    operands: dict[str, Tensor],
) -> EpiLauncher:
    A, B, D, starts, C, rows = tensors
    wait_for(operation)
    mod = hopper_mod(mod) if get_device_capacity(A.device)[0] == 9 else mod
    out = {"D": D, **{name: each for name, each in operands.items() if name == _AUXILIARY}}
    others = {name: each for name, each in operands.items() if name not in out}
    plan = mod.plan(A, B, C, config=_config(tile, A), out=out, cu_seqlens_m=starts, A_idx=rows, **others)
    if reserve_for == "exchange":
        leave_clusters(plan, EXCHANGE_SHARE)
    return EpiLauncher(plan, tuple(operands))


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
    bias = {} if b1_eJ is None else {"mRowVecBroadcast": b1_eJ}
    w1, up_eIH = (w1, None) if up_eIH is None else readable(w1, up_eIH)
    w1_eJH, is_split = _operand_of(w1, up_eIH), up_eIH is not None

    def plan() -> tuple[EpiMod, TileConfig]:
        operation: Operation = "up_heavy" if activation.name in _HEAVY_UP and b1_eJ is not None else "up"
        mod = _up_mod(activation, bias=b1_eJ is not None)
        return split_gate_up_mod(mod) if is_split else mod, _tile(operation, J, x_RH.shape[1], x_RH)

    key = "up", activation.name, b1_eJ is None, is_split
    _run(key, plan, x_RH, w1_eJH.mT, h_PJ, expert_starts_e, rows=row_of_pair_P, mAuxOut=a_PI, **bias)
    return h_PJ, a_PI


def down_projection(
    a_PI: Tensor, w2_eHI: Tensor, b2_eH: Tensor | None, expert_starts_e: Tensor, *, tile_aligned: bool = False
) -> Tensor:
    """See kernels/experts/reference.py."""
    mod, operands = (identity_epi, {}) if b2_eH is None else (_bias_epilogue, {"bias": b2_eH})
    return _grouped_rows("down", a_PI, w2_eHI.mT, expert_starts_e, mod, tile_aligned=tile_aligned, **operands)


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
    w1, up_eIH = (w1, None) if up_eIH is None else readable(w1, up_eIH)
    w1_eJH, mod = _operand_of(w1, up_eIH), identity_epi if up_eIH is None else split_gate_up_mod(identity_epi)
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
    **operands: Tensor,
) -> Tensor:
    """Returns rows_PK @ weights_eKN[expert of the row] after the epilogue: (P, N) in the dtype of the rows."""
    P, K = rows_PK.shape
    N = weights_eKN.shape[2]
    out_PN = rows_PK.new_empty(P, N)
    if P == 0:
        return out_PN

    def plan() -> tuple[EpiMod, TileConfig]:
        return mod, _tile(operation, N, K, rows_PK, tile_aligned=tile_aligned)

    key = operation, mod, tile_aligned
    _run(key, plan, rows_PK, weights_eKN, out_PN, expert_starts_e, reserve_for=reserve_for, **operands)
    return out_PN


def accumulate_product(out_PN: Tensor, rows_PK: Tensor, weights_eKN: Tensor, expert_starts_e: Tensor) -> None:
    """See kernels/experts/reference.py."""
    _accumulate(_accumulating_epilogue, out_PN, rows_PK, weights_eKN, expert_starts_e)


def accumulate_up_projection(
    h_PJ: Tensor, rows_PK: Tensor, weights_eKJ: Tensor, expert_starts_e: Tensor, activation: Activation
) -> Tensor:
    """See kernels/experts/reference.py."""
    P, J = h_PJ.shape
    a_PI = h_PJ.new_empty(P, J // 2 if activation.gated else J)
    mod = _up_mod(activation, accumulate=True)
    _accumulate(mod, h_PJ, rows_PK, weights_eKJ, expert_starts_e, mAuxOut=a_PI)
    return a_PI


def _accumulate(
    mod: EpiMod, D: Tensor, rows_PK: Tensor, weights_eKN: Tensor, expert_starts_e: Tensor, **outputs: Tensor
) -> None:
    """Launches a GEMM with an epilogue that adds C, which is D itself: a CTA reads each piece before it stores it."""
    if rows_PK.shape[0] == 0:
        return

    def plan() -> tuple[EpiMod, TileConfig]:
        return mod, _tile("accumulate", D.shape[1], rows_PK.shape[1], rows_PK)

    _run(("accumulate", mod), plan, rows_PK, weights_eKN, D, expert_starts_e, C=D, **outputs)


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
    tile = _down_backward_tile(activation.name, I, H, do_RH.device)
    # The epilogue writes one fp32 partial sum of dS per row and column tile.
    partial_PZ = h_PJ.new_empty(P, cdiv(I, tile.n), dtype=torch.float32)
    _run(
        ("down_backward", activation.name),
        lambda: (_down_backward_mod(activation), tile),
        do_RH,
        w2_eHI,
        dh_PJ,
        expert_starts_e,
        C=h_PJ,
        rows=row_of_pair_P,
        reserve_for=reserve_for,
        mAuxOut=scaled_a_PI,
        mColVecBroadcast=weights_P.float(),
        mColVecReduce=partial_PZ,
    )
    if b2_eH is not None:
        operands = partial_PZ, do_RH, b2_eH, row_of_pair_P, expert_starts_e
        partial_PZ = by_torch(_with_row_dots, (P, partial_PZ.shape[1] + 1), torch.float32, *operands)
    return dh_PJ, scaled_a_PI, partial_PZ.to(weights_P.dtype)


@functools.cache
def _down_backward_tile(activation: str, I: int, H: int, device: torch.device) -> TileConfig:  # noqa: E741
    operation: Operation = "down_backward_heavy" if activation in _HEAVY_BACKWARD else "down_backward"
    return tile_config(operation, I, H, get_device_capacity(device)[0])


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
    # The gathered operand must be the GEMM's first one: out (e, B, A) = right^T[:, rows] left.
    D, device = out if transposed else out.mT, left_PA.get_device()
    key = transposed, split_gate_up, accumulate, device, left_PA.dtype, out.dtype, out.shape
    gemm = _WEIGHT_GEMMS.get(key)
    if gemm is None:
        operation: Operation = "weight_down" if transposed else "weight_up"
        wait_for(operation)
        tile = _tile(operation, A, B, left_PA)
        gemm = WeightGemm(_of_kind(right_RB.T), _of_kind(D), tile, accumulate=accumulate, split_gate_up=split_gate_up)
        _WEIGHT_GEMMS[key] = gemm
    reserved = 0
    if reserve_for is not None:
        reserved = reserved_clusters(reserve_for, A, gemm.clusters, get_device_capacity(left_PA.device)[0])
    counter = tile_counter(left_PA, self_resetting=True) if gemm.dynamic else None
    gemm.run(right_RB.T, left_PA.T, D, row_of_pair_P, expert_starts_e, counter, reserved)
    return out


def _expert_of_pair(expert_starts_e: Tensor, P: int) -> Tensor:
    """Returns the expert of each pair-buffer row, (P,) int64. Rows behind the last expert's get the last expert."""
    slots_P = torch.arange(P, dtype=expert_starts_e.dtype, device=expert_starts_e.device)
    return torch.searchsorted(expert_starts_e[1:-1], slots_P, right=True)


def _with_row_dots(
    partial_PZ: Tensor, do_RH: Tensor, b2_eH: Tensor, row_of_pair_P: Tensor, expert_starts_e: Tensor
) -> Tensor:
    """Returns partial sums of dS with one more, <dO[row], b2[expert]>, (P, Z + 1) fp32.

    It is from the (R, e) table of all products, a thin GEMM.
    """
    table_Re = do_RH.float() @ b2_eH.float().T
    dots_P = table_Re[row_of_pair_P.long(), _expert_of_pair(expert_starts_e, row_of_pair_P.shape[0])]
    return torch.cat((partial_PZ, dots_P[:, None]), 1)


def bias_grad(values_PB: Tensor, expert_starts_e: Tensor) -> Tensor:
    """See kernels/experts/reference.py."""
    pairs = by_torch(row_numbers, (values_PB.shape[0],), torch.int32, values_PB)
    return gather_sum(values_PB, pairs, expert_starts_e)


def gathered_bias_grad(do_RH: Tensor, weights_P: Tensor, row_of_pair_P: Tensor, expert_starts_e: Tensor) -> Tensor:
    """See kernels/experts/reference.py."""
    shape, operands = (expert_starts_e.shape[0] - 1, do_RH.shape[1]), (weights_P, row_of_pair_P, expert_starts_e)
    return by_torch(_gathered_bias_grad, shape, do_RH.dtype, do_RH, *operands)


def _gathered_bias_grad(do_RH: Tensor, weights_P: Tensor, row_of_pair_P: Tensor, expert_starts_e: Tensor) -> Tensor:
    e, R = expert_starts_e.shape[0] - 1, do_RH.shape[0]
    table_eR = torch.zeros(e, R, dtype=torch.float32, device=do_RH.device)
    expert_P = _expert_of_pair(expert_starts_e, weights_P.shape[0])
    # A pair has a place of its own, and padding adds zeros, so that the order of atomics changes no bit.
    table_eR.view(-1).scatter_add_(0, expert_P * R + row_of_pair_P, weights_P.float())
    # Rows that no pair reads are uninitialised and may hold inf or NaN, and 0 * inf is NaN.
    unused_R = (table_eR == 0).all(0)
    return (table_eR @ do_RH.to(torch.float32, copy=True).masked_fill_(unused_R[:, None], 0)).to(do_RH.dtype)
